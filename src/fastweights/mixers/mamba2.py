"""Mamba-2: structured state space duality, SSD (Dao & Gu, 2024); MesaNet Table 3. With a state for
every age of tokens: log-linear Mamba-2 (Guo et al., 2025).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    LevelWeights,
    Linear,
    ShortConvolution,
    TokenContext,
    bounded_exp,
    head_width,
    init_steps,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, LogLinear, Recurrence
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded, Output


class Mamba2(Mixer):
    """
    f_q  C          f_α  e^(-a Δ_t), one per head,  Δ_t = softplus(u W_Δ + b_Δ)
    f_k  B          f_g  SiLU(u W_z)
    f_v  Δ_t x      d_v = expand·d,  d_k / H = N

    with (x, B, C) = SiLU(conv(u W_xBC) + b), o_t ← o_t + D x_t, and RMSNorm of the gated output,
    o_t ⊙ f_g.

    Attributes:
        state: N
        groups: of heads that share B and C, and of channels that are normalised together
        scaled: f_v = Δ_t x, or f_v = x, the recurrence of MesaNet's Table 3
        decays: whether α decays; False (α = 1) is what MesaNet's appendix D.1 says of the same
            baseline
        eps: of the norm; None for no norm (Falcon-H1)
    """

    def __init__(
        self, d: int, heads: int = 4, state: Count = 64, expand: Positive = 2, conv: Count = 4,
        groups: Count = 1, scaled: bool = True, decays: bool = True, eps: Positive | None = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(d)
        width = round(expand * d)
        for name, channels, count in (("expand · d", width, heads), ("heads", heads, groups)):
            head_width(name, channels, count)
        if not (scaled or decays):
            raise ValueError("mamba2(scaled=False, decays=False) has no use for Δ; keep one")
        self.heads, self.groups, self.scaled = heads, groups, scaled
        self.split = [width, groups * state, groups * state]
        self.W_z, self.W_xBC = (Linear(d, n, bias=False) for n in (width, sum(self.split)))
        self.W_Delta, self.W_o = Linear(d, heads), Linear(width, d, bias=False)
        self.conv = ShortConvolution(sum(self.split), conv)
        self.conv_bias = nn.Parameter(torch.zeros(sum(self.split)))
        self.log_a = nn.Parameter(torch.empty(heads)) if decays else None
        self.D = nn.Parameter(torch.ones(heads))
        self.w_norm = None if eps is None else nn.Parameter(torch.ones(width))
        self.norm: nn.Module = (
            nn.Identity()
            if eps is None
            else HeadNorm(
                head_width("expand · d", width, groups), center=False, affine=False, eps=eps
            )
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """a uniform in [1, 16]; softplus(b_Δ) log-uniform in [0.001, 0.1]."""
        init_steps(self.W_Delta.bias)
        if self.log_a is not None:
            with torch.no_grad():
                nn.init.uniform_(self.log_a, 1, 16).log_()
        nn.init.zeros_(self.conv_bias)
        nn.init.ones_(self.D)
        if self.w_norm is not None:
            nn.init.ones_(self.w_norm)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay | LogLinear, Tensor]:
        gate, xBC, delta = project_each(x, self.W_z, self.W_xBC, self.W_Delta)
        xBC = self.conv(xBC, past, self.conv_bias, silu=True)
        delta = F.softplus(upcast(delta))[..., None]
        log_alpha = None if self.log_a is None else -delta * bounded_exp(self.log_a)[:, None]
        u, k, q = xBC.split(self.split, dim=-1)
        v = split_heads(with_room(u), self.heads)
        v = v * delta.to(v.dtype) if self.scaled else v
        gate = torch.cat([F.silu(with_room(gate)), u], dim=-1)
        return Decay(self._repeat_groups(q), self._repeat_groups(k), v, log_alpha), gate

    def _repeat_groups(self, x: Tensor) -> Tensor:
        x = split_heads(x, self.groups)
        return x if self.groups == 1 else x.repeat_interleave(self.heads // self.groups, dim=2)

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        gate, u = gate.chunk(2, dim=-1)
        o = (o + self.D[:, None] * split_heads(u, self.heads)).flatten(-2) * gate
        o = self.norm(split_heads(o, self.groups)).flatten(-2)
        return self.W_o(o if self.w_norm is None else o * self.w_norm)


class LogLinearMamba2(Mamba2):
    """
    f_q  C          f_α  e^(-a Δ_t), one per head,  Δ_t = softplus(u W_Δ + b_Δ)
    f_k  B          f_g  SiLU(u W_z)
    f_v  Δ_t x      d_v = expand·d,  d_k / H = N
    o_t  Σ_l λ_t^(l) C_t S_t^(l),  λ_t^(l) = softplus(c^(l) (u W_λ)^(l))

    otherwise as `Mamba2`.

    Attributes:
        levels: of ages, the first 2^(levels - 2) tokens at ones of their own
    """

    def __init__(
        self, d: int, heads: int = 4, state: Count = 64, expand: Count = 2, conv: Count = 4,
        groups: Count = 1, levels: Count = 15, eps: Positive = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(d, heads, state, expand, conv, groups, eps=eps)
        self.level_weights = LevelWeights(d, heads, levels)

    def project(self, x: Embedded, past: TokenContext) -> tuple[LogLinear, Tensor]:
        rule, gate = super().project(x, past)
        return LogLinear(cast(Decay, rule), self.level_weights(x)), gate
