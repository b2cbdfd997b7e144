"""Normalized attention: the Dynamical Systems Framework (Sieber et al., 2024), eq. 22, 29, 30."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    LEAST_LOG,
    Linear,
    TokenContext,
    bounded_exp,
    choose,
    head_width,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded

NORMALISERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "exp": bounded_exp,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
}
"""η of the logits x W_η: eq. 22, 29 and 30."""


class NormalizedAttention(Mixer):
    """
    f_q  x W_Q / η(x W_η)        f_α  1
    f_k  x W_K                   f_g  1
    f_v  x W_V                   d_k = d_v = d

    with one η per head; o_t = q_t Σ_s k_sᵀ v_s / η_t. A logit below log 2⁻²³ counts as
    that, so that outputs and their squares have room in float32.

    Attributes:
        eta: exp, softplus or sigmoid
        keys: d_k, of all heads; None for d
        bias: what the bias of η's logits starts at, which makes o_t smaller where it is large;
            None for no bias (the published code has one)
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        eta: str = "exp",
        keys: Count | None = None,
        bias: float | None = None,
    ) -> None:
        super().__init__(d)
        keys = d if keys is None else keys
        head_width("d", d, heads)
        head_width("d_k", keys, heads)
        self.heads, self.eta = heads, choose("eta", eta, NORMALISERS)
        self.W_q = Linear(d, keys, bias=False)
        self.W_k = Linear(d, keys, bias=False)
        self.W_v = Linear(d, d, bias=False)
        self.W_eta, self.start = Linear(d, heads, bias=bias is not None), bias
        self.W_o = Linear(d, d, bias=False)
        self.norm = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.start is not None:
            nn.init.constant_(self.W_eta.bias, self.start)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, None]:
        q, k, v = (split_heads(W(x), self.heads) for W in (self.W_q, self.W_k, self.W_v))
        eta = self.eta(upcast(self.W_eta(x)).clamp(min=LEAST_LOG))[..., None]
        return Decay((q / eta).to(with_room(q).dtype), k, v, None), None
