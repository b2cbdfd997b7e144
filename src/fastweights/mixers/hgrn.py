"""HGRN: Hierarchically Gated Recurrent Neural Network (Qin, Yang & Zhong, 2023), the GLRU."""

from __future__ import annotations

from torch.nn import functional as F

from fastweights.layers import (
    Linear,
    SiLUGate,
    TokenContext,
    WholeNorm,
    log_gate,
    project_each,
    require_fraction,
)
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.shapes import Embedded


class HGRN(Mixer):
    """
    f_q  1                           f_α  β + (1 - β) σ(x W_f + b_f)
    f_k  1 - α                       f_g  SiLU(x W_g + b_g)
    f_v  SiLU(x W_c + b_c)           d_k = d_v = d = H

    with RMSNorm of all channels.

    Attributes:
        lower_bound: β, the least decay, rising from layer to layer
        tied: False: f_k = σ(x W_i + b_i), the GLRU before its gates are tied
    """

    def __init__(self, d: int, lower_bound: float = 0.0, tied: bool = True) -> None:
        super().__init__(d)
        self.lower_bound = require_fraction("lower_bound", lower_bound)
        self.W_f = Linear(d, d)
        self.W_i = None if tied else Linear(d, d)
        self.W_c = Linear(d, d)
        self.W_g = Linear(d, d)
        self.W_o = Linear(d, d, bias=False)
        self.norm = WholeNorm(d, center=False, affine=True)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, SiLUGate]:
        one = x.new_ones(1, 1, 1, 1)
        k = None if self.W_i is None else self.W_i(x).sigmoid()[..., None]
        forget, v, gate = project_each(x, self.W_f, self.W_c, self.W_g)
        log_alpha = log_gate(forget, self.lower_bound)
        return Decay(one, k, F.silu(v)[..., None], log_alpha[..., None]), SiLUGate(gate)
