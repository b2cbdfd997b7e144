"""Raven: slots that a sparse router chooses (Afzal, Bick, Xing, Cevher & Gu, 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    LARGEST,
    HeadNorm,
    Linear,
    TokenContext,
    WholeNorm,
    bounded_exp,
    head_width,
    init_softplus_decay,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, NonNegative, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import ShapeError, Slots
from fastweights.shapes import Embedded, Output


class Raven(Mixer):
    """
    f_q  RMSNorm(SiLU(x W_Q))        f_α  exp(-a r_t softplus(x W_α + b_α)), a slot takes 1 - α_t
    f_k  RMSNorm(SiLU(x W_K))        f_g  1
    f_v  SiLU(x W_V)                 d_k = d_v = d

    with r_t the `active` largest of σ(x W_R), one per slot, divided by their sum, and 0 for all
    other slots, which are left as they are; RMSNorm(SiLU(o_t)) over all channels. The noise that
    the authors' code adds to the router in training is left out.

    Attributes:
        slots: m, of every head
        active: how many of them a token is written into
        floor: what is added to the sum that r_t is divided by
    """

    def __init__(
        self,
        d: int,
        heads: Count = 4,
        slots: Count = 64,
        active: Count = 16,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
    ) -> None:
        super().__init__(d)
        if active > slots:
            raise ShapeError(
                f"active = {active} is more than slots = {slots}; a token is written into some of"
                " the slots or all"
            )
        self.heads, self.active, self.floor = heads, active, floor
        width = head_width("d", d, heads)
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.W_alpha, self.W_r = Linear(d, heads), Linear(d, slots * heads, bias=False)
        self.log_a = nn.Parameter(torch.empty(heads))
        self.norm_q, self.norm_k = (
            HeadNorm(width, center=False, affine=True, eps=eps) for _ in range(2)
        )
        self.norm = WholeNorm(d, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `init_softplus_decay` says, but for a, uniform in [0, 16]."""
        init_softplus_decay(self.log_a, self.W_alpha.bias, least=1e-4)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Slots, None]:
        q, k, v, router, alpha = project_each(
            x, self.W_q, self.W_k, self.W_v, self.W_r, self.W_alpha
        )
        q, k, v = (F.silu(split_heads(s, self.heads)) for s in (q, k, v))
        forget = bounded_exp(self.log_a) * F.softplus(upcast(alpha))
        log_alpha = -forget[..., None] * self._route(upcast(split_heads(router, self.heads)))
        q, k = self.norm_q(q), self.norm_k(k)
        return Slots(q, k, v, -torch.expm1(log_alpha), log_alpha), None

    def _route(self, logits: Tensor) -> Tensor:
        """r ``[b t h m]``: chosen by the logits, which do not round to each other."""
        chosen = logits.topk(self.active, dim=-1)
        # where all are far below 0, σ is e^x, and a factor common to all cancels
        common = (chosen.values.detach()[..., :1] + LARGEST).clamp(max=0)
        scores = (chosen.values - common).sigmoid()
        share = scores / (scores.sum(-1, keepdim=True) + self.floor * (-common).exp())
        return torch.zeros_like(logits).scatter(-1, chosen.indices, share)

    def read(self, o: Output, gate: None, recurrence: Any) -> Embedded:
        return super().read(F.silu(o), gate, recurrence)
