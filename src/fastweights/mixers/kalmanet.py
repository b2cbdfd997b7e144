"""Gated KalmaNet (Peng et al., 2025)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fastweights.layers import (
    LEAST_LOG,
    HeadNorm,
    Linear,
    ShortConvolution,
    SiLUGate,
    TokenContext,
    bounded_exp,
    head_width,
    init_softplus_decay,
    l2_normalize,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Chebyshev, Kalman
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class GatedKalmaNet(Mixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))      f_γ  exp(-a softplus(x W_γ + b_γ)), one per head
    f_k  β L2(SiLU(conv(x W_K)))    f_β  σ(x W_β + b_β), one per head
    f_v  β SiLU(conv(x W_V))        f_μ  σ(x W_μ + b_μ), one per head
    f_g  SiLU(x W_G)                d_k = d_v = d

    with o scaled by d'_k^(-1/2), RMSNorm per head. σ is at least 2⁻²³: what is read does not depend
    on how large all keys are, however small.

    Attributes:
        ratio: λ_t / ‖H_t‖
        steps: of Chebyshev iteration
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self, d: int, heads: int = 4, ratio: Positive = 0.02, steps: Count = 30, conv: Count = 4,
        eps: Positive = 1e-6, floor: NonNegative = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.scale, self.floor = heads, width**-0.5, floor
        self.ratio, self.solver = ratio, Chebyshev(steps)
        self.W_q, self.W_k, self.W_v, self.W_g, self.W_o = (
            Linear(d, d, bias=False) for _ in range(5)
        )
        self.W_beta, self.W_mu, self.W_gamma = (Linear(d, heads) for _ in range(3))
        self.conv_q, self.conv_k, self.conv_v = (ShortConvolution(d, conv) for _ in range(3))
        self.log_a = nn.Parameter(torch.empty(heads))
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `init_softplus_decay` says, but for a, uniform in [0, 16]."""
        init_softplus_decay(self.log_a, self.W_gamma.bias, least=1e-4)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Kalman, SiLUGate]:
        q, k, v, beta, mix, gamma, gate = project_each(
            x, self.W_q, self.W_k, self.W_v, self.W_beta, self.W_mu, self.W_gamma, self.W_g
        )
        q, k, v = (
            split_heads(conv(with_room(s), past, silu=True), self.heads)
            for conv, s in ((self.conv_q, q), (self.conv_k, k), (self.conv_v, v))
        )
        q, k = l2_normalize(q, self.floor), l2_normalize(k, self.floor)
        beta, mix = (with_room(s).clamp(min=LEAST_LOG).sigmoid()[..., None] for s in (beta, mix))
        log_gamma = -bounded_exp(self.log_a) * F.softplus(upcast(gamma))
        return Kalman(
            self.scale * q, beta * k, beta * v, log_gamma[..., None], mix, self.ratio, self.solver
        ), SiLUGate(gate)
