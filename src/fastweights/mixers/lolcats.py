"""LoLCATs: On Low-Rank Linearizing of Large Language Models (Zhang et al., 2024), in the form of
arXiv 2410.10254.
"""

from __future__ import annotations

import torch
from torch import nn

from fastweights.features import Hedgehog
from fastweights.layers import (
    Linear,
    Rope,
    TokenContext,
    head_width,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, CountOrZero
from fastweights.mixer import Mixer
from fastweights.recurrence import ShapeError, WindowedLinear
from fastweights.shapes import Embedded


class LoLCATs(Mixer):
    """
    f_q  RoPE(x W_Q), φ_q of it  φ(z)  softmax(z W_φ) ‖ softmax(-z W_φ), W_φ [d'_k, d'_k/2] per head
    f_k  RoPE(x W_K), φ_k of it  γ     σ(m) per head, 0.1 at the start
    f_v  x W_V                   d_q = d,  d_k = d_v = d · kv_heads / heads

    softmax over the last `window` tokens, linear attention over all before, one normaliser
    (`WindowedLinear`).

    Attributes:
        kv_heads: how many heads k and v have, each serving heads / kv_heads queries; None for
            all
        shared: False: a normaliser for each side, mixed as γ : 1 - γ (the workshop paper's eq.
            8)
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        kv_heads: Count | None = None,
        window: CountOrZero = 64,
        shared: bool = True,
    ) -> None:
        super().__init__(d)
        kv_heads = heads if kv_heads is None else kv_heads
        width = head_width("d", d, heads)
        if kv_heads < 1 or heads % kv_heads:
            raise ShapeError(f"heads = {heads} is not a multiple of kv_heads = {kv_heads}")
        if width % 2:
            raise ShapeError(f"RoPE turns pairs of channels: d / heads = {width} must be even")
        self.heads, self.kv_heads, self.window, self.shared = heads, kv_heads, window, shared
        self.W_q = Linear(d, d, bias=False)
        self.W_k = Linear(d, width * kv_heads, bias=False)
        self.W_v = Linear(d, width * kv_heads, bias=False)
        self.phi_q = Hedgehog(heads, width, width // 2)
        self.phi_k = Hedgehog(kv_heads, width, width // 2)
        self.mix = nn.Parameter(torch.empty(heads))
        self.W_o = Linear(d, d, bias=False)
        self.norm = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.mix, -2.1972)

    def project(self, x: Embedded, past: TokenContext) -> tuple[WindowedLinear, None]:
        q, k, v = project_each(x, self.W_q, self.W_k, self.W_v)
        q, k = split_heads(q, self.heads), split_heads(k, self.kv_heads)
        q, k = Rope(q.shape[-1]).turn(past.positions, q, k)
        v = split_heads(v, self.kv_heads)
        mix = upcast(self.mix).sigmoid()[None, None, :, None]
        return WindowedLinear(
            q, k, v, self.phi_q(q), self.phi_k(k), mix, self.window, self.shared
        ), None
