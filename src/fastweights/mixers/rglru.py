"""RG-LRU: Griffin, Mixing Gated Linear Recurrences with Local Attention (De et al., 2024); DSF eq.
21.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    Linear,
    ShortConvolution,
    TokenContext,
    complement_root,
    head_width,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class RGLRU(Mixer):
    """
    f_q  1                         f_α  σ(Λ)^(c σ(x W_a + b_a)), c = 8
    f_k  √(1 - α²)                 f_g  GELU(u W_g + b_g)
    f_v  σ(x W_x + b_x) ⊙ x        d_k = d_v = H = expand·d

    with x = conv(u W_u + b_u) + b of the layer's input u: the recurrent block of Griffin, and Hawk.
    W_a and W_x are block-diagonal. The paper's text starts σ(Λ)^c, its released code σ(Λ), between
    0.9 and 0.999; here the text holds.

    Attributes:
        heads: the blocks of W_a and W_x
        whole_start: f_k = 1 at the first token of a document, as in the released code
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand: Positive = 1.0,
        conv: Count = 4,
        c: Positive = 8.0,
        whole_start: bool = False,
    ) -> None:
        super().__init__(d)
        width = round(expand * d)
        block = head_width("expand · d", width, heads)
        self.heads, self.c, self.whole_start = heads, c, whole_start
        self.W_u, self.W_g = Linear(d, width), Linear(d, width)
        self.conv = ShortConvolution(width, conv)
        self.conv_bias = nn.Parameter(torch.empty(width))
        self.Lambda = nn.Parameter(torch.empty(width))
        self.W_a, self.W_x = (nn.Parameter(torch.empty(heads, block, block)) for _ in range(2))
        self.b_a, self.b_x = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.W_o = Linear(width, d)
        self.norm = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """σ(Λ)^c uniform in [0.9, 0.999]; normal weights of variance 1 / fan-in; no biases."""
        with torch.no_grad():
            log_a = nn.init.uniform_(self.Lambda, 0.9, 0.999).log_().div_(self.c)
            self.Lambda.copy_(log_a - torch.log(-torch.expm1(log_a)))
        for bias in (self.conv_bias, self.b_a, self.b_x):
            nn.init.zeros_(bias)
        for weight in (self.W_a, self.W_x):
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1]))

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        gate, x = project_each(x, self.W_g, self.W_u)
        gate = F.gelu(gate, approximate="tanh")
        x = self.conv(x, past, self.conv_bias)
        heads = split_heads(x, self.heads).flatten(0, 1).transpose(0, 1)
        r, i = (
            with_room(torch.bmm(heads, weight).transpose(0, 1).reshape(x.shape) + bias).sigmoid()
            for weight, bias in ((self.W_a, self.b_a), (self.W_x, self.b_x))
        )
        log_alpha = (self.c * upcast(r) * F.logsigmoid(upcast(self.Lambda)))[..., None]
        one, k = torch.ones_like(x[:1, :1, :1, None]), complement_root(log_alpha)
        if self.whole_start:
            k = k.masked_fill((past.positions == 0)[..., None, None], 1)
        return Decay(one, k, (i * x)[..., None], log_alpha), gate
