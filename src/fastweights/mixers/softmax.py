"""Softmax attention, whole or sliding, with rotary positions and grouped queries (Vaswani, 2017; Su et al., 2021)."""

from __future__ import annotations

from torch import nn

from fastweights.layers import Past, head_width, heads, rotary
from fastweights.mixer import Mixer
from fastweights.recurrence import Softmax
from fastweights.recurrence.base import ShapeError
from fastweights.shapes import Embedded


class SoftmaxAttention(Mixer):
    """
    f_q  RoPE(x W_Q)        o_t  Σ_s softmax_s(q_t·k_s / √d'_k) v_s
    f_k  RoPE(x W_K)        f_g  1
    f_v  x W_V              d_q = d,  d_k = d_v = d · kv_heads / heads

    kv_heads  how many heads k and v have, each serving heads / kv_heads queries; None for all
    window    how many tokens a query sees; None for all
    """

    def __init__(self, d: int, heads: int = 4, kv_heads: int | None = None, window: int | None = None) -> None:
        super().__init__(d)
        kv_heads = heads if kv_heads is None else kv_heads
        width = head_width("d", d, heads)
        if kv_heads < 1 or heads % kv_heads:
            raise ShapeError(f"heads = {heads} is not a multiple of kv_heads = {kv_heads}")
        if width % 2:
            raise ShapeError(f"RoPE turns pairs of channels: d / heads = {width} must be even")
        self.heads, self.kv_heads, self.window = heads, kv_heads, window
        self.W_q = nn.Linear(d, d, bias=False)
        self.W_k = nn.Linear(d, width * kv_heads, bias=False)
        self.W_v = nn.Linear(d, width * kv_heads, bias=False)
        self.W_o = nn.Linear(d, d, bias=False)
        self.norm = nn.Identity()

    def project(self, x: Embedded, past: Past) -> tuple[Softmax, None]:
        q = rotary(heads(self.W_q(x), self.heads), past.positions)
        k = rotary(heads(self.W_k(x), self.kv_heads), past.positions)
        return Softmax(q, k, heads(self.W_v(x), self.kv_heads), self.window), None


class SlidingWindow(SoftmaxAttention):
    """
    f_q  RoPE(x W_Q)        o_t  Σ_s softmax_s(q_t·k_s / √d'_k) v_s over the last `window` tokens
    f_k  RoPE(x W_K)        f_g  1
    f_v  x W_V              d_q = d,  d_k = d_v = d · kv_heads / heads
    """

    def __init__(self, d: int, heads: int = 4, kv_heads: int | None = None, window: int = 1024) -> None:
        super().__init__(d, heads, kv_heads, window)
