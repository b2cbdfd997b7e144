"""The product of tokens with a weight of bytes: in C where there are few rows, else by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.native import abi, library
from fastweights.kernels.table import Kernel, select
from fastweights.ops.product import MOST_ROWS, multiply

OUTPUTS_AT_ONCE = 256
"""Of which the weight is made floats again: few enough that these stay in the cache."""


class QuantizedProduct(NamedTuple):
    """(x weightᵀ) scale + bias, ``[… o]``.

    Attributes:
        x: ``[… i]``
        weight: ``[o i]``, int8
        scale: ``[o]``
        bias: ``[o]``; None: 0
    """

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device


def multiply_quantized(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """A `QuantizedProduct` by the first kernel that takes it: ``[… o]``."""
    product = QuantizedProduct(x, weight, scale, bias)
    return select(product).compute(product)


def _multiply_rows(product: QuantizedProduct) -> Tensor:
    """By quantized.c, which reads a byte per weight."""
    y = torch.empty(*product.x.shape[:-1], len(product.weight))
    library.call("fw_quantized_product", _problem(product, y))
    return y


def prepare_quantized_rows(product: QuantizedProduct, y: Tensor) -> Callable[[], None] | None:
    """`multiply_quantized` of rows that change where they lie, into a tensor ``[… o]`` that is
    there; None where C does not take it.
    """
    if select(product).compute is not _multiply_rows:
        return None
    return library.PreparedCall("fw_quantized_product", _problem(product, y))


def _problem(product: QuantizedProduct, y: Tensor) -> abi.QuantizedProductCall:
    x, weight, scale, bias = product
    (outputs, inputs), x = weight.shape, x.contiguous()
    threads = library.threads(weight.nbytes // x.element_size())
    sizes = (x.numel() // inputs, inputs, outputs, threads)
    return abi.QuantizedProductCall(*sizes, x, weight, scale, bias, y)


def _multiply_floats(product: QuantizedProduct) -> Tensor:
    """With the weight as floats, some outputs after the other."""
    x, weight, scale, bias = product
    parts = [multiply(x, part.to(x.dtype)) for part in weight.split(OUTPUTS_AT_ONCE)]
    y = torch.cat(parts, dim=-1) * scale.to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)


def _refuses_rows(product: QuantizedProduct) -> str | None:
    x, weight, scale, bias = product
    if torch.compiler.is_compiling():
        return "a compiled graph makes kernels of torch's own operations"
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return "a tracer or a dispatch mode, such as a counter of operations, looks for torch's own"
    if torch.is_grad_enabled() and any(s is not None and s.requires_grad for s in product):
        return "autograd follows it"
    if not weight.is_contiguous() or x.numel() == 0 or x.shape[-1] != weight.shape[-1]:
        return "it is empty, its weight is not contiguous, or its shapes do not fit"
    if x.numel() // x.shape[-1] > MOST_ROWS:
        return f"it has more than {MOST_ROWS} rows"
    strange = library.refuse_strangers(weight, dtypes=(torch.int8,))
    return strange or library.refuse_tensors(x, scale, bias)


QUANTIZED_KERNELS = [
    Kernel(
        "quantized product of few rows (compiled)",
        QuantizedProduct,
        _multiply_rows,
        _refuses_rows,
        ("cpu",),
        opaque=True,
    ),
    Kernel("quantized product (torch)", QuantizedProduct, _multiply_floats),
]
