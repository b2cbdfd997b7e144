"""S4D: On the Parameterization and Initialization of Diagonal State Space Models (Gu, Gupta, Goel &
Ré, 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import Linear, TokenContext, gated_halves
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Recurrence
from fastweights.shapes import Embedded, Output
from fastweights.systems import (
    DiagonalSystem,
    as_complex,
    inverse_start,
    linear_start,
    pairs,
    tustin,
    zero_order,
)


class S4D(Mixer):
    """
    f_q  C                                       f_α  e^(ΔA), or (1 + ΔA/2) / (1 - ΔA/2)
    f_k  (e^(ΔA) - 1) / A, or Δ / (1 - ΔA/2)     f_g  1
    f_v  x                                       d_v = H = d,  d_k / H = N

    with y = GLU(GELU(2 Re(o) + D ⊙ x) W_O): half of N conjugate pairs are kept; B = 1, which C
    absorbs.

    Attributes:
        state: N
        bilinear: the second discretisation (Tustin's) instead of the first (zero-order hold)
        inverse: A starts as S4D-Inv instead of S4D-Lin
    """

    def __init__(
        self, d: int, state: Count = 64, bilinear: bool = False, inverse: bool = False
    ) -> None:
        super().__init__(d)
        start, hold = inverse_start if inverse else linear_start, tustin if bilinear else zero_order
        self.A = DiagonalSystem((d, pairs(state)), (d, 1), start, hold)
        self.C = nn.Parameter(torch.empty(d, pairs(state), 2))
        self.D = nn.Parameter(torch.empty(d))
        self.W_o = Linear(d, 2 * d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """C of variance 1, half of it in each part; D is standard normal."""
        nn.init.normal_(self.C, std=0.5**0.5)
        nn.init.normal_(self.D)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, None]:
        log_alpha, k = self.A()
        q, skip = 2 * as_complex(self.C), self.D[None, None, :, None]
        return Decay(q[None, None], k[None, None], x[..., None], log_alpha[None, None], skip), None

    def read(self, o: Output, gate: Tensor | None, recurrence: Recurrence) -> Embedded:
        y = o.real.squeeze(-1).to(self.D.dtype)
        return gated_halves(self.W_o(F.gelu(y)))
