"""RMSNorm: compiled where that is possible, else through torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.memory import empty


def rms_normalize(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / √(mean x² + eps) ⊙ weight over the last axis of ``x [… d]``; without a weight, 1."""
    if torch.compiler.is_compiling() or x.numel() == 0 or not library.can_read(x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    x, weight = x.contiguous(), None if weight is None else weight.contiguous()
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad)
    ):
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return _forward(x, weight, eps)


def _problem(x: Tensor, weight: Tensor | None, eps: float) -> abi.Norm:
    """Sizes and inputs, without results."""
    rows = x.numel() // x.shape[-1]
    return abi.Norm(rows, x.shape[-1], library.threads(x.numel()), eps, x, weight)


def _forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = empty(*x.shape)
    library.call("fw_norm", _problem(x, weight, eps)._replace(y=y))
    return y


class _RMSNorm(torch.autograd.Function):
    """y of x, the weight and ε"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), (d_y,) = ctx.saved_tensors, gradients
        if torch.is_grad_enabled():
            return *_differentiable(x, weight, ctx.eps, d_y), None
        problem, d_y, d_x = _problem(x, weight, ctx.eps), d_y.contiguous(), empty(*x.shape)
        tasks = -(-problem.rows // library.read_constant("fw_norm_rows"))
        d_weight = torch.empty(tasks, x.shape[-1]) if ctx.needs_input_grad[1] else None
        library.call("fw_norm_back", problem._replace(d_y=d_y, d_x=d_x, d_weight=d_weight))
        return d_x, None if d_weight is None else d_weight.sum(0), None


def _differentiable(
    x: Tensor, weight: Tensor | None, eps: float, d_y: Tensor
) -> list[Tensor | None]:
    """The gradients of x and the weight, with a graph of their own for gradients of gradients."""
    leaves = [s for s in (x, weight) if s is not None and s.requires_grad]
    found = iter(
        torch.autograd.grad(
            F.rms_norm(x, x.shape[-1:], weight, eps), leaves, d_y, create_graph=True
        )
    )
    return [next(found) if s is not None and s.requires_grad else None for s in (x, weight)]
