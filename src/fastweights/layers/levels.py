"""Weights of the levels of log-linear attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fastweights.layers.functions import split_heads, upcast
from fastweights.layers.linear import Linear
from fastweights.shapes import Embedded, Levels


class LevelWeights(nn.Module):
    """λ_t^(l) = softplus(c^(l) (x_t W)^(l)), for every head (2506.04761, section 3.4).

    Args:
        d: Channels of x.
        heads: Heads h.
        count: Levels l.
    """

    def __init__(self, d: int, heads: int, count: int) -> None:
        super().__init__()
        self.W = Linear(d, heads * count, bias=False)
        self.scale = nn.Parameter(torch.empty(heads, count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Embedded) -> Levels:
        """λ ``[b t h l]``, in float32 or wider."""
        return F.softplus(upcast(self.scale) * split_heads(self.W(x), len(self.scale)))
