"""Norms of heads and of the stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.ops.normalization import center, layer_normalize, rms_normalize


class SiLUGate(NamedTuple):
    """An output gate that is SiLU of its logits, for a norm to make where it multiplies by it.

    Attributes:
        logits: ``[b t h·v]``
    """

    logits: Tensor

    @property
    def tensor(self) -> Tensor:
        return F.silu(self.logits)


Gate = Tensor | SiLUGate | None
"""What an output ``[b t h·v]`` is multiplied by; None for 1."""


class HeadNorm(nn.Module):
    """A norm over the last axis ``[… width]``, such as that of the heads' values.

    Args:
        width: The length of the last axis.
        center: Whether the mean is subtracted: LayerNorm with it, RMSNorm without.
        affine: Whether there are learnt weights.
        eps: What is added to the mean square.
    """

    def __init__(self, width: int, *, center: bool, affine: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.center, self.eps = center, eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.width = width

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, o: Tensor, gate: Gate = None) -> Tensor:
        """The norm of o, times the gate."""
        silu = isinstance(gate, SiLUGate)
        given = gate.logits if silu else gate
        given, weight = None if given is None else given.reshape(o.shape), self.weight
        if self.center:
            if weight is not None and weight.dtype is torch.float16:
                weight = weight.to(o.dtype)
            return layer_normalize(o, weight, self.eps, given, silu=silu)
        if weight is not None and o.dtype is not weight.dtype:
            dtype = torch.promote_types(o.dtype, weight.dtype)
            o, weight = o.to(dtype), weight.to(dtype)
        return rms_normalize(o, weight, self.eps, given, silu=silu)


class WholeNorm(HeadNorm):
    """A norm of the values of all heads ``[… h v]`` as one vector of `width` = h·v channels."""

    def forward(self, o: Tensor, gate: Gate = None) -> Tensor:
        return super().forward(o.flatten(-2), gate).view_as(o)


class GroupNorm(nn.Module):
    """LayerNorm of the values ``[… h v]`` of every head, with weights and biases of its own."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads, width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, o: Tensor) -> Tensor:
        return layer_normalize(o, None, self.eps, None, silu=False) * self.weight + self.bias


class CenteredNorm(nn.LayerNorm):
    """LayerNorm of the model width."""

    def forward(self, input: Tensor) -> Tensor:
        return center(input, self.weight, self.bias, self.eps)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": partial(HeadNorm, center=False, affine=True),
    "layer": CenteredNorm,
    "simple_rms": partial(HeadNorm, center=False, affine=False),
}
"""Norms of the model width by name, called as (d, eps=…)."""
