"""HGRN2: Gated Linear RNNs with State Expansion (Qin et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    Linear,
    TokenContext,
    WholeNorm,
    head_width,
    log_gate,
    project_each,
    require_fraction,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.shapes import Embedded


class HGRN2(Mixer):
    """
    f_q  SiLU(x W_Q)        f_α  β + (1 - β) σ(x W_f)
    f_k  1 - α              f_g  1
    f_v  x W_V              d_k = d_v = d

    with RMSNorm of all heads together.

    Attributes:
        heads: H; the state is expanded d / H times
        lower_bound: β, the least decay, rising from layer to layer; None for a learnt one of every
            channel, σ(b_β), one half at first
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        lower_bound: float | None = 0.0,
        eps: Positive = 1e-5,
    ) -> None:
        super().__init__(d)
        head_width("d", d, heads)
        self.heads, self.lower_bound = heads, require_fraction("lower_bound", lower_bound or 0.0)
        self.b_beta = nn.Parameter(torch.empty(d)) if lower_bound is None else None
        self.W_q, self.W_f, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.norm = WholeNorm(d, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.b_beta is not None:
            nn.init.zeros_(self.b_beta)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, None]:
        q, v, forget = project_each(x, self.W_q, self.W_v, self.W_f)
        log_alpha = self._log_decay(forget)
        q, v, log_alpha = (split_heads(s, self.heads) for s in (F.silu(q), v, log_alpha))
        return Decay(q, None, v, log_alpha), None

    def _log_decay(self, forget: Tensor) -> Tensor:
        if self.b_beta is None:
            return log_gate(forget, self.lower_bound)
        least, rest = (F.logsigmoid(upcast(b)) for b in (self.b_beta, -self.b_beta))
        return torch.logaddexp(rest + F.logsigmoid(upcast(forget)), least)
