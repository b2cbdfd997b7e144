"""Random Feature Attention (Peng et al., 2021)."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from fastweights.features import RandomFourier
from fastweights.layers import (
    Linear,
    TokenContext,
    head_width,
    l2_normalize,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, CountOrZero
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Normalized
from fastweights.shapes import Embedded


class RFA(Mixer):
    """
    f_q  φ(L2(x W_Q))        f_α  1, or σ(x W_α + b_α), one per head
    f_k  φ(L2(x W_K))        f_g  1
    f_v  x W_V               d_k = d_v = d

    with φ random Fourier features (sin, cos) of a Gaussian kernel with learnt widths σ; the output
    is divided by q_t Σ_s k_s. Where that falls below exp(-2 max σ²), the least that one token can
    add to the kernel, it is noise of the features, and the bound is taken in its place.

    Attributes:
        features: how many frequencies; a head has 2·features keys
        gated: f_α = σ(x W_α + b_α), and (1 - α) times f_k
        seed: what the frequencies are drawn from; they are a buffer, saved with the weights
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        features: Count = 64,
        gated: bool = False,
        seed: CountOrZero = 0,
    ) -> None:
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads = heads
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.W_alpha = Linear(d, heads) if gated else None
        self.phi = RandomFourier(heads, width, features, seed)
        self.norm = nn.Identity()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Normalized, None]:
        q, k, v = (split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v))
        q, k = self.phi(l2_normalize(q)), self.phi(l2_normalize(k))
        least = self.phi.least()[None, None]
        if self.W_alpha is None:
            return Normalized(Decay(q, k, v, None), least), None
        logit = upcast(self.W_alpha(x))[..., None]
        written = (-logit).sigmoid()
        return Normalized(
            Decay(q, (k * written).to(k.dtype), v, F.logsigmoid(logit)), least * written
        ), None
