"""RWKV: Reinventing RNNs for the Transformer Era (Peng et al., 2023), version 4: its time mixing,
and its channel mixing, eq. 18-20.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    Linear,
    TokenContext,
    TokenShift,
    bounded_exp,
    project_pairs,
    upcast,
)
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Amplified, Bonus, Decay, Normalized, Recurrence
from fastweights.shapes import Embedded, Output


class RWKV4(Mixer):
    """
    f_q  1                  f_α  e^(-e^w)
    f_k  e^(shift(x) W_K)   f_g  σ(shift(x) W_r)
    f_v  shift(x) W_V       d_k = d_v = H = d

    with shift(x)_t = μ ⊙ x_t + (1 - μ) ⊙ x_{t-1}, a μ each, and o_t = (S_{t-1} + e^u k_t v_t) /
    (z_{t-1} + e^u k_t): a token weighs e^u in its own output, undecayed. w, u and μ start as in the
    official code's first layer; how they go on over the depth, a mixer does not know.
    """

    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.shift_k, self.shift_v, self.shift_r = (TokenShift(d) for _ in range(3))
        self.W_k, self.W_v, self.W_r, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.w, self.u = nn.Parameter(torch.empty(d)), nn.Parameter(torch.empty(d))
        self.norm = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """With c = channel / (d - 1): w = -5 + 8 c^0.7, u = log 0.3 ± ½ or 0 in turn, μ_k = μ_v =
        c, μ_r = √c.
        """
        channel = torch.arange(self.d)
        c = channel / max(self.d - 1, 1)
        starts = {
            self.w: -5 + 8 * c**0.7,
            self.u: torch.tensor(0.3).log() + ((channel + 1) % 3 - 1) / 2,
        }
        starts |= {self.shift_k.mu: c, self.shift_v.mu: c, self.shift_r.mu: c.sqrt()}
        with torch.no_grad():
            for parameter, start in starts.items():
                nn.init.zeros_(parameter).add_(start)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Amplified, Tensor]:
        k, v, r = project_pairs(
            (self.W_k, self.shift_k(x, past)),
            (self.W_v, self.shift_v(x, past)),
            (self.W_r, self.shift_r(x, past)),
        )
        rate, bonus = (bounded_exp(s).view(1, 1, -1, 1) for s in (self.w, self.u))
        one = torch.ones_like(x[:1, :1, :1, None])
        rule = Bonus(one, one, v[..., None], -rate, bonus)
        return Amplified(Normalized(rule), upcast(k)[..., None]), r.sigmoid()


class RWKV4Channel(Mixer):
    """
    f_q  1                           f_α  0
    f_k  1                           f_g  σ(shift(x) W_r)
    f_v  max(shift(x) W_k, 0)²       d_k = H = 1,  d_v = width

    and y = (o W_o) ⊙ f_g: an MLP, but for the token shift (see `RWKV4`), which needs a state.

    Attributes:
        width: of the hidden layer; None for 4 d
    """

    def __init__(self, d: int, width: Count | None = None) -> None:
        super().__init__(d)
        width = 4 * d if width is None else width
        self.shift_k, self.shift_r = TokenShift(d), TokenShift(d)
        self.W_k, self.W_o = Linear(d, width, bias=False), Linear(width, d, bias=False)
        self.W_r = Linear(d, d, bias=False)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, Tensor]:
        v, gate = project_pairs(
            (self.W_k, self.shift_k(x, past)), (self.W_r, self.shift_r(x, past))
        )
        v, gate = F.relu(v).square(), gate.sigmoid()
        one = torch.ones_like(v[:1, :1, :1, None])
        return Decay(one, one, v[:, :, None], torch.full_like(one, -torch.inf)), gate

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        return self.W_o(o.flatten(-2)) * gate
