"""The operators that graphs are made of: who defines them, and those that ONNX does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Domain:
    """A set of ONNX operators that has both.

    Attributes:
        name: as a graph names it; "" is ONNX's own
        version: of the set
        opset: the version of ONNX's own operators that graphs with it use
    """

    name: str
    version: int
    opset: int


DOMAINS = {"com.microsoft": Domain("com.microsoft", 1, 23), "ai.onnx": Domain("", 27, 27)}
"""By the names that the command takes. Those of ONNX itself are in no released version of the
standard yet: ONNX Runtime 1.32 runs them with ``ALLOW_RELEASED_ONNX_OPSET_ONLY=0``."""


SPACING = 2.0**-23
"""The relative distance of a float32 from the next."""
INT64, BOOL = 7, 9
"""ONNX's numbers of these types."""
LAST = 2**31 - 1
LEAST = 2.0**-126
"""The least float32 whose spacing is relative."""


def translations() -> dict[Any, Callable[..., Any]]:
    """By operators, functions of onnxscript."""
    from onnxscript import opset18 as op

    def nextafter(x: Any, _: Any) -> Any:
        """A float32 at most two behind x, above it: we only ever ask for one towards ∞."""
        return op.Add(x, op.Add(op.Mul(op.Abs(x), SPACING), LEAST))

    def log_sigmoid(x: Any) -> Any:
        """-softplus(-x): finite where the sigmoid is 0."""
        return op.Neg(op.Softplus(op.Neg(x)))

    def sort(x: Any, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        """TopK of all, which keeps the order of what is equal."""
        del stable
        numbers = op.Cast(x, to=INT64) if x.dtype == BOOL else x
        count = op.Slice(op.Shape(x), [dim], [dim + 1 if dim != -1 else LAST], [0])
        return op.TopK(numbers, count, axis=dim, largest=int(descending), sorted=1)

    def prod(x: Any, dims: Any) -> Any:
        return op.ReduceProd(x, op.Constant(value_ints=list(dims)), keepdims=0)

    aten = torch.ops.aten
    return {
        aten.nextafter.default: nextafter,
        aten.log_sigmoid.default: log_sigmoid,
        aten.sort.stable: sort,
        torch.ops.prims.prod.default: prod,
    }
