"""Mamba, the selective state space model S6 (Gu & Dao, 2023); DSF eq. 19."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    ShortConvolution,
    TokenContext,
    bounded_exp,
    project_each,
    upcast,
)
from fastweights.layers.arguments import Count, Positive
from fastweights.mixer import Mixer
from fastweights.recurrence import Recurrence, Selective
from fastweights.shapes import Embedded, Output


class Mamba(Mixer):
    """
    f_q  x W_C             f_α  e^(Δ_t A),  Δ_t = softplus(x W¹_Δ W²_Δ + b_Δ)
    f_k  x W_B             f_g  SiLU(u W_z)
    f_v  Δ_t ⊙ x           d_v = H = expand·d,  d_k / H = N

    with x = SiLU(conv(u W_u)) of the layer's input u, and o_t ← o_t + D ⊙ x_t. The paper writes Δ_t
    with the key, per channel; with the value it leaves one key for all of them.

    Attributes:
        state: N, the state rows per channel
        rank: width of the bottleneck in Δ; None for d / 16, rounded up
        norm_eps: ε of an RMSNorm of x W_B, x W_C and x W¹_Δ (Falcon-Mamba, Jamba); None for no norm
        affine: whether these norms have weights (Jamba)
    """

    def __init__(
        self, d: int, state: Count = 16, expand: Count = 2, conv: Count = 4,
        rank: Count | None = None, norm_eps: Positive | None = None, affine: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(d)
        width, rank = expand * d, math.ceil(d / 16) if rank is None else rank
        self.W_u = Linear(d, width, bias=False)
        self.W_z = Linear(d, width, bias=False)
        self.conv = ShortConvolution(width, conv)
        self.conv_bias = nn.Parameter(torch.zeros(width))
        self.W_B = Linear(width, state, bias=False)
        self.W_C = Linear(width, state, bias=False)
        self.W_Delta_1 = Linear(width, rank, bias=False)
        self.W_Delta_2 = Linear(rank, width)
        self.norm_B, self.norm_C, self.norm_Delta = (
            nn.Identity()
            if norm_eps is None
            else HeadNorm(n, center=False, affine=affine, eps=norm_eps)
            for n in (state, state, rank)
        )
        self.log_A = nn.Parameter(torch.empty(width, state))
        self.D = nn.Parameter(torch.ones(width))
        self.W_o = Linear(width, d, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A = -(1 … N) in every channel; softplus(b_Δ) log-uniform in [0.001, 0.1]."""
        with torch.no_grad():
            n = torch.arange(1, self.log_A.shape[1] + 1, dtype=torch.float32)
            step = (
                torch.empty(self.W_Delta_2.bias.shape)
                .uniform_(math.log(1e-3), math.log(1e-1))
                .exp()
            )
            nn.init.zeros_(self.log_A).add_(n.log())
            nn.init.zeros_(self.W_Delta_2.bias).add_(step + torch.log(-torch.expm1(-step)))
        bound = self.W_Delta_2.in_features**-0.5
        nn.init.uniform_(self.W_Delta_2.weight, -bound, bound)
        nn.init.ones_(self.D)
        nn.init.zeros_(self.conv_bias)

    def project(self, x: Embedded, past: TokenContext) -> tuple[Selective, Tensor]:
        gate, x = project_each(x, self.W_z, self.W_u)
        gate, x = F.silu(gate), self.conv(x, past, self.conv_bias, silu=True)
        step, q, k = project_each(x, self.W_Delta_1, self.W_C, self.W_B)
        step, q, k = self.norm_Delta(step), self.norm_C(q), self.norm_B(k)
        delta = F.softplus(upcast(self.W_Delta_2(step)))
        v, rate = delta.to(x.dtype) * x, bounded_exp(self.log_A)[None, None]
        record = Selective(q[:, :, None], k[:, :, None], v[..., None], -delta[..., None], rate)
        return record, torch.cat([gate, x], dim=-1)

    def read(self, o: Output, gate: Tensor, recurrence: Recurrence) -> Embedded:
        gate, x = gate.chunk(2, dim=-1)
        return self.W_o((o.flatten(-2) + self.D * x) * gate)
