"""How close is close enough: one number per dtype, for every test."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}


SAME = 1e-5
"""Two ways to the same float32 numbers that differ only in the order of sums."""


def array(x: Tensor | np.ndarray) -> np.ndarray:
    """x in float64 or complex128."""
    if isinstance(x, np.ndarray):
        return x
    return x.detach().to(torch.promote_types(x.dtype, torch.float64)).numpy()


def error(got: Tensor | np.ndarray, want: Tensor | np.ndarray, floor: float = 1.0) -> float:
    """‖got - want‖ / max(‖want‖, floor); the tests' streams have unit scale, so that `floor` is a
    vanishing norm.
    """
    got, want = array(got), array(want)
    assert got.shape == want.shape, f"shapes {got.shape} and {want.shape}"
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), floor)) if got.size else 0.0


def assert_close(
    got: Tensor,
    want: Tensor | np.ndarray,
    what: str,
    dtype: torch.dtype | None = None,
    floor: float = 1.0,
) -> None:
    """`got` is finite and within the tolerance of `dtype` (that of `got`) from `want`."""
    assert torch.isfinite(got).all(), f"{what} is not finite"
    found, allowed = error(got, want, floor), TOLERANCE[dtype or got.dtype]
    assert found <= allowed, f"{what}: relative error {found:.2e} exceeds {allowed:.0e}"
