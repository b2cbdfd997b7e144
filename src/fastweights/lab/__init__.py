"""The laboratory: tasks, sweeps, evaluations, benchmarks and the papers' claims. The core never
imports it.
"""
