"""LRU: Resurrecting Recurrent Neural Networks for Long Sequences (Orvieto et al., 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fastweights.layers import Linear, TokenContext, WideParameters, bounded_exp
from fastweights.layers.arguments import Count, NonNegative
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Recurrence
from fastweights.shapes import Embedded, Output
from fastweights.systems import as_complex_channels, as_real


class LRU(WideParameters, Mixer):
    """
    f_q  1             f_α  λ = e^(-e^ν + i e^θ)
    f_k  1             f_g  1,  W_O = C
    f_v  e^γ ⊙ x W_B   d_v = H = N,  d_k / H = 1

    with y = Re(C h) + D ⊙ x: complex B, C and λ, no conjugates; γ starts as log √(1 - |λ|²). W_B
    and W_O hold real and imaginary parts in turn, W_O the sign of the latter. The GELU, GLU and
    norm around it are the block's.

    Attributes:
        state: N
        r_min, r_max: the ring in which λ starts, uniformly; max_phase its largest angle
    """

    wide = ("nu", "theta")

    def __init__(
        self,
        d: int,
        state: Count = 64,
        r_min: float = 0.9,
        r_max: float = 0.999,
        max_phase: NonNegative = 2 * math.pi,
    ) -> None:
        super().__init__(d)
        if not 0 <= r_min < r_max < 1:
            raise ValueError(
                f"the ring has radii r_min = {r_min} and r_max = {r_max}; use 0 ≤ r_min < r_max < 1"
            )
        self.r_min, self.r_max, self.max_phase = r_min, r_max, max_phase
        self.nu, self.theta, self.gamma = (nn.Parameter(torch.empty(state)) for _ in range(3))
        self.W_B = Linear(d, 2 * state, bias=False)
        self.W_o = Linear(2 * state, d, bias=False)
        self.D = nn.Parameter(torch.empty(d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """B of variance 1/d, half of it in each part; D is standard normal."""
        decay = -torch.empty_like(self.nu).uniform_(self.r_min**2, self.r_max**2).log() / 2
        with torch.no_grad():
            nn.init.zeros_(self.nu).add_(decay.log())
            nn.init.zeros_(self.gamma).add_((-torch.expm1(-2 * decay)).log() / 2)
            nn.init.uniform_(self.theta, 0, self.max_phase).log_()
        nn.init.normal_(self.W_B.weight, std=(2 * self.d) ** -0.5)
        nn.init.normal_(self.D)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        log_alpha = torch.complex(-bounded_exp(self.nu), bounded_exp(self.theta))
        one = torch.ones_like(x[:1, :1, :1, None])
        v = bounded_exp(self.gamma) * as_complex_channels(self.W_B(x))
        return Decay(one, one, v[..., None], log_alpha[None, None, :, None]), x

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        return self.W_o(as_real(o.squeeze(-1)).to(gate.dtype)) + self.D * gate
