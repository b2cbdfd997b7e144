"""The product of tokens with a weight, or with several: entries of the kernel table for C, where
there are few rows, for oneDNN, where it multiplies matrices faster, and for torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.gemm import products_route, route_products
from fastweights.kernels.native import abi, library
from fastweights.kernels.table import Kernel, select

MOST_ROWS = 8
"""Rows that product.c takes: more of them are matrices, which libraries multiply faster."""

WORTH_ROUTING = 1 << 22
"""Multiplications that win back the microseconds in which oneDNN begins."""


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
    """Each by the kernel that takes it alone."""
    return [multiply(*product) for product in together.products]


def multiply_rows(product: Product) -> Tensor:
    """By product.c, which reads the weight once, as fast as memory gives it."""
    return _call((product,))[0]


def multiply_rows_of_each(together: ProductGroup) -> list[Tensor]:
    """By product.c in one call, which reads each weight once, as fast as memory gives it."""
    return _call(together.products)


def prepare_rows(products: tuple[Product, ...], to: list[Tensor]) -> Callable[[], None] | None:
    """`multiply_each`, or `multiply` of one, of rows that change where they lie, into tensors
    ``[… o]`` that are there; None where C does not take it.
    """
    alone = len(products) == 1
    taken = select(products[0]) if alone else select(ProductGroup(products))
    if taken.compute not in (multiply_rows, multiply_rows_of_each):
        return None
    return library.PreparedCall("fw_product", *_problems(products, to))


def _call(products: tuple[Product, ...]) -> list[Tensor]:
    to = [torch.empty(*x.shape[:-1], len(weight)) for x, weight, _ in products]
    library.call("fw_product", *_problems(products, to))
    return to


def _problems(products: tuple[Product, ...], to: list[Tensor]) -> list[abi.ProductCall]:
    numbers = sum([weight.numel() for _, weight, _ in products])
    threads, problems, behind = library.threads(numbers), [], len(products)
    for (x, weight, bias), y in zip(products, to, strict=True):
        (outputs, inputs), x, behind = weight.shape, x.contiguous(), behind - 1
        sizes = (x.numel() // inputs, inputs, outputs, threads)
        problems.append(abi.ProductCall(*sizes, x, weight, bias, y, behind))
    return problems


def multiply_matrices(product: Product) -> Tensor:
    """By oneDNN, the products of the backward too."""
    if product.requires_grad:
        return _RoutedFunction.apply(*product)  # type: ignore[return-value]
    return _linear(*product)


@route_products
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


class _RoutedFunction(torch.autograd.Function):
    """y = x Wᵀ + b. With the rows below each other dx = dy W, dW = dyᵀ x and db = Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    @route_products
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, weight), (d_y,) = ctx.saved_tensors, gradients
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = d_y.reshape(-1, len(weight))
        return (
            (rows @ weight).view(x.shape) if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _refuses_rows(product: Product) -> str | None:
    return refuses_here() or _refuses_shapes(product) or library.refuse_tensors(*product)


def _refuses_any(together: ProductGroup) -> str | None:
    refusal, tensors = refuses_here(), []
    for product in together.products:
        refusal = refusal or _refuses_shapes(product)
        tensors += product
    return refusal or library.refuse_tensors(*tensors)


def refuses_here() -> str | None:
    """Why C computes nothing of any product now."""
    if torch.compiler.is_compiling():
        return "a compiled graph makes kernels of torch's own operations"
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return "a tracer or a dispatch mode, such as a counter of operations, looks for torch's own"
    if torch.is_autocast_enabled("cpu"):
        return "autocast rounds it"
    return None


def _refuses_shapes(product: Product) -> str | None:
    refusal = _refuses_empty(product)
    if refusal is not None:
        return refusal
    rows = product.x.numel() // product.weight.shape[-1]
    if rows > MOST_ROWS:
        return f"it has {rows} rows, more than {MOST_ROWS}: a product of matrices"
    if product.requires_grad:
        return "autograd follows it"
    return None if product.weight.is_contiguous() else "its weight is not contiguous"


def _refuses_empty(product: Product) -> str | None:
    x, inputs = product.x, product.weight.shape[-1]
    if inputs == 0 or x.numel() == 0 or x.shape[-1] != inputs:
        return "it is empty, or its shapes do not fit"
    return None


def _refuses_matrices(product: Product) -> str | None:
    refusal = refuses_here() or _refuses_empty(product)
    if refusal is not None:
        return refusal
    if product.x.numel() * len(product.weight) < WORTH_ROUTING:
        return f"it has fewer than {WORTH_ROUTING} multiplications"
    if products_route() == "torch":
        return "float32 products go to torch's own library here"
    return library.refuse_strangers(*product)


PRODUCT_KERNELS = [
    Kernel("product of few rows (compiled)", Product, multiply_rows, _refuses_rows, ("cpu",), True),
    Kernel("product (oneDNN)", Product, multiply_matrices, _refuses_matrices, ("cpu",), True),
    Kernel("product (torch)", Product, multiply_by_torch),
    Kernel(
        "products of few rows (compiled)",
        ProductGroup,
        multiply_rows_of_each,
        _refuses_any,
        ("cpu",),
        opaque=True,
    ),
    Kernel("products, one by one", ProductGroup, multiply_one_by_one),
]
