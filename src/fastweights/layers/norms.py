"""Norms of heads and of the stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.ops.normalization import rms_normalize


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

    def forward(self, o: Tensor) -> Tensor:
        if self.center:
            return F.layer_norm(o, (self.width,), self.weight, None, self.eps)
        if self.weight is None:
            return rms_normalize(o, None, self.eps)
        dtype = torch.promote_types(o.dtype, self.weight.dtype)
        return rms_normalize(o.to(dtype), self.weight.to(dtype), self.eps)


class WholeNorm(HeadNorm):
    """A norm of the values of all heads ``[… h v]`` as one vector of `width` = h·v channels."""

    def forward(self, o: Tensor) -> Tensor:
        return super().forward(o.flatten(-2)).view_as(o)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": partial(HeadNorm, center=False, affine=True),
    "layer": nn.LayerNorm,
    "simple_rms": partial(HeadNorm, center=False, affine=False),
}
"""Norms of the model width by name, called as (d, eps=…)."""
