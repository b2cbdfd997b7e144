"""The gated short convolution of LFM2 (Liquid AI, 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastweights.layers import Linear, ShortConvolution, TokenContext, project_each
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.shapes import Embedded


class GatedShortConvolution(Mixer):
    """
    f_q  1                            f_α  0
    f_k  1                            f_g  x W_C
    f_v  conv(x W_B ⊙ x W_U)          d_k = H = 1,  d_v = d

    A layer that sees the last few tokens and no others: its memory is the convolution's tail.

    Attributes:
        conv: how many tokens it sees
        bias: of the projections and the convolution
    """

    def __init__(self, d: int, conv: Count = 3, bias: bool = False) -> None:
        super().__init__(d)
        self.W_B, self.W_C, self.W_u, self.W_o = (Linear(d, d, bias=bias) for _ in range(4))
        self.conv = ShortConvolution(d, conv)
        self.conv_bias = nn.Parameter(torch.empty(d)) if bias else None
        self.norm = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.conv_bias is not None:
            nn.init.zeros_(self.conv_bias)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        u, opened, gate = project_each(x, self.W_u, self.W_B, self.W_C)
        v = self.conv(opened * u, past, self.conv_bias)
        one = torch.ones_like(v[:1, :1, :1, None])
        return Decay(one, one, v[:, :, None], torch.full_like(one, -torch.inf)), gate
