"""Softmax attention, whole or sliding, with rotary positions and grouped queries (Vaswani, 2017; Su
et al., 2021).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fastweights.layers import (
    HeadNorm,
    Linear,
    Rope,
    TokenContext,
    WholeNorm,
    head_width,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import ShapeError, Softmax
from fastweights.shapes import Embedded


class SoftmaxAttention(Mixer):
    """
    f_q  RoPE(x W_Q)        o_t  Σ_s softmax_s(q_t·k_s / √d'_k) v_s
    f_k  RoPE(x W_K)        f_g  1
    f_v  x W_V              d_q = d,  d_k = d_v = d · kv_heads / heads

    Attributes:
        kv_heads: how many heads k and v have, each serving heads / kv_heads queries; None for
            all
        window: how many tokens a query sees; None for all
        width: d'_v, the channels of a head; None for d / heads
        keys: d_q, of all heads, so that d'_k = d_q / heads; None for d'_k = d'_v
        bias: whether the four projections have one (Qwen2)
        qk_norm: ε of an RMSNorm of every head of q and k (Qwen3); None for no norm
        gated: f_g = σ(x W_g) (Qwen3-Next)
        rope: fields of `Rope`
    """

    def __init__(
        self,
        d: int,
        heads: Count = 4,
        kv_heads: Count | None = None,
        window: Count | None = None,
        width: Count | None = None,
        bias: bool = False,
        qk_norm: NonNegative | None = None,
        gated: bool = False,
        rope: Mapping[str, float] | None = None,
        keys: Count | None = None,
    ) -> None:
        super().__init__(d)
        kv_heads = heads if kv_heads is None else kv_heads
        width = head_width("d", d, heads) if width is None else width
        key = width if keys is None else head_width("d_k", keys, heads)
        if kv_heads < 1 or heads % kv_heads:
            raise ShapeError(f"heads = {heads} is not a multiple of kv_heads = {kv_heads}")
        if window is not None and window < 1:
            raise ShapeError(f"window = {window}; a query sees 1 token or more, or None for all")
        self.heads, self.kv_heads, self.window = heads, kv_heads, window
        self.rope = Rope(key, **(rope or {}))
        self.W_q = Linear(d, key * heads, bias=bias)
        self.W_k = Linear(d, key * kv_heads, bias=bias)
        self.W_v = Linear(d, width * kv_heads, bias=bias)
        self.W_g = Linear(d, width * heads, bias=False) if gated else None
        self.W_o = Linear(width * heads, d, bias=bias)
        self.norm_q = self._norm(key, qk_norm)
        self.norm_k = self._norm(key, qk_norm)
        self.norm = nn.Identity()

    @staticmethod
    def _norm(width: int, eps: float | None) -> nn.Module:
        return nn.Identity() if eps is None else HeadNorm(width, center=False, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Softmax, Tensor | None]:
        gates = [] if self.W_g is None else [self.W_g]
        q, k, v, *logits = project_each(x, self.W_q, self.W_k, self.W_v, *gates)
        q = self.norm_q(split_heads(q, self.heads))
        k = self.norm_k(split_heads(k, self.kv_heads))
        q, k = self.rope.turn(past.positions, q, k)
        gate = logits[0].sigmoid() if logits else None
        return Softmax(q, k, split_heads(v, self.kv_heads), self.window), gate


class SlidingWindow(SoftmaxAttention):
    """
    f_q  RoPE(x W_Q)        o_t  Σ_s softmax_s(q_t·k_s / √d'_k) v_s over the last `window` tokens
    f_k  RoPE(x W_K)        f_g  1
    f_v  x W_V              d_q = d,  d_k = d_v = d · kv_heads / heads
    """

    def __init__(
        self, d: int, heads: int = 4, kv_heads: Count | None = None, window: Count = 1024
    ) -> None:
        super().__init__(d, heads, kv_heads, window)


class OLMo2Attention(SoftmaxAttention):
    """
    f_q  RoPE(RMSNorm(x W_Q))   o_t  Σ_s softmax_s(q_t·k_s / √d'_k) v_s
    f_k  RoPE(RMSNorm(x W_K))   f_g  1
    f_v  x W_V                  d_q = d,  d_k = d_v = d · kv_heads / heads

    with norms over the channels of all heads (2 OLMo 2 Furious, 2024).

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
