"""Gated DeltaNet (Yang, Kautz & Hatamizadeh, 2024), and with a state for every age of tokens:
log-linear gated DeltaNet (Guo et al., 2025).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from fastweights.layers import (
    HeadNorm,
    LevelWeights,
    SiLUGate,
    TokenContext,
    head_width,
    init_softplus_decay,
    project_each,
    softplus_decay,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import DeltaMixer
from fastweights.recurrence import Delta, LogLinear
from fastweights.shapes import Embedded


class GatedDeltaNet(DeltaMixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_α  exp(-a softplus(x W_α + b_α)), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))            f_g  SiLU(x W_G)
    d_k = expand_k·d,  d_v = expand_v·d, RMSNorm per head, q scaled by d'_k^(-1/2)

    Attributes:
        value_heads: how many heads v has, the same number of them for each head of q and k;
            None for one
        negative: f_β = 2 σ(x W_β): I - β kᵀk has eigenvalues down to -1 (Grazzi et al., 2024)
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_k: Positive = 0.75,
        expand_v: Positive = 1.5,
        conv: Count = 4,
        value_heads: Count | None = None,
        negative: bool = False,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        keys, values = round(expand_k * d), round(expand_v * d)
        super().__init__(d, heads, head_width("d_k", keys, heads), negative=negative, floor=floor)
        count = heads if value_heads is None else value_heads
        self.served = head_width("value_heads", count, heads)
        self.add_layers(q=keys, k=keys, v=values, alpha=count, beta=count, g=values)
        self.add_convolutions(values, conv)
        self.log_a = nn.Parameter(torch.empty(count))
        self.b_alpha = nn.Parameter(torch.empty(count))
        width = head_width("d_v", values, count)
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `init_softplus_decay` says."""
        init_softplus_decay(self.log_a, self.b_alpha)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Delta | LogLinear, SiLUGate]:
        q, k, v, beta, alpha, gate = project_each(
            x, self.W_q, self.W_k, self.W_v, self.W_beta, self.W_alpha, self.W_g
        )
        streams = self.streams(past, q, k, v)
        log_alpha = softplus_decay(alpha, self.log_a, self.b_alpha)
        return Delta(*streams, self.beta(beta), log_alpha), SiLUGate(gate)


class LogLinearGatedDeltaNet(GatedDeltaNet):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_α  exp(-a softplus(x W_α + b_α)), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))            f_g  SiLU(x W_G)
    o_t  Σ_l λ_t^(l) q_t S_t^(l),  λ_t^(l) = softplus(c^(l) (x W_λ)^(l))
    d_k = expand_k·d,  d_v = expand_v·d, otherwise as `GatedDeltaNet`

    Attributes:
        levels: of ages, the first 2^(levels - 2) tokens at ones of their own
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_k: Positive = 0.75,
        expand_v: Positive = 1.5,
        conv: Count = 4,
        levels: Count = 15,
        eps: Positive = 1e-5,
    ) -> None:
        super().__init__(d, heads, expand_k, expand_v, conv, eps=eps)
        self.level_weights = LevelWeights(d, heads, levels)

    def project(self, x: Embedded, past: TokenContext) -> tuple[LogLinear, SiLUGate]:
        rule, gate = super().project(x, past)
        return LogLinear(cast(Delta, rule), self.level_weights(x)), gate
