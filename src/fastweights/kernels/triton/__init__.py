"""The kernels for NVIDIA GPUs, written in Triton: entries of the kernel table.

A rule has a module here, which prepares and launches, and one in `device`, which holds the kernels.
Triton is imported by the first launch.
"""

from __future__ import annotations

from fastweights.kernels.table import Kernel

TRITON: list[Kernel] = []
"""In the order in which they are asked."""
