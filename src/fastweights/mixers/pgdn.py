"""Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences (2604.21100,
2026), on gated DeltaNet and on Kimi Delta Attention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastweights.layers import (
    HeadNorm,
    LowRank,
    SiLUGate,
    SoftplusDecay,
    TokenContext,
    head_width,
    project_each,
)
from fastweights.layers.arguments import AtLeastOne, Count, NonNegative, Positive
from fastweights.mixer import DeltaMixer
from fastweights.recurrence import Preconditioned
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class _PreconditionedMixer(DeltaMixer):
    """What the two have in common: how the keys are preconditioned.

    Attributes:
        spread: 1/spread ≤ M ≤ spread
    """

    W_rho: nn.Module
    W_gamma: nn.Module
    spread: float
    center: nn.Parameter
    decay: SoftplusDecay
    fade: SoftplusDecay

    def reset_parameters(self) -> None:
        """c = -0.2."""
        nn.init.constant_(self.center, -0.2)

    def _rule(self, past: TokenContext, projected: list[Tensor], alpha: Tensor) -> Preconditioned:
        """Of x W_q, x W_k, x W_v, x W_beta, x W_rho and x W_gamma, and what opens the decay."""
        q, k, v, beta, rate, gamma = projected
        streams = self.streams(past, q, k, v)
        rate, center = with_room(rate).sigmoid()[..., None], self.center[None, None, :, None]
        curvature = (rate, self.fade(gamma), center, self.spread)
        decay = self.decay(alpha)
        return Preconditioned(*streams, self.beta(beta), decay, *curvature)


class PreconditionedGatedDeltaNet(_PreconditionedMixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_α  exp(-a softplus(x W_α + b_α)), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))            f_γ  exp(-a' softplus(x W_γ + b_γ)), one per head
    f_g  SiLU(x W_G)                  f_ρ  σ(x W_ρ), one per head
    d_k = expand_k·d,  d_v = expand_v·d, RMSNorm per head, q scaled by d'_k^(-1/2)

    The delta rule whose writes k are multiplied by M of A_t = γ_t A_{t-1} + ρ_t k_t², see
    `Preconditioned`.

    Attributes:
        negative: f_β = 2 σ(x W_β): eigenvalues down to -1 for M = 1 (Grazzi et al., 2024)
        spread: 1/spread ≤ M ≤ spread
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_k: Positive = 0.75,
        expand_v: Positive = 1.5,
        conv: Count = 4,
        negative: bool = False,
        spread: AtLeastOne = 1.5,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        keys, values = round(expand_k * d), round(expand_v * d)
        super().__init__(d, heads, head_width("d_k", keys, heads), negative=negative, floor=floor)
        self.spread = spread
        self.add_layers(q=keys, k=keys, v=values, g=values)
        self.add_layers(beta=heads, alpha=heads, rho=heads, gamma=heads)
        self.add_convolutions(values, conv)
        self.decay, self.fade = SoftplusDecay(heads), SoftplusDecay(heads)
        self.center = nn.Parameter(torch.empty(heads))
        width = head_width("d_v", values, heads)
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Preconditioned, SiLUGate]:
        layers = (self.W_q, self.W_k, self.W_v, self.W_beta, self.W_rho, self.W_alpha)
        *streams, alpha, gamma, gate = project_each(x, *layers, self.W_gamma, self.W_g)
        return self._rule(past, [*streams, gamma], alpha), SiLUGate(gate)


class PreconditionedKDA(_PreconditionedMixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_α  exp(-a softplus(x W¹_α W²_α + b_α)), a per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β), one per head
    f_v  SiLU(conv(x W_V))            f_γ  exp(-a' softplus(x W_γ + b_γ)), one per head
    f_g  σ(x W¹_G W²_G + b_G)         f_ρ  σ(x W_ρ), one per head
    d_k = d,  d_v = expand_v·d, RMSNorm per head, q scaled by d'_k^(-1/2), ranks d'_v

    The delta rule whose writes k are multiplied by M of A_t = γ_t A_{t-1} + ρ_t k_t², see
    `Preconditioned`; α is a decay per channel of k.

    Attributes:
        negative: f_β = 2 σ(x W_β): eigenvalues down to -1 for M = 1 (Grazzi et al., 2024)
        spread: 1/spread ≤ M ≤ spread
        eps, floor: of the norm and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_v: Positive = 1.0,
        conv: Count = 4,
        negative: bool = False,
        spread: AtLeastOne = 1.5,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        values, width = round(expand_v * d), head_width("d", d, heads)
        super().__init__(d, heads, width, negative=negative, floor=floor)
        rank, self.spread = head_width("d_v", values, heads), spread
        self.add_layers(q=d, k=d, v=values, beta=heads, rho=heads, gamma=heads)
        self.W_alpha = LowRank(d, rank, d, bias=False)
        self.W_g = LowRank(d, rank, values, bias=True)
        self.add_convolutions(values, conv)
        self.decay, self.fade = SoftplusDecay(heads, width), SoftplusDecay(heads)
        self.center = nn.Parameter(torch.empty(heads))
        self.norm = HeadNorm(rank, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def project(self, x: Embedded, past: TokenContext) -> tuple[Preconditioned, Tensor]:
        layers = (self.W_q, self.W_k, self.W_v, self.W_beta, self.W_rho, self.W_gamma)
        streams = project_each(x, *layers)
        return self._rule(past, streams, self.W_alpha(x)), self.W_g(x).sigmoid()
