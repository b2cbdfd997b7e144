"""Longhorn: State Space Models are Amortized Online Learners (Liu et al., 2024)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import Linear, ShortConvolution, TokenContext, project_each, upcast
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Recurrence
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded, Output


class Longhorn(Mixer):
    """
    f_q  x W_Q             f_α  1 - Δ_t k_t²,  Δ_t = β_t / (1 + β_t |k_t|²)
    f_k  x W_K             f_β  σ(x W¹_β W²_β + b_β), one per channel
    f_v  Δ_t ⊙ x           f_g  SiLU(u W_z)
    d_v = H = expand·d,  d_k / H = N

    with x = SiLU(conv(u W_u) + b) of the layer's input u, and o_t ← o_t + D ⊙ x_t: one step of an
    online regression of x on k, of which the diagonal is kept. Every channel decays every key at a
    rate of its own; k is one for all channels.

    Attributes:
        state: N, the state rows per channel
        rank: width of the bottleneck in β; None for d / 16, rounded up
    """

    def __init__(
        self,
        d: int,
        state: Count = 16,
        expand: Count = 2,
        conv: Count = 4,
        rank: Count | None = None,
    ) -> None:
        super().__init__(d)
        width, rank = expand * d, math.ceil(d / 16) if rank is None else rank
        self.W_u, self.W_z = Linear(d, width, bias=False), Linear(d, width, bias=False)
        self.conv = ShortConvolution(width, conv)
        self.conv_bias = nn.Parameter(torch.zeros(width))
        self.W_q, self.W_k = Linear(width, state, bias=False), Linear(width, state, bias=False)
        self.W_beta_1, self.W_beta_2 = Linear(width, rank, bias=False), Linear(rank, width)
        self.D, self.W_o = nn.Parameter(torch.ones(width)), Linear(width, d, bias=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)
        nn.init.zeros_(self.conv_bias)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        gate, x = project_each(x, self.W_z, self.W_u)
        x = self.conv(x, past, self.conv_bias, silu=True)
        beta, q, k = project_each(x, self.W_beta_1, self.W_q, self.W_k)
        beta, square = upcast(self.W_beta_2(beta)).sigmoid(), upcast(k).square()
        delta = beta / (1 + beta * square.sum(-1, keepdim=True))
        log_alpha = torch.log1p(-delta[..., None] * square[:, :, None])
        v = (delta.to(with_room(x).dtype) * x)[..., None]
        gate = torch.cat([F.silu(with_room(gate)), x], dim=-1)
        return Decay(q[:, :, None], k[:, :, None], v, log_alpha), gate

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        gate, x = gate.chunk(2, dim=-1)
        return self.W_o((o.flatten(-2) + self.D * x) * gate)
