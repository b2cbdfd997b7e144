"""Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences (2604.21100,
2026), on gated DeltaNet.
"""

from __future__ import annotations

import torch
from torch import nn

from fastweights.layers import (
    HeadNorm,
    Linear,
    ShortConvolution,
    SiLUGate,
    SoftplusDecay,
    TokenContext,
    head_width,
    l2_normalize,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Preconditioned
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class PreconditionedGatedDeltaNet(Mixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_α  exp(-a softplus(x W_α + b_α)), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))            f_γ  exp(-a' softplus(x W_γ + b_γ)), one per head
    f_g  SiLU(x W_G)                  f_ρ  σ(x W_ρ), one per head
    d_k = expand_k·d,  d_v = expand_v·d, RMSNorm per head, q scaled by d'_k^(-1/2)

    The delta rule whose writes k are multiplied by M of A_t = γ_t A_{t-1} + ρ_t k_t², see
    `Preconditioned`.

    Attributes:
        negative: f_β = 2 σ(x W_β): eigenvalues down to -1 for M = 1 (Grazzi et al., 2024)
        spread: 1/spread ≤ M ≤ spread
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_k: Positive = 0.75,
        expand_v: Positive = 1.5,
        conv: Count = 4,
        negative: bool = False,
        spread: Positive = 1.5,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        super().__init__(d)
        keys, values = round(expand_k * d), round(expand_v * d)
        self.heads, self.floor, self.spread = heads, floor, spread
        self.largest = 2.0 if negative else 1.0
        self.scale = head_width("d_k", keys, heads) ** -0.5
        self.W_q, self.W_k = Linear(d, keys, bias=False), Linear(d, keys, bias=False)
        self.W_v, self.W_g = Linear(d, values, bias=False), Linear(d, values, bias=False)
        self.W_beta, self.W_alpha = Linear(d, heads, bias=False), Linear(d, heads, bias=False)
        self.W_rho, self.W_gamma = Linear(d, heads, bias=False), Linear(d, heads, bias=False)
        self.W_o = Linear(values, d, bias=False)
        self.conv_q, self.conv_k = ShortConvolution(keys, conv), ShortConvolution(keys, conv)
        self.conv_v = ShortConvolution(values, conv)
        self.decay, self.fade = SoftplusDecay(heads), SoftplusDecay(heads)
        self.center = nn.Parameter(torch.empty(heads))
        width = head_width("d_v", values, heads)
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """c = -0.2."""
        nn.init.constant_(self.center, -0.2)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Preconditioned, SiLUGate]:
        layers = (self.W_q, self.W_k, self.W_v, self.W_beta, self.W_rho, self.W_alpha)
        *streams, gamma, gate = project_each(x, *layers, self.W_gamma, self.W_g)
        q, k, v, beta, rate, alpha = streams
        q = split_heads(self.conv_q(with_room(q), past, silu=True), self.heads)
        k = split_heads(self.conv_k(with_room(k), past, silu=True), self.heads)
        q, k = l2_normalize(q, self.floor), l2_normalize(k, self.floor)
        v = split_heads(self.conv_v(v, past, silu=True), self.heads)
        beta, rate = (with_room(s).sigmoid()[..., None] for s in (beta, rate))
        beta = self.largest * beta
        curvature = (rate, self.fade(gamma), self.center[None, None, :, None])
        rule = Preconditioned(
            q * self.scale, k, v, beta, self.decay(alpha), *curvature, self.spread
        )
        return rule, SiLUGate(gate)
