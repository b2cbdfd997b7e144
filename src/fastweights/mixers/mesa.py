"""MesaNet: Sequence Modeling by Locally Optimal Test-Time Training (von Oswald et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import (
    HeadNorm,
    Linear,
    ShortConvolution,
    TokenContext,
    head_width,
    l2_normalize,
    project_each,
    split_heads,
    upcast,
)
from fastweights.layers.arguments import Count, NonNegative, Positive, Share
from fastweights.mixer import Mixer
from fastweights.recurrence import ConjugateGradient, Mesa, Signed, Solver
from fastweights.recurrence.streams import with_room
from fastweights.shapes import Embedded

SOFTPLUS_START = 0.75


class MesaLayer(Mixer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_γ  σ(x W_γ + b_γ), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β + b_β), one per head
    f_v  x W_V                        f_g  1
    d_k = d_v = d, RMSNorm per head, Λ = 0.25 + softplus(λ), 1 at first

    and γ ← γ (1 - (1 - bound) β²), which keeps H well conditioned on repetitive inputs (appendix
    F.5).

    Attributes:
        steps, tol: of conjugate gradients
        bound: the largest γ where β = 1; 1 leaves γ as it is
        eps, floor: of the norm and of L2, see `l2_normalize`
        random_steps: in training, each batch solves in 0 to `steps` steps and is differentiated
            through them, so that one model serves at any number of steps (appendix I)
    """

    least_ridge: ClassVar[float] = 0.25

    def __init__(
        self,
        d: int,
        heads: int = 4,
        steps: int = 30,
        tol: float | None = None,
        conv: Count = 4,
        bound: Share = 0.9975,
        eps: Positive = 1e-5,
        floor: NonNegative = 0.0,
        random_steps: bool = False,
    ) -> None:
        super().__init__(d)
        width = head_width("d", d, heads)
        self.heads, self.bound, self.floor, self.random_steps = heads, bound, floor, random_steps
        self.solver: Solver = ConjugateGradient(steps, tol)
        self.W_q, self.W_k, self.W_v = (Linear(d, d, bias=False) for _ in range(3))
        self.W_gamma = Linear(d, heads)
        self.W_beta = Linear(d, heads)
        self.W_o = Linear(d, d, bias=False)
        self.conv_q, self.conv_k = ShortConvolution(d, conv), ShortConvolution(d, conv)
        self.ridge = nn.Parameter(torch.empty(heads, width))
        self.norm = HeadNorm(width, center=False, affine=True, eps=eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.ridge, math.log(math.expm1(SOFTPLUS_START)))

    def project(self, x: Embedded, past: TokenContext) -> tuple[Mesa | Signed, None]:
        return self._mesa(x, past), None

    def _mesa(self, x: Embedded, past: TokenContext) -> Mesa:
        q, k, v, beta, gamma = project_each(
            x, self.W_q, self.W_k, self.W_v, self.W_beta, self.W_gamma
        )
        q = self.conv_q(with_room(q), past, silu=True)
        k = self.conv_k(with_room(k), past, silu=True)
        q, k, v = (split_heads(s, self.heads) for s in (q, k, v))
        q, k = l2_normalize(q, self.floor), l2_normalize(k, self.floor)
        beta, gamma = with_room(beta).sigmoid()[..., None], upcast(gamma)[..., None]
        bounded = torch.log1p(-(1 - self.bound) * upcast(beta).square())
        ridge = self.least_ridge + F.softplus(upcast(self.ridge))
        solver = (
            self.solver.draw_for_training() if self.random_steps and self.training else self.solver
        )
        return Mesa(q, k, v, beta, self.log_gamma(gamma) + bounded, ridge, solver)

    def log_gamma(self, logits: Tensor) -> Tensor:
        """log |γ|"""
        return F.logsigmoid(logits)


class SignedMesaLayer(MesaLayer):
    """
    f_q  L2(SiLU(conv(x W_Q)))        f_γ  tanh(x W_γ + b_γ), one per head
    f_k  L2(SiLU(conv(x W_K)))        f_β  σ(x W_β + b_β), one per head
    f_v  x W_V                        f_g  1
    d_k = d_v = d, RMSNorm per head, Λ = 49.25 + softplus(λ), 50 at first

    for state tracking (appendix H): γ in (-1, 1) may make H indefinite, which a large Λ outweighs.
    """

    least_ridge = 49.25

    def project(self, x: Embedded, past: TokenContext) -> tuple[Signed, None]:
        return Signed(self._mesa(x, past), self.W_gamma(x)[..., None].detach()), None

    def log_gamma(self, logits: Tensor) -> Tensor:
        return logits.tanh().abs().clamp(min=torch.finfo(logits.dtype).tiny).log()


def mesa_layers(model: nn.Module) -> list[MesaLayer]:
    """The Mesa layers in order; raises ValueError if there is none."""
    found = [module for module in model.modules() if isinstance(module, MesaLayer)]
    if not found:
        raise ValueError(
            f"this {type(model).__name__} has no Mesa layer, and nothing to be solved; name a model"
            " with one"
        )
    return found


def set_tolerance(model: nn.Module, tol: float) -> None:
    """Let conjugate gradients stop at this relative residual, each token on its own (MesaNet sec.
    6: 1e-4).
    """
    for layer in mesa_layers(model):
        steps = (
            layer.solver.max_steps
            if isinstance(layer.solver, ConjugateGradient)
            else ConjugateGradient().max_steps
        )
        layer.solver = ConjugateGradient(steps, tol)


@contextmanager
def use_solver(model: nn.Module, solver: Solver) -> Iterator[None]:
    """Inside the block all Mesa layers use `solver`."""
    before = [(layer, layer.solver) for layer in mesa_layers(model)]
    try:
        for layer, _ in before:
            layer.solver = solver
        yield
    finally:
        for layer, own in before:
            layer.solver = own
