"""Gated slot attention (Zhang et al., 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fastweights.layers import (
    Linear,
    TokenContext,
    WholeNorm,
    head_width,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import ShapeError, Slots
from fastweights.shapes import Embedded, Output


class GSA(Mixer):
    """
    f_q  SiLU(x W_Q)        f_α  σ(x W_α)^(1/τ), τ = 8, one per slot; a slot takes 1 - α_t
    f_k  SiLU(x W_K)        f_g  1
    f_v  SiLU(x W_V)        d_k = d_v = d

    with RMSNorm(SiLU(o_t)) over all channels.

    Attributes:
        slots: m, of every head
        kv_heads: how many heads k, v and α have, each serving heads / kv_heads queries; None for
            all
    """

    def __init__(
        self,
        d: int,
        heads: Count = 4,
        slots: Count = 64,
        kv_heads: Count | None = None,
        tau: Positive = 8.0,
        eps: Positive = 1e-5,
    ) -> None:
        super().__init__(d)
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ShapeError(f"heads = {heads} is not a multiple of kv_heads = {kv_heads}")
        self.heads, self.kv_heads, self.tau = heads, kv_heads, tau
        width = head_width("d", d, heads)
        self.W_q = Linear(d, d, bias=False)
        self.W_k = Linear(d, width * kv_heads, bias=False)
        self.W_v = Linear(d, width * kv_heads, bias=False)
        self.W_alpha = Linear(d, slots * kv_heads, bias=False)
        self.W_o = Linear(d, d, bias=False)
        self.norm = WholeNorm(d, center=False, affine=True, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Slots, None]:
        q, *others = project_each(x, self.W_q, self.W_k, self.W_v, self.W_alpha)
        served = self.heads // self.kv_heads
        k, v, alpha = (split_heads(s, self.kv_heads) for s in others)
        k, v, log_alpha = F.silu(k), F.silu(v), F.logsigmoid(upcast(alpha)) / self.tau
        if served > 1:
            k, v, log_alpha = (s.repeat_interleave(served, dim=2) for s in (k, v, log_alpha))
        q = F.silu(split_heads(q, self.heads))
        return Slots(q, k, v, -torch.expm1(log_alpha), log_alpha), None

    def read(self, o: Output, gate: None, recurrence: Any) -> Embedded:
        return super().read(F.silu(o), gate, recurrence)
