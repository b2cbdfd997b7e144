"""Gated linear attention (Yang et al., 2023)."""

from __future__ import annotations

from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    LowRank,
    SiLUGate,
    TokenContext,
    head_width,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.shapes import Embedded


class GLA(Mixer):
    """
    f_q  x W_Q        f_α  σ(x W¹_α W²_α + b)^(1/τ), τ = 16
    f_k  x W_K        f_g  SiLU(x W_r + b_r)
    f_v  x W_V        d_k = d/2,  d_v = d

    with q scaled by d'_k^(-1/2), LayerNorm per head.

    Attributes:
        rank: width of the bottleneck in f_α
        center: whether the norm subtracts the mean; False makes it an RMSNorm
        keys: d_k; None for d/2
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        tau: Positive = 16.0,
        rank: Count = 16,
        center: bool = True,
        eps: Positive = 1e-5,
        keys: Count | None = None,
    ) -> None:
        super().__init__(d)
        keys = d // 2 if keys is None else keys
        self.heads, self.tau = heads, tau
        self.scale = head_width("d_k", keys, heads) ** -0.5
        self.W_q = Linear(d, keys, bias=False)
        self.W_k = Linear(d, keys, bias=False)
        self.W_v = Linear(d, d, bias=False)
        self.W_alpha = LowRank(d, rank, keys, bias=True)
        self.W_r = Linear(d, d)
        self.W_o = Linear(d, d, bias=False)
        self.norm = HeadNorm(head_width("d", d, heads), center=center, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, SiLUGate]:
        *heads, gate = project_each(x, self.W_q, self.W_k, self.W_v, self.W_r)
        q, k, v = (split_heads(s, self.heads) for s in heads)
        log_alpha = F.logsigmoid(upcast(split_heads(self.W_alpha(x), self.heads))) / self.tau
        return Decay(q * self.scale, k, v, log_alpha), SiLUGate(gate)
