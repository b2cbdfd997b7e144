"""The product of tokens with a weight, or with several: entries of the kernel table for C, where
there are few rows, and torch.
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


class ProductGroup(NamedTuple):
    """Several products at once, such as queries, keys and values of the same tokens.

    Attributes:
        products: of one device, at least one
    """

    products: tuple[Product, ...]

    @property
    def device(self) -> torch.device:
        return self.products[0].device


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A `Product` by the first kernel that takes it: ``[… o]``."""
    product = Product(x, weight, bias)
    return select(product).compute(product)


def multiply_each(*products: Product) -> list[Tensor]:
    """`ProductGroup` by the first kernel that takes all of them: ``[… o]`` each."""
    together = ProductGroup(products)
    return select(together).compute(together)


def multiply_by_torch(product: Product) -> Tensor:
    """By the library that torch has for it."""
    return F.linear(*product)


def multiply_one_by_one(together: ProductGroup) -> list[Tensor]:
    """Each by the library that torch has for it."""
    return [F.linear(*product) for product in together.products]


def multiply_rows(product: Product) -> Tensor:
    """By product.c, which reads the weight once, as fast as memory gives it."""
    return _call((product,))[0]


def multiply_rows_of_each(together: ProductGroup) -> list[Tensor]:
    """By product.c in one call, which reads each weight once, as fast as memory gives it."""
    return _call(together.products)


def _call(products: tuple[Product, ...]) -> list[Tensor]:
    numbers = sum([weight.numel() for _, weight, _ in products])
    threads = 1 if numbers < WORTH_SHARING else library.threads(numbers)
    problems, behind = [], len(products)
    for x, weight, bias in products:
        (outputs, inputs), x, behind = weight.shape, x.contiguous(), behind - 1
        y = torch.empty(*x.shape[:-1], outputs)
        sizes = (x.numel() // inputs, inputs, outputs, threads)
        problems.append(abi.Product(*sizes, x, weight, bias, y, behind))
    library.call("fw_product", *problems)
    return [problem.y for problem in problems]


def _refuses_rows(product: Product) -> str | None:
    return _refuses_here() or _refuses_shapes(product) or library.refuse_tensors(*product)


def _refuses_any(together: ProductGroup) -> str | None:
    refusal, tensors = _refuses_here(), []
    for product in together.products:
        refusal = refusal or _refuses_shapes(product)
        tensors += product
    return refusal or library.refuse_tensors(*tensors)


def _refuses_here() -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled graph makes kernels of torch's own operations"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode, such as a counter of operations, looks for torch's own"
    if torch.is_autocast_enabled("cpu"):
        return "autocast rounds it"
    return None


def _refuses_shapes(product: Product) -> str | None:
    x, weight, _ = product
    inputs = weight.shape[-1]
    if inputs == 0 or x.numel() == 0 or x.shape[-1] != inputs:
        return "it is empty, or its shapes do not fit"
    rows = x.numel() // inputs
    if rows > MOST_ROWS:
        return f"it has {rows} rows, more than {MOST_ROWS}: a product of matrices"
    if product.requires_grad:
        return "autograd follows it"
    return None if weight.is_contiguous() else "its weight is not contiguous"


PRODUCT_KERNELS = [
    Kernel("product of few rows (compiled)", Product, multiply_rows, _refuses_rows, ("cpu",)),
    Kernel("product (torch)", Product, multiply_by_torch),
    Kernel(
        "products of few rows (compiled)",
        ProductGroup,
        multiply_rows_of_each,
        _refuses_any,
        ("cpu",),
    ),
    Kernel("products, one by one (torch)", ProductGroup, multiply_one_by_one),
]
