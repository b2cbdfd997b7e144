"""Durable runs: files, locks, checkpoints, metrics, clocks, signals and optimisers."""
