"""S4: Efficiently Modeling Long Sequences with Structured State Spaces (Gu, Goel & Ré, 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import Linear, TokenContext, gated_halves
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import DPLR, Recurrence
from fastweights.shapes import Embedded, Output
from fastweights.systems import (
    DiagonalSystem,
    as_complex,
    hippo_low_rank,
    hippo_start,
    pairs,
    tustin,
)


class S4(Mixer):
    """
    f_q  C                                   f_α  (1 + ΔΛ/2) / (1 - ΔΛ/2)
    f_k  (1 - ΔA/2)⁻¹ ΔB,  A = Λ - P P*      f_g  1
    f_v  x                                   d_v = H = d,  d_k / H = N

    with S_t = (1 - ΔA/2)⁻¹ (1 + ΔA/2) S_{t-1} + kᵀ x_t, whose matrix is f_α and a term of rank one
    as A is, and y = GLU(GELU(Re(o) + D ⊙ x) W_O). Λ, P and B start as HiPPO-LegS has them and are
    one for all channels; every channel has its Δ and C.

    Attributes:
        state: N, in conjugate pairs
    """

    def __init__(self, d: int, state: Count = 64) -> None:
        super().__init__(d)
        self.A = DiagonalSystem((1, pairs(state)), (d, 1), hippo_start, tustin)
        self.P, self.B = (nn.Parameter(torch.empty(pairs(state), 2)) for _ in range(2))
        self.C = nn.Parameter(torch.empty(d, pairs(state), 2))
        self.D = nn.Parameter(torch.empty(d))
        self.W_o = Linear(d, 2 * d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """P and B of HiPPO-LegS; C of variance 1, half of it in each part; D is standard normal."""
        P = hippo_low_rank(len(self.P))
        with torch.no_grad():
            nn.init.zeros_(self.P).add_(torch.view_as_real(P))
            nn.init.zeros_(self.B).add_(2**0.5 * torch.view_as_real(P))
        nn.init.normal_(self.C, std=0.5**0.5)
        nn.init.normal_(self.D)

    def project(self, x: Embedded, past: TokenContext) -> tuple[DPLR, Tensor]:
        log_alpha, held = (_conjugates(s) for s in self.A())
        P, B, C = (_conjugates(as_complex(s)) for s in (self.P, self.B, self.C))
        # (1 - ΔA/2)⁻¹ by the Sherman-Morrison formula, (1 - ΔΛ/2)⁻¹ being (1 + α) / 2
        b = held * P / (2 + held @ (P.conj() * P)[:, None]) * 2
        k = held * B - b / 2 * (held @ (P.conj() * B)[:, None])
        a = P.conj() * (1 + log_alpha.exp()) / 2
        q, k, a, b, log_alpha = (s[None, None] for s in (C, k, a, b, log_alpha))
        return DPLR(q, k, x[..., None], a, b, log_alpha, before=True), x

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        y = o.real.squeeze(-1).to(gate.dtype) + self.D * gate
        return gated_halves(self.W_o(F.gelu(y)))


def _conjugates(z: Tensor) -> Tensor:
    """One of each pair ``[… N/2]`` → both ``[… N]``."""
    return torch.cat([z, z.conj()], -1)
