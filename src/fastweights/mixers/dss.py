"""Diagonal State Spaces are as Effective as Structured State Spaces (Gupta, Gu & Berant, 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import Linear, TokenContext
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Recurrence
from fastweights.shapes import Embedded, Output
from fastweights.systems import DiagonalSystem, as_complex, hippo_start, zero_order


class DSS(Mixer):
    """
    f_q  C                   f_α  e^(ΔA)
    f_k  (e^(ΔA) - 1) / A    f_g  1
    f_v  x                   d_v = H = d,  d_k / H = N

    with y = GELU(Re(o) + D ⊙ x) W_O: DSS_exp, A = -e^(A_re) + i A_im shared by all channels, one Δ
    each, B = 1.

    Attributes:
        state: N, the complex states per channel
    """

    def __init__(self, d: int, state: Count = 64) -> None:
        super().__init__(d)
        self.A = DiagonalSystem((1, state), (d, 1), hippo_start, zero_order)
        self.C = nn.Parameter(torch.empty(d, state, 2))
        self.D = nn.Parameter(torch.empty(d))
        self.W_o = Linear(d, d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Real and imaginary parts of C, and D, are standard normal."""
        nn.init.normal_(self.C)
        nn.init.normal_(self.D)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, None]:
        log_alpha, k = self.A()
        q, skip = as_complex(self.C), self.D[None, None, :, None]
        return Decay(q[None, None], k[None, None], x[..., None], log_alpha[None, None], skip), None

    def read(self, o: Output, gate: Tensor | None, recurrence: Recurrence) -> Embedded:
        y = o.real.squeeze(-1).to(self.D.dtype)
        return self.W_o(F.gelu(y))
