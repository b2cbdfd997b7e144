"""Performer: Rethinking Attention with Performers (Choromanski et al., 2020)."""

from __future__ import annotations

from torch import nn

from fastweights.features import PositiveRandom
from fastweights.layers import Linear, TokenContext, head_width, split_heads
from fastweights.layers.arguments import Count, CountOrZero
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Normalized
from fastweights.shapes import Embedded


class Performer(Mixer):
    """
    f_q  φ(x W_Q)        f_α  1
    f_k  φ(x W_K)        f_g  1
    f_v  x W_V           d_k = d_v = d

    with φ = FAVOR+ of x d'_k^(-1/4), positive orthogonal random features of exp(q·k / √d'_k); the
    output is divided by q_t Σ_s k_s.

    Attributes:
        features: how many, for each head
        seed: what they are drawn from; they are a buffer, saved with the weights
    """

    def __init__(
        self, d: int, heads: int = 4, features: Count = 128, seed: CountOrZero = 0
    ) -> None:
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.scale = heads, width**-0.25
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.phi = PositiveRandom(width, features, seed)
        self.norm = nn.Identity()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Normalized, None]:
        q, k, v = (split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v))
        q, k = self.phi.query(q * self.scale), self.phi.key(k * self.scale)
        return Normalized(Decay(q, k, v, None)), None
