"""Small functions of tensors that projections share."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def split_heads(x: Tensor, count: int) -> Tensor:
    """``[b t h·w]`` → ``[b t h w]``."""
    return x.unflatten(-1, (count, -1))


def both_ways(x: Tensor) -> Tensor:
    """``[b t …]`` → ``[2b t …]``: every sequence as it is, then every sequence from its end."""
    return torch.cat([x, x.flip(1)])


def head_numbers(count: int, x: Tensor) -> Tensor:
    """0 … count-1 as ``[1 1 h 1]``, in `upcast`'s dtype: for decays that are constants of the
    head's number.
    """
    return torch.arange(count, device=x.device, dtype=accumulate_dtype(x))[None, None, :, None]


def accumulate_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which decays and angles are computed: that of x, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def upcast(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider: decays and angles are computed so."""
    return x.to(accumulate_dtype(x))


def l2_normalize(x: Tensor, floor: float = 0.0) -> Tensor:
    """x / √(|x|² + floor) over the last axis; a floor above 0 is for weights that were trained with
    one.
    """
    if floor == 0:
        return F.normalize(x, dim=-1)
    return x * (upcast(x).square().sum(-1, keepdim=True) + floor).rsqrt().to(x.dtype)


def log_gate(x: Tensor, lower: float) -> Tensor:
    """log(lower + (1 - lower) σ(x)): a decay that stays above `lower` (HGRN eq. 5)."""
    x = F.logsigmoid(upcast(x))
    return x if lower == 0 else torch.logaddexp(x + math.log1p(-lower), x.new_tensor(lower).log())
