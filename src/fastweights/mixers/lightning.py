"""Lightning attention as MiniMax-01 has it (MiniMax, 2025; Qin et al., 2024)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fastweights.layers import (
    Linear,
    TokenContext,
    WholeNorm,
    head_numbers,
    head_width,
    project_each,
    require_fraction,
    split_heads,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.shapes import Embedded

LEAST = 1e-5
"""What is left of the rates of decay in a layer of depth 1."""


class Lightning(Mixer):
    """
    f_q  SiLU(x W_Q)        f_α  exp(-2^(-8h/H) (1 - depth + 10⁻⁵)), of head h = 1 … H
    f_k  SiLU(x W_K)        f_g  σ(x W_G)
    f_v  SiLU(x W_V)        d_k = d_v = H·width

    with RMSNorm of all heads together.

    Attributes:
        heads: H
        width: channels of a head; None for d / heads
        depth: l / L, how far up the layer stands: upper layers forget less
    """

    def __init__(
        self,
        d: int,
        heads: Count = 4,
        width: Count | None = None,
        depth: float = 0.0,
        eps: Positive = 1e-6,
    ) -> None:
        super().__init__(d)
        inner = heads * (head_width("d", d, heads) if width is None else width)
        self.heads, self.depth = heads, require_fraction("depth", depth)
        self.W_q, self.W_k, self.W_v, self.W_g = (Linear(d, inner, bias=False) for _ in range(4))
        self.W_o = Linear(inner, d, bias=False)
        self.norm = WholeNorm(inner, center=False, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        *heads, gate = project_each(x, self.W_q, self.W_k, self.W_v, self.W_g)
        q, k, v = (split_heads(F.silu(s), self.heads) for s in heads)
        rate = 2.0 ** ((head_numbers(self.heads, x) + 1) * (-8 / self.heads))
        return Decay(q, k, v, -(1 - self.depth + LEAST) * rate), gate.sigmoid()
