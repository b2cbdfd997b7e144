"""Based: Simple linear attention language models balance the recall-throughput tradeoff (Arora et
al., 2024).
"""

from __future__ import annotations

from torch import Tensor, nn

from fastweights.features import taylor
from fastweights.layers import Linear, TokenContext, head_width, split_heads
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Normalized
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class Based(Mixer):
    """
    f_q  φ(x W_Q)        f_α  1
    f_k  φ(x W_K)        f_g  1
    f_v  x W_V           d_k = 16·H,  d_v = d

    with φ the Taylor features of exp to the second order, φ(q)·φ(k) = 1 + s + s²/2 of s = q·k /
    √d'_k; the output is divided by q_t Σ_s k_s. A Based model alternates these layers with sliding
    windows: a hybrid of `based` and `swa`.

    Attributes:
        keys: d'_k, before φ; a head keeps 1 + d'_k (d'_k + 3) / 2 features
    """

    def __init__(self, d: int, heads: int = 4, keys: Count = 16) -> None:
        super().__init__(d)
        self.heads, self.scale = heads, keys**-0.25
        head_width("d", d, heads)
        self.W_q = Linear(d, heads * keys, bias=False)
        self.W_k = Linear(d, heads * keys, bias=False)
        self.W_v = Linear(d, d, bias=False)
        self.W_o = Linear(d, d, bias=False)
        self.norm = nn.Identity()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Normalized, None]:
        q, k, v = (split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v))
        return Normalized(Decay(self._features(q), self._features(k), v, None)), None

    def _features(self, x: Tensor) -> Tensor:
        return taylor(with_room(x * self.scale))
