"""Kimi Delta Attention of Kimi Linear (Kimi Team, 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    TokenContext,
    bounded_exp,
    factorized,
    head_width,
    init_softplus_decay,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import DeltaMixer
from fastweights.recurrence import Delta
from fastweights.shapes import Embedded


class KDA(DeltaMixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))   f_α  exp(-a softplus(x W¹_α W²_α + b_α)), one per channel of k
    f_k  L2(SiLU(conv(x W_K)))   f_β  σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))       f_g  σ(x W¹_G W²_G + b_G)
    d_k = d_v = d,  RMSNorm per head, q scaled by d'_k^(-1/2)

    with one a per head, W¹ of d'_k outputs, and L2(x) = x / √(|x|² + 10⁻⁶) as published.

    Attributes:
        width: d'_k = d'_v, the channels of a head; None for d / heads
        value_heads: how many heads all but q and k have, the same number of them for each head of
            q and k; None for one
        negative: f_β = 2 σ(x W_β): I - β kᵀk has eigenvalues down to -1 (Grazzi et al., 2024)
        lowest: f_α = e^(-lowest σ(a (x W¹_α W²_α + b_α))), above e^(-lowest): the safe gate of the
            published code; None for the paper's
        low_rank: False for one matrix in place of W¹ W² (Ling 3.0)
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        width: Count | None = None,
        value_heads: Count | None = None,
        conv: Count = 4,
        negative: bool = False,
        lowest: Positive | None = None,
        low_rank: bool = True,
        eps: Positive = 1e-5,
    ) -> None:
        width = head_width("d", d, heads) if width is None else width
        super().__init__(d, heads, width, negative=negative, floor=1e-6)
        count = heads if value_heads is None else value_heads
        self.served, self.lowest = head_width("value_heads", count, heads), lowest
        keys, values = width * heads, width * count
        self.add_layers(q=keys, k=keys, v=values, beta=count)
        self.W_alpha = factorized(d, width if low_rank else None, values, bias=False)
        self.W_g = factorized(d, width if low_rank else None, values, bias=True)
        self.add_convolutions(values, conv)
        self.log_a = nn.Parameter(torch.empty(count))
        self.b_alpha = nn.Parameter(torch.empty(values))
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in gated DeltaNet; a = 1 for the safe gate."""
        init_softplus_decay(self.log_a, self.b_alpha, 1 if self.lowest else 16)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Delta, Tensor]:
        q, k, v, beta = project_each(x, self.W_q, self.W_k, self.W_v, self.W_beta)
        streams = self.streams(past, q, k, v)
        rule = Delta(*streams, self.beta(beta), self._log_decay(x))
        return rule, self.W_g(x).sigmoid()

    def _log_decay(self, x: Embedded) -> Tensor:
        z = split_heads(upcast(self.W_alpha(x)) + self.b_alpha, len(self.log_a))
        a = bounded_exp(self.log_a)[:, None]
        return -a * F.softplus(z) if self.lowest is None else -self.lowest * (a * z).sigmoid()
