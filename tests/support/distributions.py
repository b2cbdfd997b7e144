"""Whether samples come from the law that they should come from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

Sample = Tensor | np.ndarray | Sequence[float]


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed or 0)


def assert_same_law(ours: Sample, theirs: Sample, what: str) -> None:
    """The means of two independent samples are within five standard errors."""
    a, b = np.asarray(ours, float), np.asarray(theirs, float)
    error = np.sqrt(a.var() / len(a) + b.var() / len(b))
    assert abs(a.mean() - b.mean()) <= 5 * error + 1e-12, (
        f"{what}: {a.mean():.5f} and {b.mean():.5f} ± {error:.1e}"
    )


def assert_frequencies(counts: np.ndarray, p: np.ndarray, what: str) -> None:
    """Every count is within five standard deviations of its binomial law."""
    n = counts.sum()
    assert (abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1).all(), (
        f"{what}: {counts} of {n * p}"
    )
