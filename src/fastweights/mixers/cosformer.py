"""cosFormer: Rethinking Softmax in Attention (Qin et al., 2022)."""

from __future__ import annotations

import math

from torch import nn
from torch.nn import functional as F

from fastweights.features import cos_sin_features
from fastweights.layers import Linear, TokenContext, accumulate_dtype, head_width, split_heads
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Normalized
from fastweights.shapes import Embedded


class CosFormer(Mixer):
    """
    f_q  φ(x W_Q)        f_α  1
    f_k  φ(x W_K)        f_g  1
    f_v  x W_V           d_k = d_v = d

    with φ(x)_t = (ReLU(x) cos(π t / 2M), ReLU(x) sin(π t / 2M)), which weighs q_t·k_s by cos(π (t -
    s) / 2M); the output is divided by q_t Σ_s k_s.

    Attributes:
        length: M, the length of the longest sequence; tokens further apart would count
            negatively
    """

    def __init__(self, d: int, heads: int = 4, length: Count = 8192) -> None:
        super().__init__(d)
        self.heads, self.length = heads, length
        head_width("d", d, heads)
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.norm = nn.Identity()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Normalized, None]:
        q, k, v = (split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v))
        angle = past.positions.to(accumulate_dtype(x))[..., None, None] * (
            math.pi / 2 / self.length
        )
        return Normalized(
            Decay(cos_sin_features(F.relu(q), angle), cos_sin_features(F.relu(k), angle), v, None)
        ), None
