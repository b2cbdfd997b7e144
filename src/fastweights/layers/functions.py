"""Small functions of tensors that projections share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


def l2_normalize(x: Tensor, floor: float = 0.0) -> Tensor:
    """Divide x by √(|x|² + floor) over the last axis.

    A floor above 0 is for imported weights that were trained with one.
    """
    if floor == 0:
        return F.normalize(x, dim=-1)
    return x * (upcast(x).square().sum(-1, keepdim=True) + floor).rsqrt().to(x.dtype)


def log_gate(x: Tensor, lower: float) -> Tensor:
    """Compute log(lower + (1 - lower) σ(x)): the log of a decay above `lower` (HGRN eq. 5)."""
    x = F.logsigmoid(upcast(x))
    return x if lower == 0 else torch.logaddexp(x + math.log1p(-lower), x.new_full((), lower).log())


def init_steps(bias: Tensor) -> None:
    """Fill with b for which softplus(b) is log-uniform in [0.001, 0.1], as Mamba-2 starts."""
    with torch.no_grad():
        step = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        nn.init.zeros_(bias).add_(step + torch.log(-torch.expm1(-step)))
