"""Hyena Hierarchy: Towards Larger Convolutional Language Models (Poli et al., 2023), with heads of
several channels as in Massaroli et al., 2023.
"""

from __future__ import annotations

import torch
from torch import nn

from fastweights.layers import (
    ImplicitFilter,
    Linear,
    ShortConvolution,
    TokenContext,
    head_width,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import LongConvolution
from fastweights.shapes import Embedded


class Hyena(Mixer):
    """
    f_q  conv(x W_Q)        f_α  h_τ after τ tokens
    f_k  conv(x W_K)        f_g  1
    f_v  conv(x W_V)        d_k = d_v = d

    with o_t = Σ_s h_{t-s} (q_t·k_s) v_s, a long convolution per head whose filter h is made of
    positions: h_τ = e^(-δτ/(l-1)) MLP(z_τ) + D [τ = 0], see `ImplicitFilter`. What lies behind the
    filter's length is not seen. Of as many heads as channels it is Hyena of order two; in one of
    several channels each key meets each value. All projections and short convolutions have biases.

    Attributes:
        length: l, tokens that the filter reaches, the present one included
        width: of the filter's MLP
        bands: frequencies of its positions
        frequency: ω of its sines, at the start
        conv: size of the short convolutions
    """

    def __init__(
        self,
        d: int,
        heads: Count = 8,
        length: Count = 1024,
        width: Count = 64,
        bands: Count = 16,
        frequency: Positive = 14.0,
        conv: Count = 3,
    ) -> None:
        super().__init__(d)
        head_width("d", d, heads)
        self.heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d, d) for _ in range(4))
        self.conv = ShortConvolution(3 * d, conv)
        self.conv_bias = nn.Parameter(torch.empty(3 * d))
        self.filter = ImplicitFilter(heads, length, width, bands, frequency)
        self.norm = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.conv_bias)

    def project(self, x: Embedded, past: TokenContext) -> tuple[LongConvolution, None]:
        streams = torch.cat(project_each(x, self.W_q, self.W_k, self.W_v), -1)
        streams = self.conv(streams, past, self.conv_bias).chunk(3, -1)
        q, k, v = (split_heads(s, self.heads) for s in streams)
        return LongConvolution(q, k, v, self.filter()), None
