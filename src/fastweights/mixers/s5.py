"""S5: Simplified State Space Layers for Sequence Modeling (Smith, Warrington & Linderman, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import Linear, TokenContext
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Recurrence
from fastweights.shapes import Embedded, Output
from fastweights.systems import (
    DiagonalSystem,
    as_complex_channels,
    as_real,
    hippo_start,
    pairs,
    zero_order,
)


class S5(Mixer):
    """
    f_q  1                                f_α  e^(ΔA)
    f_k  1                                f_g  1,  W_O = C
    f_v  (e^(ΔA) - 1) / A ⊙ x W_B         d_v = H = N,  d_k / H = 1

    with y = 2 Re(C h) + D ⊙ x, then GELU(y) ⊙ σ(GELU(y) W_G): half of N conjugate pairs are kept,
    one Δ each. W_B and W_O hold real and imaginary parts in turn, W_O those of 2C and the sign of
    the latter. The paper's B and C start in the eigenbasis of HiPPO, which is unitary: they start
    as normal as any.

    Attributes:
        state: N, shared by all channels
    """

    def __init__(self, d: int, state: Count = 64) -> None:
        super().__init__(d)
        self.A = DiagonalSystem((1, pairs(state)), (1, pairs(state)), hippo_start, zero_order)
        self.W_B = Linear(d, state, bias=False)
        self.W_o = Linear(state, d, bias=False)
        self.W_g = Linear(d, d)
        self.D = nn.Parameter(torch.empty(d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.D)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        log_alpha, B = self.A()
        one = torch.ones_like(x[:1, :1, :1, None])
        return Decay(
            one, one, (B * as_complex_channels(self.W_B(x)))[..., None], log_alpha.T[None, None]
        ), x

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        y = F.gelu(self.W_o(as_real(o.squeeze(-1)).to(gate.dtype)) + self.D * gate)
        return y * self.W_g(y).sigmoid()
