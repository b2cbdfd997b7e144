"""The optional compiled kernels: C without Python or torch headers, called through ctypes with raw
pointers.

They are built with the package where a C compiler is found, and `python -m
fastweights.kernels.native` builds them in place. Without them the torch kernels take over; a
warning and `explain` say so.
"""

from fastweights.kernels.native import operators
from fastweights.kernels.native.decay_delta import (
    NATIVE_DECAY,
    NATIVE_DELTA,
    NATIVE_DPLR,
    NATIVE_IN_PAGES,
    NATIVE_SCAN,
    NATIVE_SELECTIVE,
)

__all__ = [
    "NATIVE_DECAY",
    "NATIVE_DELTA",
    "NATIVE_DPLR",
    "NATIVE_IN_PAGES",
    "NATIVE_SCAN",
    "NATIVE_SELECTIVE",
    "operators",
]
