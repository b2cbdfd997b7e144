"""The loop, and runs that survive being killed: checkpoints, resumption, metrics, processes."""
