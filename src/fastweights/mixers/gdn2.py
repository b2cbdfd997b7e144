"""Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention (2605.22791, 2026)."""

from __future__ import annotations

from torch import Tensor

from fastweights.layers import (
    HeadNorm,
    Linear,
    LowRank,
    ShortConvolution,
    SoftplusDecay,
    TokenContext,
    head_width,
    l2_normalize,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import DPLR
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class GatedDeltaNet2(Mixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_α  exp(-a softplus(x W¹_α W²_α + b_α)), a per head
    f_k  L2(SiLU(conv(x W_K)))        f_b  σ(x W_B), per channel of k: what is erased
    f_v  SiLU(conv(x W_V))            f_w  σ(x W_W), per channel of v: what is written
    f_g  σ(x W¹_G W²_G + b_G)
    d_k = d,  d_v = expand_v·d, RMSNorm per head, q scaled by d'_k^(-1/2), ranks d'_v

    S_t = (I - k_tᵀ (b_t ⊙ k_t)) diag(α_t) S_{t-1} + k_tᵀ (w_t ⊙ v_t)

    Attributes:
        negative: f_b = 2 σ(x W_B): eigenvalues down to -1 (Grazzi et al., 2024)
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_v: Positive = 1.0,
        conv: Count = 4,
        negative: bool = False,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        super().__init__(d)
        values, width = round(expand_v * d), head_width("d", d, heads)
        rank = head_width("d_v", values, heads)
        self.heads, self.scale, self.floor = heads, width**-0.5, floor
        self.largest = 2.0 if negative else 1.0
        self.W_q = Linear(d, d, bias=False)
        self.W_k = Linear(d, d, bias=False)
        self.W_v = Linear(d, values, bias=False)
        self.W_b = Linear(d, d, bias=False)
        self.W_w = Linear(d, values, bias=False)
        self.W_alpha = LowRank(d, rank, d, bias=False)
        self.W_g = LowRank(d, rank, values, bias=True)
        self.W_o = Linear(values, d, bias=False)
        self.conv_q, self.conv_k = ShortConvolution(d, conv), ShortConvolution(d, conv)
        self.conv_v = ShortConvolution(values, conv)
        self.decay = SoftplusDecay(heads, width)
        self.norm = HeadNorm(rank, center=False, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[DPLR, Tensor]:
        q, k, v, erase, write = project_each(x, self.W_q, self.W_k, self.W_v, self.W_b, self.W_w)
        q, k, v = (
            split_heads(conv(with_room(s), past, silu=True), self.heads)
            for s, conv in ((q, self.conv_q), (k, self.conv_k), (v, self.conv_v))
        )
        q, k = l2_normalize(q, self.floor) * self.scale, l2_normalize(k, self.floor)
        a = self.largest * split_heads(with_room(erase).sigmoid(), self.heads) * k
        v = split_heads(with_room(write).sigmoid(), self.heads) * v
        rule = DPLR(q, k, v, a, None, self.decay(self.W_alpha(x)))
        return rule, self.W_g(x).sigmoid()
