"""What the losses of all stages share."""

from __future__ import annotations

import torch
from torch import Tensor, ones_like

from fastweights.layers import upcast
from fastweights.runs.ranges import NON_NEGATIVE_NUMBER
from fastweights.shapes import Mask, Output


def require_factors(loss: object, *factors: float) -> None:
    """Check the factors of a loss's terms.

    Raises:
        ValueError: If one is negative, infinite or NaN, or all are 0.
    """
    if not all(factor in NON_NEGATIVE_NUMBER for factor in factors) or sum(factors) == 0:
        raise ValueError(
            f"{loss}: all factors must be at least 0 and finite, and one of them above 0"
        )


def output_error(o: Output, target: Output, keep: Mask | None) -> Tensor:
    """Compute the relative squared error Σ‖o - target‖² / Σ‖target‖² of outputs ``[b t h v]``."""
    rows = ones_like(target[..., :1]) if keep is None else keep[..., None, None]
    total = ((o - upcast(target)) * rows).square().sum()
    return total / squared_size(target, keep).clamp(min=torch.finfo(total.dtype).tiny)


def squared_size(target: Output, keep: Mask | None) -> Tensor:
    """Compute Σ‖target‖² of outputs ``[b t h v]``."""
    rows = ones_like(target[..., :1]) if keep is None else keep[..., None, None]
    return (upcast(target) * rows).square().sum()


def count_tokens(target: Tensor, keep: Mask | None) -> Tensor:
    """Count the tokens of ``[b t …]`` that are not padding."""
    kept = target.new_ones(target.shape[:2]) if keep is None else keep
    return kept.sum(dtype=upcast(target).dtype)
