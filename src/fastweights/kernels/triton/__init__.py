"""The kernels for NVIDIA GPUs, written in Triton: entries of the kernel table.

A rule has a module here, which prepares and launches, and one in `device`, which holds the kernels.
Triton is imported by the first launch.
"""

from __future__ import annotations

from fastweights.kernels.table import Kernel
from fastweights.kernels.triton.decay import TRITON_DECAY, TRITON_NORMALIZED
from fastweights.kernels.triton.delta import TRITON_DELTA, TRITON_DPLR
from fastweights.kernels.triton.mesa import TRITON_MESA
from fastweights.kernels.triton.scan import SCAN_KERNEL, SELECTIVE_SCAN_KERNEL
from fastweights.kernels.triton.steps import STEPS
from fastweights.kernels.triton.windowed import TRITON_WINDOW
from fastweights.kernels.triton.windowed_token import TRITON_WINDOW_TOKEN

TRITON: list[Kernel] = [
    *STEPS,
    TRITON_WINDOW_TOKEN,
    SCAN_KERNEL,
    SELECTIVE_SCAN_KERNEL,
    TRITON_DECAY,
    TRITON_NORMALIZED,
    TRITON_DELTA,
    TRITON_DPLR,
    TRITON_MESA,
    TRITON_WINDOW,
]
"""In the order in which they are asked."""
