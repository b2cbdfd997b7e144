"""The product of tokens with a weight: entries of the kernel table for C, where there are few rows,
and torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.native import abi, library
from fastweights.kernels.table import Kernel, select

MOST_ROWS = 8
"""Rows that product.c takes: more of them are matrices, which libraries multiply faster."""

WORTH_SHARING = 1 << 20
"""Numbers of a weight that take longer to read than a thread takes to wake up."""


class Product(NamedTuple):
    """x Wᵀ + bias, ``[… o]``.

    Attributes:
        x: ``[… i]``
        weight: ``[o i]``
        bias: ``[o]``; None: 0
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the product."""
        return torch.is_grad_enabled() and any(s is not None and s.requires_grad for s in self)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A `Product` by the first kernel that takes it: ``[… o]``."""
    product = Product(x, weight, bias)
    return select(product).compute(product)


def multiply_by_torch(product: Product) -> Tensor:
    """By the library that torch has for it."""
    return F.linear(*product)


def multiply_rows(product: Product) -> Tensor:
    """By product.c, which reads the weight once, as fast as memory gives it."""
    x, weight, bias = product
    (outputs, inputs), x = weight.shape, x.contiguous()
    y = torch.empty(*x.shape[:-1], outputs)
    threads = 1 if weight.numel() < WORTH_SHARING else library.threads(weight.numel())
    sizes = (x.numel() // inputs, inputs, outputs, threads)
    library.call("fw_product", abi.Product(*sizes, x, weight, bias, y))
    return y


def _refuses_rows(product: Product) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled graph makes kernels of torch's own operations"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode, such as a counter of operations, looks for torch's own"
    x, weight, bias = product
    inputs = weight.shape[-1]
    if inputs == 0 or x.numel() == 0 or x.shape[-1] != inputs:
        return "it is empty, or its shapes do not fit"
    rows = x.numel() // inputs
    if rows > MOST_ROWS:
        return f"it has {rows} rows, more than {MOST_ROWS}: a product of matrices"
    if product.requires_grad:
        return "autograd follows it"
    if torch.is_autocast_enabled("cpu"):
        return "autocast rounds it"
    if not weight.is_contiguous():
        return "its weight is not contiguous"
    return library.refuse_tensors(*product)


PRODUCT_KERNELS = [
    Kernel("product of few rows (compiled)", Product, multiply_rows, _refuses_rows, ("cpu",)),
    Kernel("product (torch)", Product, multiply_by_torch),
]
