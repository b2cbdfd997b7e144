"""RMSNorm: an entry of the kernel table for C, and one for torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.memory import empty
from fastweights.kernels.table import Kernel, select


class RMSNorm(NamedTuple):
    """Division by the root mean square over the last axis.

    x / √(mean x² + eps) ⊙ weight

    Attributes:
        x: ``[… d]``
        weight: ``[d]``; None: 1
        eps: added to the mean square
    """

    x: Tensor
    weight: Tensor | None
    eps: float

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows it here."""
        leaves = (s is not None and s.requires_grad for s in (self.x, self.weight))
        return torch.is_grad_enabled() and any(leaves)


def rms_normalize(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """An `RMSNorm` by the first kernel that takes it: ``[… d]``."""
    norm = RMSNorm(x, weight, eps)
    return select(norm).compute(norm)


def normalize_by_torch(norm: RMSNorm) -> Tensor:
    """By torch's fused operation."""
    return F.rms_norm(norm.x, norm.x.shape[-1:], norm.weight, norm.eps)


def normalize_natively(norm: RMSNorm) -> Tensor:
    """By norm.c."""
    weight = None if norm.weight is None else norm.weight.contiguous()
    x = norm.x.contiguous()
    if norm.requires_grad:
        return _RMSNormFunction.apply(x, weight, norm.eps)  # type: ignore[return-value]
    return _forward(x, weight, norm.eps)


def _refuses_native(norm: RMSNorm) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of torch's own operations"
    if norm.x.numel() == 0:
        return "it is empty"
    return library.refuse_tensors(norm.x, norm.weight)


def _problem(x: Tensor, weight: Tensor | None, eps: float, **results: Tensor | None) -> abi.Norm:
    n, width = x.numel(), x.shape[-1]
    return abi.Norm(n // width, width, library.threads(n), eps, x, weight, **results)


def _forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = empty(*x.shape)
    library.call("fw_norm", _problem(x, weight, eps, y=y))
    return y


class _RMSNormFunction(torch.autograd.Function):
    """y of x, the weight w and ε.

    With r = 1 / √(mean x² + ε) and x̂ = r x, y = x̂ ⊙ w, so that dw = Σ_rows dy ⊙ x̂ and, as r
    falls with every x, dx = r (dy ⊙ w - x̂ mean(dy ⊙ w ⊙ x̂)): `fw_norm_back`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), (d_y,) = ctx.saved_tensors, gradients
        norm = RMSNorm(x, weight, ctx.eps)
        if torch.is_grad_enabled():
            return *_differentiable(norm, d_y), None
        d_y, d_x, width = d_y.contiguous(), empty(*x.shape), x.shape[-1]
        # Tasks of so many rows add up dw for themselves; then their sum.
        tasks = -(-(x.numel() // width) // library.read_constant("fw_norm_rows"))
        d_weight = torch.empty(tasks, width) if ctx.needs_input_grad[1] else None
        results = {"d_y": d_y, "d_x": d_x, "d_weight": d_weight}
        library.call("fw_norm_back", _problem(*norm, **results))
        return d_x, None if d_weight is None else d_weight.sum(0), None


def _differentiable(norm: RMSNorm, d_y: Tensor) -> list[Tensor | None]:
    """The gradients of x and the weight, with a graph of their own for gradients of gradients."""
    inputs = (norm.x, norm.weight)
    leaves = [s for s in inputs if s is not None and s.requires_grad]
    gradients = torch.autograd.grad(normalize_by_torch(norm), leaves, d_y, create_graph=True)
    found = iter(gradients)
    return [next(found) if s is not None and s.requires_grad else None for s in inputs]


NORM_KERNELS = [
    Kernel("RMSNorm (compiled)", RMSNorm, normalize_natively, _refuses_native, ("cpu",)),
    Kernel("RMSNorm (torch)", RMSNorm, normalize_by_torch),
]
