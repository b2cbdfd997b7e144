"""Retentive Network (Sun et al., 2023)."""

from __future__ import annotations

import torch

from fastweights.layers import (
    HeadNorm,
    Linear,
    Rope,
    SiLUGate,
    TokenContext,
    head_numbers,
    head_width,
    project_each,
    split_heads,
)
from fastweights.layers.arguments import Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Decay, ShapeError
from fastweights.shapes import Embedded


class RetNet(Mixer):
    """
    f_q  x W_Q        f_α  λ e^(jθ), λ = 1 - 2^(-5-h) of head h
    f_k  x W_K        f_g  SiLU(x W_G)
    f_v  x W_V        d_k = d,  d_v = 2d

    with θ as in RoPE, which turns q and k instead of the state, k scaled by d'_k^(-1/2), LayerNorm
    per head.

    Attributes:
        expand_v: d_v / d
        center, affine: whether the norm subtracts the mean, and whether it has weights
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        expand_v: Positive = 2.0,
        center: bool = True,
        affine: bool = False,
        eps: Positive = 1e-5,
    ) -> None:
        super().__init__(d)
        values = round(expand_v * d)
        width, value_width = head_width("d", d, heads), head_width("d_v", values, heads)
        if width % 2:
            raise ShapeError(f"RoPE turns pairs of channels: d / heads = {width} must be even")
        self.heads, self.scale = heads, width**-0.5
        self.W_q = Linear(d, d, bias=False)
        self.W_k = Linear(d, d, bias=False)
        self.W_v = Linear(d, values, bias=False)
        self.W_g = Linear(d, values, bias=False)
        self.W_o = Linear(values, d, bias=False)
        self.norm = HeadNorm(value_width, center=center, affine=affine, eps=eps)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Decay, SiLUGate]:
        *heads, gate = project_each(x, self.W_q, self.W_k, self.W_v, self.W_g)
        q, k, v = (split_heads(s, self.heads) for s in heads)
        q, k = Rope(q.shape[-1]).turn(past.positions, q, k)
        k = k * self.scale
        log_lambda = torch.log1p(-(2.0 ** (-5 - head_numbers(self.heads, x))))
        return Decay(q, k, v, log_lambda), SiLUGate(gate)
