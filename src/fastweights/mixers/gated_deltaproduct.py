"""Gated DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products (Siems et
al., 2025).
"""

from __future__ import annotations

from fastweights.layers import (
    HeadNorm,
    SiLUGate,
    SoftplusDecay,
    TokenContext,
    head_width,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import DeltaMixer
from fastweights.recurrence import Substeps
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class GatedDeltaProduct(DeltaMixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_α  exp(-a softplus(x W_α + b_α)), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  2 σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))            f_g  SiLU(x W_G)
    d_k = expand_k·d,  d_v = expand_v·d, n times for k, v and β, RMSNorm per head

    A token makes n steps of the delta rule, S ← (I - β_i k_iᵀ k_i) S + β_i k_iᵀ v_i, i = 1 … n: the
    state decays before the first, and q, scaled by d'_k^(-1/2), reads it after the last (eq. 3-4).

    Attributes:
        steps: n
        negative: f_β = 2 σ(x W_β), so that a step may reflect; σ(x W_β) without it
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        steps: Count = 2,
        expand_k: Positive = 0.75,
        expand_v: Positive = 1.5,
        conv: Count = 4,
        negative: bool = True,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        keys, values = round(expand_k * d), round(expand_v * d)
        super().__init__(d, heads, head_width("d_k", keys, heads), negative=negative, floor=floor)
        self.steps = steps
        self.add_layers(q=keys, k=steps * keys, v=steps * values)
        self.add_layers(beta=steps * heads, alpha=heads, g=values)
        self.add_convolutions(values, conv)
        self.decay = SoftplusDecay(heads)
        width = head_width("d_v", values, heads)
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Substeps, SiLUGate]:
        q, k, v, beta, alpha, gate = project_each(
            x, self.W_q, self.W_k, self.W_v, self.W_beta, self.W_alpha, self.W_g
        )
        each = (self.steps, self.heads, -1)
        q = split_heads(self.conv_q(with_room(q), past, silu=True), self.heads)
        k = self.conv_k(with_room(k), past, silu=True).unflatten(-1, each)
        v = self.conv_v(v, past, silu=True).unflatten(-1, each)
        q, k = self.normalize(q, k)
        beta = self.beta(beta).unflatten(2, each[:2])
        return Substeps.of(q * self.scale, beta * k, v, k, log_decay=self.decay(alpha)), SiLUGate(
            gate
        )
