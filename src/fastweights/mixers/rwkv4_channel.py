"""RWKV: Reinventing RNNs for the Transformer Era (Peng et al., 2023), its channel mixing (version
4), eq. 18-20.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.layers import Linear, TokenContext, TokenShift, project_pairs
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, Recurrence
from fastweights.shapes import Embedded, Output


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
