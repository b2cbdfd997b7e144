"""The forgetting transformer (Lin et al., 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    PreviousToken,
    TokenContext,
    head_width,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Softmax
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded


class FoX(Mixer):
    """
    f_q  RMSNorm(x W_Q)             f_α  σ(x W_α + b_α), one per head, on the weights of the past
    f_k  RMSNorm(shift_k(x W_K))    f_g  σ(x W_G)
    f_v  shift_v(x W_V)             d_q = d_k = d_v = d
    o_t  Σ_s softmax_s(q_t·k_s / √d'_k + Σ_{j=s+1..t} log α_j) v_s, RMSNorm per head

    with shift(y)_t = σ_t y_{t-1} + (1 - σ_t) y_t, σ_t = σ(x_t W) a number per head. This is FoX
    (Pro); FoX (LLaMA) has neither norms nor shifts nor gate. No positions.

    Attributes:
        window: how many tokens a query sees; None for all
        qk_norm, shifted: the norm of q and k; the shifts of k and v
        normed, gated: the norm of o; f_g, or 1
        sinks: a learnt score per head that takes a weight of its own
    """

    def __init__(
        self, d: int, heads: Count = 4, window: Count | None = None, qk_norm: bool = True,
        shifted: bool = True, normed: bool = True, gated: bool = True, sinks: bool = False,
        eps: Positive = 1e-6,
    ) -> None:  # fmt: skip
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.window = heads, window
        self.W_q, self.W_k, self.W_v, self.W_o = (Linear(d, d, bias=False) for _ in range(4))
        self.W_alpha = Linear(d, heads)
        self.W_g = Linear(d, d, bias=False) if gated else None
        shifts = [Linear(d, heads, bias=False) if shifted else None for _ in range(2)]
        self.W_shift_k, self.W_shift_v = shifts
        self.before_k, self.before_v = PreviousToken(), PreviousToken()
        norms = [nn.Parameter(torch.empty(d)) if there else None for there in (qk_norm, normed)]
        self.w_q, self.w_norm = norms
        self.w_k = nn.Parameter(torch.empty(d)) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(heads)) if sinks else None
        self.unit = HeadNorm(width, center=False, affine=False, eps=eps)
        self.norm = self.unit if normed else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of norms 1, sinks 0."""
        for weight in (self.w_q, self.w_k, self.w_norm):
            if weight is not None:
                nn.init.ones_(weight)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Softmax, Tensor | None]:
        q, k, v, alpha = project_each(x, self.W_q, self.W_k, self.W_v, self.W_alpha)
        k = self._shift(k, x, past, self.before_k, self.W_shift_k)
        v = self._shift(v, x, past, self.before_v, self.W_shift_v)
        q, k = self._normalize(q, self.w_q), self._normalize(k, self.w_k)
        log_alpha = F.logsigmoid(upcast(alpha))[..., None]
        sinks = None if self.sinks is None else upcast(self.sinks)[None, None, :, None]
        record = Softmax(q, k, split_heads(v, self.heads), self.window, log_alpha, sinks)
        gate = None if self.W_g is None else self.W_g(x).sigmoid()
        if self.w_norm is None:
            return record, gate
        return record, self.w_norm.expand_as(x) if gate is None else gate * self.w_norm

    def _shift(
        self, y: Tensor, x: Tensor, past: TokenContext, before: PreviousToken, W: nn.Module | None
    ) -> Tensor:
        if W is None:
            return y
        share = with_room(W(x)).sigmoid().repeat_interleave(self.d // self.heads, -1)
        return torch.lerp(with_room(y), with_room(before(y, past)), share).to(y.dtype)

    def _normalize(self, y: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return split_heads(y, self.heads)
        return self.unit(split_heads(y, self.heads)) * weight.view(self.heads, -1)
