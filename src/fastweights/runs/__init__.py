"""Runs that survive being killed: files, locks, checkpoints, metrics, clocks, signals and
optimisers."""
