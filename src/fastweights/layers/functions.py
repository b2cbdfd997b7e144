"""Small functions of tensors that projections share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded, Mask

LARGEST = 40.0
"""The square of e to this power has room in float32."""

LEAST_LOG = math.log(torch.finfo(torch.float32).eps)
"""The log of what is no more than a rounding error of 1 in float32."""

EXPONENTIAL = -37.0
"""Below this softplus(x) is e^x to the last digit of float64."""

STEEPEST = 1000.0
"""The largest slope of a square root."""


def split_heads(x: Tensor, count: int) -> Tensor:
    """Split the channels ``[b t h·w]`` into `count` heads ``[b t h w]``."""
    return x.unflatten(-1, (count, -1))


def both_ways(x: Tensor) -> Tensor:
    """Stack every sequence ``[b t …]`` as it is and from its end: ``[2b t …]``."""
    return torch.cat([x, x.flip(1)])


def head_numbers(count: int, x: Tensor) -> Tensor:
    """Number the heads 0 … count-1 as a stream ``[1 1 h 1]``, for decays that depend on the head
    alone (RetNet).

    Args:
        count: The number of heads h.
        x: A tensor with the device, and by `accumulate_dtype` the dtype, of the result.
    """
    return torch.arange(count, device=x.device, dtype=accumulate_dtype(x))[None, None, :, None]


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which decays and angles are computed: that of x, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """Convert x to `accumulate_dtype`: float32, or its own dtype if that is wider."""
    return x.to(accumulate_dtype(x))


def gated_halves(x: Tensor) -> Tensor:
    """GLU: ``[… 2w]`` → ``[… w]``, a σ(b) of x = (a ‖ b).

    The forward-mode derivative of torch's own has no gradient.
    """
    a, b = x.chunk(2, -1)
    return a * b.sigmoid()


def l2_normalize(x: Tensor, floor: float = 0.0) -> Tensor:
    """Divide x by √(|x|² + floor) over the last axis, in float32 where x is of float16.

    Without a floor, a norm below 1e-12, or below x's smallest normal number, counts as that, and
    x = 0 stays 0, of no slope. A floor above 0 is for imported weights that were trained with one.
    """
    wide = with_room(x)
    if floor == 0:
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        least = max(1e-12, torch.finfo(x.dtype).tiny)
        return (wide / F.threshold(norm, 0, math.inf).clamp_min(least)).to(x.dtype)
    inverse = (upcast(x).square().sum(-1, keepdim=True) + floor).rsqrt()
    return (wide * inverse.to(wide.dtype)).to(x.dtype)


def bounded_exp(x: Tensor) -> Tensor:
    """Compute e^x in float32 or wider, of x between ±`LARGEST`.

    A decay at the rate e^40 leaves nothing and one at e^-40 everything, in any precision; their
    slopes, which would be 0 · ∞, are 0.
    """
    return upcast(x).clamp(-LARGEST, LARGEST).exp()


def complement_root(log_alpha: Tensor) -> Tensor:
    """Compute √(1 - α²), with a slope of at most `STEEPEST` as α tends to 1 (Griffin's code)."""
    square = -torch.expm1(2 * log_alpha)
    if not torch.is_grad_enabled():
        return square.sqrt()
    steepest = STEEPEST**-2 / 4  # where the slope 1 / √(4x) reaches the bound
    fixed = square.detach()
    near = fixed.sqrt() + STEEPEST * (square - fixed)
    return torch.where(fixed < steepest, near, square.clamp(min=steepest).sqrt())


def log_gate(x: Tensor, lower: float) -> Tensor:
    """Compute log(lower + (1 - lower) σ(x)): the log of a decay above `lower` (HGRN eq. 5)."""
    x = F.logsigmoid(upcast(x))
    return x if lower == 0 else torch.logaddexp(x + math.log1p(-lower), x.new_full((), lower).log())


def softplus_power(x: Tensor, exponent: Tensor) -> Tensor:
    """Compute softplus(x)^exponent, where softplus is e^x exactly below `EXPONENTIAL`."""
    far = x < EXPONENTIAL
    near = F.softplus(x.masked_fill(far, 0)) ** exponent
    return torch.where(far, (exponent * x.clamp(max=EXPONENTIAL)).exp(), near)


def init_steps(bias: Tensor) -> None:
    """Fill with b for which softplus(b) is log-uniform in [0.001, 0.1], as Mamba-2 starts."""
    with torch.no_grad():
        step = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        nn.init.zeros_(bias).add_(step + torch.log(-torch.expm1(-step)))


def _mean(x: Embedded, keep: Mask) -> Tensor:
    return x.masked_fill(~keep[..., None], 0).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


def _first(x: Embedded, keep: Mask) -> Tensor:
    return x[torch.arange(len(x), device=x.device), keep.int().argmax(1)]


def _last(x: Embedded, keep: Mask) -> Tensor:
    return _first(x.flip(1), keep.flip(1))


POOLINGS: dict[str, Callable[[Embedded, Mask], Tensor]] = {
    "mean": _mean,
    "first": _first,
    "last": _last,
}
"""Ways to make one vector ``[b d]`` of a sequence ``x [b t d]``, by name; ``keep [b t]`` is False
for padding.
"""
