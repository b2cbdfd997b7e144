"""RMSNorm and LayerNorm, with a gate behind them: entries of the kernel table for Triton, C and
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.memory import empty
from fastweights.kernels.table import Kernel, select
from fastweights.kernels.triton import normalization as triton
from fastweights.kernels.triton.launch import DEVICES
from fastweights.kernels.triton.operator import Streams, TritonOperator
from fastweights.recurrence.derivatives import differentiable_by, transform_here


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last axis, and a gate that it is multiplied by.

    Attributes:
        x: ``[… d]``
        weight: ``[d]``; None: 1
        eps: added to the mean square
        gate: of x's shape; None: 1
        silu: whether the gate is SiLU of what is given
    """

    x: Tensor
    weight: Tensor | None
    eps: float
    gate: Tensor | None = None
    silu: bool = False

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the norm itself here."""
        leaves = (s is not None and s.requires_grad for s in (self.x, self.weight))
        return torch.is_grad_enabled() and any(leaves)

    @property
    def streams(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(x, weight, gate)"""
        return self.x, self.weight, self.gate

    def finish(self, y: Tensor) -> Tensor:
        """The result, from the norm."""
        if self.gate is None:
            return y
        return y * (F.silu(self.gate) if self.silu else self.gate)


@dataclass(frozen=True, eq=False)
class RMSNorm(Norm):
    """Division by the root mean square.

    x / √(mean x² + eps) ⊙ weight ⊙ gate
    """


@dataclass(frozen=True, eq=False)
class LayerNorm(Norm):
    """The mean subtracted, and division by the root mean square of what is left.

    (x - mean x) / √(variance + eps) ⊙ weight ⊙ gate
    """


def rms_normalize(
    x: Tensor, weight: Tensor | None, eps: float, gate: Tensor | None = None, *, silu: bool = False
) -> Tensor:
    """An `RMSNorm` by the first kernel that takes it: ``[… d]``."""
    norm = RMSNorm(x, weight, eps, gate, silu)
    return select(norm).compute(norm)


def layer_normalize(
    x: Tensor, weight: Tensor | None, eps: float, gate: Tensor | None = None, *, silu: bool = False
) -> Tensor:
    """A `LayerNorm` by the first kernel that takes it: ``[… d]``."""
    norm = LayerNorm(x, weight, eps, gate, silu)
    return select(norm).compute(norm)


def normalize_by_torch(norm: Norm) -> Tensor:
    """By torch's fused operation."""
    return norm.finish(_normalize(norm.x, norm.weight, norm.eps))


def _normalize(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def center_by_torch(norm: Norm) -> Tensor:
    """By torch's fused operation."""
    return norm.finish(center(norm.x, norm.weight, None, norm.eps))


def center(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm by torch's fused operation; by its formula under transforms, as torch makes
    constants of the mean and variance in its forward-mode derivative.
    """
    if transform_here() is None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    deviation = x - x.mean(-1, keepdim=True)
    y = deviation * (deviation.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def normalize_by_triton(norm: Norm) -> Tensor:
    """By kernels/triton."""
    settings = triton.NormSettings(norm.eps, isinstance(norm, LayerNorm), norm.silu)
    return TRITON_NORM(settings, *norm.streams)[0]


def _refuses_triton(norm: Norm) -> str | None:
    return triton.refuses(*norm.streams)


def _define(settings: triton.NormSettings, streams: Streams) -> tuple[Tensor]:
    x, weight, gate = streams
    assert x is not None
    if settings.center:
        return (center_by_torch(LayerNorm(x, weight, settings.eps, gate, settings.silu)),)
    return (normalize_by_torch(RMSNorm(x, weight, settings.eps, gate, settings.silu)),)


TRITON_NORM = TritonOperator(
    "norm",
    triton.NormSettings,
    ("x", "weight", "gate"),
    1,
    triton.forward,
    triton.backward,
    _define,
)


def prepare_norm(norm: RMSNorm, y: Tensor) -> Callable[[], None] | None:
    """`rms_normalize` without a gate of rows that change where they lie, into a tensor of their
    shape that is there; None where C does not take it.
    """
    if select(norm).compute is not normalize_natively or norm.requires_grad:
        return None
    return library.PreparedCall("fw_norm", _problem(norm.x, norm.weight, norm.eps, y=y))


def normalize_natively(norm: RMSNorm) -> Tensor:
    """By norm.c."""
    weight = None if norm.weight is None else norm.weight.contiguous()
    x = norm.x.contiguous()
    if norm.requires_grad:
        y: Any = _RMSNormFunction.apply(x, weight, norm.eps)
    else:
        y = _forward(x, weight, norm.eps)
    return norm.finish(y)


def _refuses_native(norm: RMSNorm) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of torch's own operations"
    if norm.x.numel() == 0:
        return "it is empty"
    if norm.weight is not None and norm.weight.dtype != norm.x.dtype:
        return f"its weight is {norm.weight.dtype} and its x {norm.x.dtype}"
    return library.refuse_tensors(norm.x, norm.weight, dtypes=library.NARROW)


def _problem(
    x: Tensor, weight: Tensor | None, eps: float, **results: Tensor | None
) -> abi.NormCall:
    n, width = x.numel(), x.shape[-1]
    narrow, weight = x.dtype == torch.bfloat16, None if weight is None else weight.float()
    return abi.NormCall(n // width, width, library.threads(n), narrow, eps, x, weight, **results)


def _forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = empty(*x.shape, dtype=x.dtype)
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
    @differentiable_by(lambda ctx: (_normalize, (*ctx.saved_tensors, ctx.eps)))
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, weight), (d_y,) = ctx.saved_tensors, gradients
        d_y, d_x, width = d_y.contiguous(), empty(*x.shape, dtype=x.dtype), x.shape[-1]
        # Tasks of so many rows add up dw for themselves; then their sum.
        tasks = -(-(x.numel() // width) // library.read_constant("fw_norm_rows"))
        d_weight = torch.empty(tasks, width) if ctx.needs_input_grad[1] else None
        results = {"d_y": d_y, "d_x": d_x, "d_weight": d_weight}
        library.call("fw_norm_back", _problem(x, weight, ctx.eps, **results))
        return d_x, None if d_weight is None else d_weight.sum(0).to(x.dtype), None


NORM_KERNELS = [
    Kernel("RMSNorm (Triton)", RMSNorm, normalize_by_triton, _refuses_triton, DEVICES, True),
    Kernel("RMSNorm (compiled)", RMSNorm, normalize_natively, _refuses_native, ("cpu",), True),
    Kernel("RMSNorm (torch)", RMSNorm, normalize_by_torch),
    Kernel("LayerNorm (Triton)", LayerNorm, normalize_by_triton, _refuses_triton, DEVICES, True),
    Kernel("LayerNorm (torch)", LayerNorm, center_by_torch),
]
