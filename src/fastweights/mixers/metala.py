"""MetaLA: Unified Optimal Linear Approximation to Softmax Attention Map (Chou et al., 2024),
appendix A3.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fastweights.layers import (
    Gate,
    HeadNorm,
    Linear,
    ShortConvolution,
    SiLUGate,
    TokenContext,
    head_width,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, CountOrZero, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay
from fastweights.shapes import Embedded, Output


class MetaLA(Mixer):
    """
    f_q  x W_Q        f_α  σ(x W_α)^(1/τ), τ = 16
    f_k  1 - α        f_g  SiLU(x W_G + b_G)
    f_v  x W_V        d_k = d/2,  d_v = d

    with x ← SiLU(conv(x)), and o_t ← o_t + σ(q_t (w_aug ⊙ k_t)ᵀ v_t), LayerNorm per head.

    Attributes:
        conv: size of the short convolution; 1 is none
        augmented: whether a token adds itself once more (self-augmentation)
        restore_key: f_k = x W_K instead, the paper's ablation "w/ key"
        scaled: q scaled by d'_k^(-1/2), but not in the self-augmentation, as in the published
            code
        rounded: α and 1 - α rounded to the streams' dtype, as in the published code
        keys: d_k; None for d/2
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        tau: Positive = 16.0,
        conv: CountOrZero = 4,
        augmented: bool = True,
        restore_key: bool = False,
        scaled: bool = False,
        rounded: bool = False,
        keys: Count | None = None,
    ) -> None:
        super().__init__(d)
        keys = d // 2 if keys is None else keys
        width = head_width("d_k", keys, heads)
        self.heads, self.tau, self.rounded = heads, tau, rounded
        self.scale = width**-0.5 if scaled else 1.0
        self.conv = ShortConvolution(d, conv) if conv > 1 else None
        self.W_q = Linear(d, keys, bias=False)
        self.W_alpha = Linear(d, keys, bias=False)
        self.W_k = Linear(d, keys, bias=False) if restore_key else None
        self.W_v = Linear(d, d, bias=False)
        self.W_g = Linear(d, d)
        self.W_o = Linear(d, d, bias=False)
        self.w_aug = nn.Parameter(torch.zeros(heads, width)) if augmented else None
        self.norm = HeadNorm(head_width("d", d, heads), center=True, affine=False)

    def reset_parameters(self) -> None:
        if self.w_aug is not None:
            nn.init.zeros_(self.w_aug)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, SiLUGate]:
        x = x if self.conv is None else self.conv(x, past, silu=True)
        given = [] if self.W_k is None else [self.W_k]
        gate, *heads = project_each(x, self.W_g, self.W_q, self.W_alpha, self.W_v, *given)
        q, a, v, *keys = (split_heads(s, self.heads) for s in heads)
        k = keys[0] if keys else None
        log_alpha = F.logsigmoid(a if self.rounded else upcast(a)) / self.tau
        k = 1 - log_alpha.exp() if self.rounded and k is None else k
        q = q if self.scale == 1 else q * self.scale
        return Decay(q, k, v, upcast(log_alpha)), SiLUGate(gate)

    def read(self, o: Output, gate: Gate, recurrence: Decay) -> Embedded:
        if self.w_aug is not None:
            own = (recurrence.q * (self.w_aug / self.scale) * recurrence.key).sum(
                -1, keepdim=True
            ) * recurrence.v
            half_less = (
                own / 2
            ).tanh() / 2  # σ(·) - ½: LayerNorm removes a constant, whose bits low precision lacks
            o = o + half_less.to(o.dtype)
        return super().read(o, gate, recurrence)
