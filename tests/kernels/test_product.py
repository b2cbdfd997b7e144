"""The product of few rows in C is that of float64, and leaves to torch what torch must do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import kernels
from fastweights.kernels.native import library
from fastweights.layers import Linear
from fastweights.ops import Product, multiply

ROWS = "product of few rows (compiled)"
pytestmark = pytest.mark.skipif(library.extension_missing(), reason="no compiled extension")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (2, 4), (3, 1), (1, 7)])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (64, 16), (67, 130), (300, 2049)])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product(
    shape: tuple[int, int], outputs: int, inputs: int, *, biased: bool
) -> None:
    x, weight = drawn(*shape, inputs), drawn(outputs, inputs)
    bias = drawn(outputs) if biased else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with kernels.only(ROWS):
        found = multiply(x, weight, bias)
    scale = (x.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1)).clamp(min=1)
    assert found.dtype == torch.float32
    assert ((found - want).abs() / scale).max() < 1e-6


def test_rows_of_a_view_are_its_own() -> None:
    wide, weight = drawn(4, 3, 40), drawn(24, 20)
    x = wide[:, 1:2, ::2]
    with kernels.only(ROWS), torch.inference_mode():
        torch.testing.assert_close(multiply(x, weight), F.linear(x, weight))


REFUSED: dict[str, Callable[[], Product]] = {
    "rows": lambda: Product(drawn(3, 3, 8), drawn(4, 8)),
    "empty": lambda: Product(drawn(0, 1, 8), drawn(4, 8)),
    "not contiguous": lambda: Product(drawn(1, 1, 8), drawn(8, 4).mT),
    "autograd": lambda: Product(drawn(1, 1, 8), drawn(4, 8).requires_grad_()),
    "not plain float32": lambda: Product(drawn(1, 1, 8).double(), drawn(4, 8).double()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_take_goes_to_torch(reason: str) -> None:
    product = REFUSED[reason]()
    refusal = next(line for line in kernels.explain(product).splitlines() if ROWS in line)
    assert reason in refusal
    torch.testing.assert_close(multiply(*product), F.linear(*product))


def test_autocast_keeps_its_dtype() -> None:
    layer = Linear(8, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(drawn(1, 1, 8)).dtype == torch.bfloat16


def test_a_row_that_does_not_fit_is_refused_as_by_torch() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linear(8, 4)(drawn(1, 1, 7))
