"""Gated DeltaNet (Yang, Kautz & Hatamizadeh, 2024), and with a state for every age of tokens:
log-linear gated DeltaNet (Guo et al., 2025).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    LevelWeights,
    Linear,
    ShortConvolution,
    SiLUGate,
    TokenContext,
    bounded_exp,
    head_width,
    init_steps,
    l2_normalize,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Delta, LogLinear
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class GatedDeltaNet(Mixer):
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
        super().__init__(d)
        keys, values = round(expand_k * d), round(expand_v * d)
        count = heads if value_heads is None else value_heads
        self.heads, self.served = heads, head_width("value_heads", count, heads)
        self.largest, self.floor = 2.0 if negative else 1.0, floor
        self.scale = head_width("d_k", keys, heads) ** -0.5
        width = head_width("d_v", values, count)
        self.W_q = Linear(d, keys, bias=False)
        self.W_k = Linear(d, keys, bias=False)
        self.W_v = Linear(d, values, bias=False)
        self.W_alpha = Linear(d, count, bias=False)
        self.W_beta = Linear(d, count, bias=False)
        self.W_g = Linear(d, values, bias=False)
        self.W_o = Linear(values, d, bias=False)
        self.conv_q, self.conv_k = ShortConvolution(keys, conv), ShortConvolution(keys, conv)
        self.conv_v = ShortConvolution(values, conv)
        self.log_a = nn.Parameter(torch.empty(count))
        self.b_alpha = nn.Parameter(torch.empty(count))
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """a uniform in [1, 16]; softplus(b_α) log-uniform in [0.001, 0.1], as in Mamba-2."""
        init_steps(self.b_alpha)
        with torch.no_grad():
            nn.init.uniform_(self.log_a, 1, 16).log_()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Delta | LogLinear, SiLUGate]:
        q, k, v, beta, alpha, gate = project_each(
            x, self.W_q, self.W_k, self.W_v, self.W_beta, self.W_alpha, self.W_g
        )
        q = split_heads(self.conv_q(with_room(q), past, silu=True), self.heads)
        k = split_heads(self.conv_k(with_room(k), past, silu=True), self.heads)
        v = split_heads(self.conv_v(v, past, silu=True), self.heads * self.served)
        beta = self.largest * with_room(beta).sigmoid()[..., None]
        log_alpha = -bounded_exp(self.log_a) * F.softplus(upcast(alpha) + self.b_alpha)
        q, k = l2_normalize(q, self.floor), l2_normalize(k, self.floor)
        if self.served > 1:
            q, k = (s.repeat_interleave(self.served, dim=2) for s in (q, k))
        return Delta(q * self.scale, k, v, beta, log_alpha[..., None]), SiLUGate(gate)


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
        assert isinstance(rule, Delta)
        return LogLinear(rule, self.level_weights(x)), gate
