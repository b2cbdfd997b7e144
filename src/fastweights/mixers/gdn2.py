"""Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention (2605.22791, 2026)."""

from __future__ import annotations

from torch import Tensor, nn

from fastweights.layers import (
    HeadNorm,
    LowRank,
    SoftplusDecay,
    TokenContext,
    head_width,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import DeltaMixer
from fastweights.recurrence import DPLR
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class GatedDeltaNet2(DeltaMixer):
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

    W_b: nn.Module
    W_w: nn.Module

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
        values, width = round(expand_v * d), head_width("d", d, heads)
        super().__init__(d, heads, width, negative=negative, floor=floor)
        rank = head_width("d_v", values, heads)
        self.add_layers(q=d, k=d, v=values, b=d, w=values)
        self.W_alpha = LowRank(d, rank, d, bias=False)
        self.W_g = LowRank(d, rank, values, bias=True)
        self.add_convolutions(values, conv)
        self.decay = SoftplusDecay(heads, width)
        self.norm = HeadNorm(rank, center=False, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[DPLR, Tensor]:
        q, k, v, erase, write = project_each(x, self.W_q, self.W_k, self.W_v, self.W_b, self.W_w)
        q, k, v = self.streams(past, q, k, with_room(v))
        a = self.largest * split_heads(with_room(erase).sigmoid(), self.heads) * k
        v = split_heads(with_room(write).sigmoid(), self.heads) * v
        rule = DPLR(q, k, v, a, None, self.decay(self.W_alpha(x)))
        return rule, self.W_g(x).sigmoid()
