"""Comba: Improving Bilinear RNNs with Closed-loop Control (Hu et al., 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastweights.layers import HeadNorm, SoftplusDecay, TokenContext, head_width, project_each
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import DeltaMixer
from fastweights.recurrence import DPLR
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class Comba(DeltaMixer):
    """
    f_q  L2(SiLU(conv(x W_Q))) - D p  f_α  exp(-a softplus(x W_α + b_α)), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))            f_p  σ(δ) k, D and δ one per head
    f_g  σ(x W_G)
    d_k = expand_k·d,  d_v = expand_v·d, RMSNorm per head, q scaled by d'_k^(-1/2)

    S_t = α_t S_{t-1} + β_t k_tᵀ (v_t - p_t α_t S_{t-1}): p feeds the state back, D p the output

    Attributes:
        renormalized: L2 is taken of q - D p and of p instead, as in fla's code, where σ(δ) cancels
            in p and only acts on q
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_k: Positive = 0.75,
        expand_v: Positive = 1.5,
        conv: Count = 4,
        renormalized: bool = False,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        keys, values = round(expand_k * d), round(expand_v * d)
        super().__init__(d, heads, head_width("d_k", keys, heads), floor=floor)
        self.renormalized = renormalized
        self.add_layers(q=keys, k=keys, v=values, beta=heads, alpha=heads, g=values)
        self.add_convolutions(values, conv)
        self.decay = SoftplusDecay(heads)
        self.delta, self.D = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        width = head_width("d_v", values, heads)
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """δ = 1, D = 1."""
        nn.init.ones_(self.delta)
        nn.init.ones_(self.D)

    def project(self, x: Embedded, past: TokenContext) -> tuple[DPLR, Tensor]:
        q, k, v, beta, alpha, gate = project_each(
            x, self.W_q, self.W_k, self.W_v, self.W_beta, self.W_alpha, self.W_g
        )
        q, k, v = self.convolve(past, q, k, with_room(v))
        q, k, p = self._correct(q, k)
        return DPLR(
            q * self.scale, self.beta(beta) * k, v, p, None, self.decay(alpha)
        ), gate.sigmoid()

    def _correct(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """q - D p, k and p."""
        feedback, D = self.delta.sigmoid()[:, None], self.D[:, None]
        if self.renormalized:
            return self.normalize(q - D * feedback * k, k, feedback * k)
        q, k = self.normalize(q, k)
        return [q - D * feedback * k, k, feedback * k]
