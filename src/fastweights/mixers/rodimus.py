"""Rodimus*: Breaking the Accuracy-Efficiency Trade-Off with Efficient Attentions (He et al., 2024),
its layer without a window.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    LowRank,
    ShortConvolution,
    TokenContext,
    l2_normalize,
    project_each,
    softplus_power,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Recurrence
from fastweights.shapes import Embedded, Output


class Rodimus(Mixer):
    """
    f_q  h W_Q                     f_α  e^(-g_t ⊙ τ_t),  g_t = softplus(h W_g + b_g)
    f_k  L2(h W_K) ⊙ g_t^τ_t       f_g  SiLU(x W_z)
    f_v  σ(u W¹ W² + b) ⊙ u        d_v = expand·d,  d_k = N,  H = 1

    with u = x W_U, h = SiLU(conv(u) + b), temperatures τ_t = σ(h W_τ + b_τ), q scaled by N^(-1/2),
    and y = RMSNorm((o + D ⊙ h) ⊙ f_g) W_O.

    Attributes:
        state: N
        rank: width of the bottleneck in f_v; None for d / 64, at least 16
    """

    def __init__(
        self,
        d: int,
        state: Count = 64,
        expand: Count = 2,
        conv: Count = 4,
        rank: Count | None = None,
        eps: Positive = 1e-5,
    ) -> None:
        super().__init__(d)
        width, rank = expand * d, max(d // 64, 16) if rank is None else rank
        self.scale = state**-0.5
        self.W_u, self.W_z = Linear(d, width, bias=False), Linear(d, width, bias=False)
        self.conv = ShortConvolution(width, conv)
        self.conv_bias = nn.Parameter(torch.zeros(width))
        self.W_q, self.W_k = Linear(width, state, bias=False), Linear(width, state, bias=False)
        self.W_g, self.W_tau = Linear(width, state), Linear(width, state)
        self.W_i = LowRank(width, rank, width, bias=True)
        self.D, self.W_o = nn.Parameter(torch.ones(width)), Linear(width, d, bias=False)
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)
        nn.init.zeros_(self.conv_bias)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        gate, u = project_each(x, self.W_z, self.W_u)
        h = self.conv(u, past, self.conv_bias, silu=True)
        q, k, *gates = project_each(h, self.W_q, self.W_k, self.W_g, self.W_tau)
        g, tau = upcast(gates[0]), upcast(gates[1]).sigmoid()
        k = l2_normalize(k) * softplus_power(g, tau).to(k.dtype)
        streams = (q * self.scale, k, self.W_i(u).sigmoid() * u, -F.softplus(g) * tau)
        gate = torch.cat([F.silu(gate), h], dim=-1)
        return Decay(*(s[:, :, None] for s in streams)), gate

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        gate, h = gate.chunk(2, dim=-1)
        return self.W_o(self.norm((o.flatten(-2) + self.D * h) * gate))
