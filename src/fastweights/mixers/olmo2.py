"""The softmax attention of 2 OLMo 2 Furious (OLMo team, 2024)."""

from __future__ import annotations

from collections.abc import Mapping

from fastweights.layers import WholeNorm
from fastweights.layers.arguments import Count, Positive
from fastweights.mixers.softmax import SoftmaxAttention


class OLMo2Attention(SoftmaxAttention):
    """
    f_q  RoPE(RMSNorm(x W_Q))   o_t  Σ_s softmax_s(q_t·k_s / √d'_k) v_s
    f_k  RoPE(RMSNorm(x W_K))   f_g  1
    f_v  x W_V                  d_q = d,  d_k = d_v = d · kv_heads / heads

    with norms over the channels of all heads.

    Attributes:
        kv_heads: how many heads k and v have, each serving heads / kv_heads queries; None for
            all
        eps: of the norms
        rope: fields of `Rope`
    """

    def __init__(
        self,
        d: int,
        heads: Count = 4,
        kv_heads: Count | None = None,
        eps: Positive = 1e-6,
        rope: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(d, heads, kv_heads, rope=rope)
        self.norm_q, self.norm_k = (
            WholeNorm(weights.out_features, center=False, affine=True, eps=eps)
            for weights in (self.W_q, self.W_k)
        )
