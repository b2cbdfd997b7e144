"""Linear Transformer: Transformers are RNNs (Katharopoulos et al., 2020); DSF eq. 16."""

from __future__ import annotations

from torch import nn

from fastweights.features import FEATURES
from fastweights.layers import Linear, TokenContext, choose, head_width, split_heads
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Normalized
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class LinearAttention(Mixer):
    """
    f_q  φ(x W_Q)        f_α  1
    f_k  φ(x W_K)        f_g  1
    f_v  x W_V           d_k = d_v = d

    with φ = 1 + ELU; the output is divided by q_t Σ_s k_s.

    Attributes:
        feature_map: φ: elu or relu
        keys: d_k, of all heads; None for d
    """

    def __init__(
        self, d: int, heads: int = 4, feature_map: str = "elu", keys: Count | None = None
    ) -> None:
        super().__init__(d)
        keys = d if keys is None else keys
        self.heads, self.phi = heads, choose("feature_map", feature_map, FEATURES)
        head_width("d", d, heads)
        head_width("d_k", keys, heads)
        self.W_q = Linear(d, keys, bias=False)
        self.W_k = Linear(d, keys, bias=False)
        self.W_v = Linear(d, d, bias=False)
        self.W_o = Linear(d, d, bias=False)
        self.norm = nn.Identity()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Normalized, None]:
        q, k, v = (split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v))
        return Normalized(Decay(self.phi(with_room(q)), self.phi(with_room(k)), v, None)), None
