"""Products with weights of bytes are those of the floats that the bytes stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import kernels
from fastweights.kernels.native import library
from fastweights.ops import QuantizedProduct, multiply_quantized

ROWS, FLOATS = "quantized product of few rows (compiled)", "quantized product (torch)"
compiled = pytest.mark.skipif(library.extension_missing(), reason="no compiled extension")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def codes(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)


@compiled
@pytest.mark.parametrize("kernel", [ROWS, FLOATS])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (64, 16), (67, 130), (300, 2049)])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product(
    kernel: str, rows: int, outputs: int, inputs: int, *, biased: bool
) -> None:
    x, weight, scale = drawn(rows, inputs), codes(outputs, inputs), drawn(outputs).abs()
    bias = drawn(outputs) if biased else None
    floats = weight.double() * scale.double()[:, None]
    want = F.linear(x.double(), floats, None if bias is None else bias.double())
    with kernels.only(kernel):
        found = multiply_quantized(x, weight, scale, bias)
    size = (x.double().norm(dim=-1, keepdim=True) * floats.norm(dim=-1)).clamp(min=1)
    assert found.dtype == torch.float32
    assert ((found - want).abs() / size).max() < 1e-6


REFUSED: dict[str, Callable[[], QuantizedProduct]] = {
    "more than 8 rows": lambda: QuantizedProduct(drawn(9, 8), codes(4, 8), drawn(4)),
    "is empty": lambda: QuantizedProduct(drawn(0, 8), codes(4, 8), drawn(4)),
    "not contiguous": lambda: QuantizedProduct(drawn(1, 8), codes(8, 4).mT, drawn(4)),
    "autograd follows": lambda: QuantizedProduct(
        drawn(1, 8).requires_grad_(), codes(4, 8), drawn(4)
    ),
    "of torch.float64": lambda: QuantizedProduct(drawn(1, 8).double(), codes(4, 8), drawn(4)),
    "plain int8": lambda: QuantizedProduct(drawn(1, 8), codes(4, 8).int(), drawn(4)),
}


@compiled
@pytest.mark.parametrize("reason", REFUSED)
def test_what_c_leaves_to_torch(reason: str) -> None:
    product = REFUSED[reason]()
    said = kernels.explain(product)
    assert reason in said.splitlines()[0]
    assert f"{FLOATS}: taken" in said
    x, weight, scale, _ = product
    want = F.linear(x, weight.to(x.dtype) * scale.to(x.dtype)[:, None])
    torch.testing.assert_close(multiply_quantized(*product), want)


def test_gradients_reach_what_is_multiplied() -> None:
    x, weight, scale = drawn(3, 8).requires_grad_(), codes(4, 8), drawn(4)
    multiply_quantized(x, weight, scale).sum().backward()
    torch.testing.assert_close(x.grad, (weight * scale[:, None]).sum(0).expand(3, 8))
