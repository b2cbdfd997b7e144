"""RWKV-7 "Goose" with Expressive Dynamic State Evolution (Peng et al., 2025), its time mixing and
its channel mixing.
"""

from __future__ import annotations

from math import exp
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    GroupNorm,
    Linear,
    LowRank,
    TokenContext,
    TokenShifts,
    head_width,
    l2_normalize,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import DPLR, Decay
from fastweights.shapes import Embedded, Output


class RWKV7(Mixer):
    """
    f_q  x_r W_R                    f_α  exp(-e^(-1/2) σ(tanh(x_w W¹_α) W²_α + b_α))
    f_k  k ⊙ (1 + (η - 1) ⊙ κ_η)    f_g  σ(x_g W¹_G) W²_G
    f_v  x_v W_V                    d_k = d_v = d

    with k = x_k W_K, η = σ(x_a W¹_η W²_η + b_η), x_i = x_t + μ_i ⊙ (x_{t-1} - x_t); what κ̂ = L2(k ⊙
    κ) reads of S_{t-1} is erased along η ⊙ κ̂, and o_t = LN(q_t S_t) + (q_t diag(ρ) k_tᵀ) v_t, LN of
    each head. All starts are those of the official code's first layer.

    Attributes:
        decay_rank, rate_rank, gate_rank, value_rank: outputs of W¹_α, W¹_η, W¹_G, W¹_V
        residual: v + σ(x_v W¹_V W²_V + b_V) ⊙ (v of the last layer without - v) for v
        eps, floor: of the norm, times d'_v, and of L2, see `l2_normalize`
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        decay_rank: Count = 64,
        rate_rank: Count = 64,
        gate_rank: Count = 128,
        value_rank: Count = 32,
        residual: bool = False,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        super().__init__(d)
        self.heads, self.floor, width = heads, floor, head_width("d", d, heads)
        self.leaves_values, self.takes_values = not residual, residual
        self.shift = TokenShifts(d, 6)
        self.W_r, self.W_k, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.W_alpha = LowRank(d, decay_rank, d, bias=True)
        self.W_eta = LowRank(d, rate_rank, d, bias=True)
        self.W_g = LowRank(d, gate_rank, d, bias=False)
        self.W_nu = LowRank(d, value_rank, d, bias=True) if residual else None
        self.kappa, self.kappa_eta = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.rho = nn.Parameter(torch.empty(heads, width))
        self.norm = GroupNorm(heads, width, width * eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        channel = torch.arange(self.d)
        c, width = channel / max(self.d - 1, 1), self.d // self.heads
        zigzag = 2 * (channel % width) / max(width - 1, 1) - 1
        powers = torch.tensor([0.2, 0.9, 0.7, 0.7, 0.9, 0.2])[:, None]
        starts: dict[Any, Any] = {
            self.shift.mu: 1 - (channel / self.d) ** powers,
            self.W_alpha[1].bias: 6 * c - 5.5 + 2.5 * zigzag * zigzag.abs(),
            self.W_eta[1].bias: 0.3 * zigzag * zigzag.abs() + 0.4 * c - 0.39,
            self.kappa: 0.76 - 0.1 * c,
            self.kappa_eta: 1.02,
            self.rho: -0.04,
            **({} if self.W_nu is None else {self.W_nu[1].bias: 0.93 - 0.4 * c}),
        }
        with torch.no_grad():
            for parameter, start in starts.items():
                nn.init.zeros_(parameter).add_(start)

    def project(self, x: Embedded, past: TokenContext) -> tuple[DPLR, Tensor]:
        xr, xw, xk, xv, xa, xg = self.shift.shifts(x, past)
        r, k, v, eta = self.W_r(xr), self.W_k(xk), self.W_v(xv), self.W_eta(xa).sigmoid()
        log_alpha = -exp(-0.5) * upcast(self.W_alpha[1](self.W_alpha[0](xw).tanh())).sigmoid()
        if self.W_nu is None:
            past.stream.values = v
        else:
            v = torch.lerp(v, past.stream.take_values(), self.W_nu(xv).sigmoid())
        streams = (r, k * (1 + (eta - 1) * self.kappa_eta), v, k * self.kappa, eta, log_alpha)
        r, k, v, erased, eta, log_alpha = (split_heads(s, self.heads) for s in streams)
        erased = l2_normalize(erased, self.floor)
        gate = self.W_g[1](self.W_g[0](xg).sigmoid())
        return DPLR(r, k, v, erased, erased * eta, log_alpha, before=True), gate

    def read(self, o: Output, gate: Tensor, recurrence: DPLR) -> Embedded:
        own = (recurrence.q * self.rho * recurrence.w).sum(-1, keepdim=True) * recurrence.v
        return self.W_o((self.norm(o) + own).flatten(-2) * gate)


class RWKV7Channel(Mixer):
    """
    f_q  1                           f_α  0
    f_k  1                           f_g  1
    f_v  max(x_k W_k, 0)²            d_k = H = 1,  d_v = width

    with x_k = x_t + μ ⊙ (x_{t-1} - x_t): an MLP, but for the token shift (see `RWKV7`), which needs
    a state.

    Attributes:
        width: of the hidden layer; None for 4 d
    """

    def __init__(self, d: int, width: Count | None = None) -> None:
        super().__init__(d)
        width = 4 * d if width is None else width
        self.shift = TokenShifts(d, 1)
        self.W_k, self.W_o = Linear(d, width, bias=False), Linear(width, d, bias=False)
        self.norm = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """μ = 1 - channel / d, as in the official code's first layer."""
        with torch.no_grad():
            nn.init.ones_(self.shift.mu).sub_(torch.arange(self.d) / self.d)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, None]:
        (shifted,) = self.shift.shifts(x, past)
        v = F.relu(self.W_k(shifted)).square()
        one = torch.ones_like(v[:1, :1, :1, None])
        return Decay(one, one, v[:, :, None], torch.full_like(one, -torch.inf)), None
