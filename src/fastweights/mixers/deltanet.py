"""DeltaNet: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021; Yang et
al., 2024).
"""

from __future__ import annotations

from fastweights.layers import (
    HeadNorm,
    Linear,
    ShortConvolution,
    TokenContext,
    head_width,
    l2_normalize,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Delta
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class DeltaNet(Mixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_α  1
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))            f_g  1
    d_k = d_v = d, RMSNorm per head, q scaled by d'_k^(-1/2)

    Attributes:
        negative: f_β = 2 σ(x W_β): I - β kᵀk has eigenvalues down to -1 (Grazzi et al., 2024)
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        conv: Count = 4,
        negative: bool = False,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.scale, self.largest = heads, width**-0.5, 2.0 if negative else 1.0
        self.floor = floor
        self.W_q = Linear(d, d, bias=False)
        self.W_k = Linear(d, d, bias=False)
        self.W_v = Linear(d, d, bias=False)
        self.W_beta = Linear(d, heads, bias=False)
        self.W_o = Linear(d, d, bias=False)
        self.conv_q, self.conv_k, self.conv_v = (ShortConvolution(d, conv) for _ in "qkv")
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Delta, None]:
        q, k, v, beta = project_each(x, self.W_q, self.W_k, self.W_v, self.W_beta)
        q = split_heads(self.conv_q(with_room(q), past, silu=True), self.heads)
        k = split_heads(self.conv_k(with_room(k), past, silu=True), self.heads)
        v = split_heads(self.conv_v(v, past, silu=True), self.heads)
        beta = self.largest * with_room(beta).sigmoid()[..., None]
        return Delta(
            l2_normalize(q, self.floor) * self.scale, l2_normalize(k, self.floor), v, beta
        ), None
