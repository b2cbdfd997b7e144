"""DeltaNet: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021; Yang et
al., 2024).
"""

from __future__ import annotations

from fastweights.layers import HeadNorm, TokenContext, head_width, project_each
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import DeltaMixer
from fastweights.recurrence import Delta
from fastweights.shapes import Embedded


class DeltaNet(DeltaMixer):
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
        width = head_width("d", d, heads)
        super().__init__(d, heads, width, negative=negative, floor=floor)
        self.add_layers(q=d, k=d, v=d, beta=heads)
        self.add_convolutions(d, conv)
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Delta, None]:
        q, k, v, beta = project_each(x, self.W_q, self.W_k, self.W_v, self.W_beta)
        return Delta(*self.streams(past, q, k, v), self.beta(beta)), None
