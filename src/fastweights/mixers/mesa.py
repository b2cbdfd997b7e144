"""MesaNet: Sequence Modeling by Locally Optimal Test-Time Training (von Oswald et al., 2025)."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from fastweights.layers import HeadNorm, Past, ShortConvolution, head_width, heads, precise
from fastweights.mixer import Mixer
from fastweights.recurrence import ConjugateGradient, Mesa, Signed, Solver
from fastweights.recurrence.base import ShapeError
from fastweights.shapes import Embedded

SOFTPLUS_START = 0.75


class MesaLayer(Mixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_γ  σ(x W_γ + b_γ), one per head; signed: tanh
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β + b_β), one per head
    f_v  x W_V                        f_g  1
    d_k = d_v = d, RMSNorm per head, Λ = ridge - 0.75 + softplus(λ), `ridge` at first

    and γ ← γ (1 - (1 - bound) β²), which keeps H well conditioned on repetitive inputs (appendix F.5).

    steps, tol    of conjugate gradients
    ridge         1 for language; 50 if signed, for γ ∈ (-1, 1) makes H indefinite (appendix H: state tracking)
    random_steps  in training, each batch solves in 0 to `steps` steps and is differentiated through them, so that
                  one model serves at any number of steps (appendix I)
    """

    def __init__(
        self,
        d: int,
        heads: int = 4,
        steps: int = 30,
        tol: float | None = None,
        conv: int = 4,
        bound: float = 0.9975,
        ridge: float = 1.0,
        signed: bool = False,
        random_steps: bool = False,
    ) -> None:
        super().__init__(d)
        if ridge < 1:
            raise ShapeError(f"ridge = {ridge}; it starts at 1 or above, and stays above ridge - {SOFTPLUS_START}")
        width = head_width("d", d, heads)
        self.heads, self.bound, self.signed, self.random_steps = heads, bound, signed, random_steps
        self.least_ridge = ridge - SOFTPLUS_START
        self.solver: Solver = ConjugateGradient(steps, tol)
        self.W_q = nn.Linear(d, d, bias=False)
        self.W_k = nn.Linear(d, d, bias=False)
        self.W_v = nn.Linear(d, d, bias=False)
        self.W_gamma = nn.Linear(d, heads)
        self.W_beta = nn.Linear(d, heads)
        self.W_o = nn.Linear(d, d, bias=False)
        self.conv_q, self.conv_k = ShortConvolution(d, conv), ShortConvolution(d, conv)
        self.ridge = nn.Parameter(torch.empty(heads, width))
        self.norm = HeadNorm(width, center=False, affine=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.ridge, math.log(math.expm1(SOFTPLUS_START)))

    def project(self, x: Embedded, past: Past) -> tuple[Mesa | Signed, None]:
        q = F.normalize(heads(F.silu(self.conv_q(self.W_q(x), past)), self.heads), dim=-1)
        k = F.normalize(heads(F.silu(self.conv_k(self.W_k(x), past)), self.heads), dim=-1)
        beta, gamma = self.W_beta(x).sigmoid()[..., None], precise(self.W_gamma(x))[..., None]
        bounded = torch.log1p(-(1 - self.bound) * precise(beta).square())
        ridge = self.least_ridge + F.softplus(precise(self.ridge))
        solver = self.solver.shortened() if self.random_steps and self.training else self.solver
        streams = (q, k, heads(self.W_v(x), self.heads), beta)
        if not self.signed:
            return Mesa(*streams, F.logsigmoid(gamma) + bounded, ridge, solver), None
        gamma = gamma.tanh()
        magnitude = gamma.abs().clamp(min=torch.finfo(gamma.dtype).tiny).log()
        return Signed(Mesa(*streams, magnitude + bounded, ridge, solver), gamma.detach()), None
