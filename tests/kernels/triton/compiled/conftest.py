"""Kernels compiled for GPUs that need not be there; a process that interprets compiles none."""

from __future__ import annotations

from fastweights.kernels.triton.launch import INTERPRETED

if INTERPRETED:
    collect_ignore_glob = ["test_*.py"]
