"""Products with weights of bytes or half bytes are those of the floats that these stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights import kernels
from fastweights.kernels.native import library
from fastweights.ops import Int4Weight, Int8Weight, QuantizedProduct, multiply_quantized
from fastweights.ops.quantized import (
    GROUP,
    QuantizedWeight,
    prepare_quantized_rows,
    round_in_groups,
)

ROWS, FLOATS = "quantized product of few rows (compiled)", "quantized product (torch)"
compiled = pytest.mark.skipif(library.extension_missing(), reason="no compiled extension")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def codes(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)


def int8(outputs: int, inputs: int) -> Int8Weight:
    return Int8Weight(codes(outputs, inputs), drawn(outputs, -(-inputs // GROUP)).abs().half())


def int4(outputs: int, inputs: int) -> Int4Weight:
    return Int4Weight.of(drawn(outputs, inputs))


def floats_of(weight: QuantizedWeight) -> Tensor:
    return weight.rows(torch.arange(len(weight.codes)), torch.float64)


def check(kernel: str, weight: QuantizedWeight, rows: int, *, biased: bool) -> None:
    x, floats = drawn(rows, weight.inputs), floats_of(weight)
    bias = drawn(len(floats)) if biased else None
    read = round_in_groups(x).double()
    want = F.linear(read, floats, None if bias is None else bias.double())
    with kernels.only(kernel):
        found = multiply_quantized(x, weight, bias)
    size = (x.double().norm(dim=-1, keepdim=True) * floats.norm(dim=-1)).clamp(min=1)
    assert found.dtype == torch.float32
    assert ((found - want).abs() / size).max() < 1e-6


@compiled
@pytest.mark.parametrize("kernel", [ROWS, FLOATS])
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 5), (64, 16), (67, 130), (300, 2049)])
@pytest.mark.parametrize("biased", [False, True])
def test_of_bytes(kernel: str, rows: int, outputs: int, inputs: int, *, biased: bool) -> None:
    check(kernel, int8(outputs, inputs), rows, biased=biased)


@compiled
@pytest.mark.parametrize("kernel", [ROWS, FLOATS])
@pytest.mark.parametrize("rows", [1, 2, 3, 17])
@pytest.mark.parametrize(("outputs", "groups"), [(1, 1), (3, 2), (67, 9), (300, 65), (5, 130)])
@pytest.mark.parametrize("biased", [False, True])
def test_of_half_bytes(kernel: str, rows: int, outputs: int, groups: int, *, biased: bool) -> None:
    check(kernel, int4(outputs, GROUP * groups), rows, biased=biased)


@compiled
@pytest.mark.parametrize("made", [int8, int4])
@pytest.mark.parametrize("rows", [1, 3])
def test_several_products_of_the_same_tokens(
    made: Callable[[int, int], QuantizedWeight], rows: int
) -> None:
    x, bias, outputs = drawn(rows, 9 * GROUP), drawn(300), (5, 300, 1)
    weights = [made(count, 9 * GROUP) for count in outputs]
    biases = [bias if count == 300 else None for count in outputs]
    to = [torch.empty(rows, count) for count in outputs]
    products = list(map(QuantizedProduct, [x] * 3, weights, biases))
    call = prepare_quantized_rows(products, to)
    assert call is not None
    for scale in (1, -3):  # what was rounded before leaves no trace
        x.mul_(scale)
        call()
        for product, y in zip(products, to, strict=True):
            assert torch.equal(y, multiply_quantized(*product))


@compiled
def test_scales_of_every_float16() -> None:
    """Also negative, subnormal and the largest, as other programs' files may have them."""
    scales = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    scales = scales[scales.isfinite()].view(-1, 2)
    both = codes(len(scales), 2 * GROUP)
    halves = both[:, :GROUP].contiguous().view(torch.uint8)
    check(ROWS, Int8Weight(both, scales), 1, biased=False)
    check(ROWS, Int4Weight(halves, scales, scales.flip(0)), 1, biased=False)


def test_numbers_of_eight_bits_stay() -> None:
    """What GGUF's Q8_0 holds: a group's largest is 127 times its scale."""
    scale = torch.tensor([0.5, 0.0312, 0.00113]).half()
    numbers = codes(7, 3 * GROUP)
    numbers[:, ::GROUP] = 127
    weight = numbers.unflatten(1, (3, GROUP)) * scale.float()[:, None]
    stored = Int8Weight.of(weight.flatten(1))
    assert torch.equal(stored.codes, numbers)
    assert torch.equal(stored.scale, scale.expand(7, 3))


@pytest.mark.parametrize("most", [1, 2, 9, 15])
def test_numbers_of_four_bits_stay(most: int) -> None:
    """What GGUF's Q4_0 and Q4_1 hold, also where a group has not all of its 16 numbers."""
    generator = torch.Generator().manual_seed(most)
    numbers = torch.randint(most + 1, (7, 3, GROUP), generator=generator)
    scale = torch.tensor([0.5, 0.0312, 0.00113]).half().float()
    weight = (numbers * scale[:, None] - 8 * scale[:, None]).flatten(1)
    error = (floats_of(Int4Weight.of(weight)) - weight).abs().unflatten(1, (3, GROUP)).amax((0, 2))
    assert (error <= 8 * scale * 2**-11).all()  # float16's, of what is least


def test_a_group_is_rounded_to_the_nearest() -> None:
    weight = drawn(9, 5 * GROUP)
    weight[1], weight[2, :GROUP], weight[3] = 0, 1.5, weight[3] * 1e-6
    stored = Int4Weight.of(weight)
    scale = stored.scale.double().repeat_interleave(GROUP, 1)
    # half a step, and what float16 rounds of the 15 steps and of the offset
    offset = stored.offset.double().abs().repeat_interleave(GROUP, 1)
    bound = scale / 2 + 16 * scale * 2**-11 + offset * 2**-11 + 16 * 2**-25
    assert ((floats_of(stored) - weight).abs() <= bound).all()
    assert torch.equal(floats_of(stored)[2, :GROUP], torch.full((GROUP,), 1.5).double())


def strange(stored: Tensor) -> Int8Weight:
    return int8(*stored.shape)._replace(codes=stored)


REFUSED: dict[str, Callable[[], QuantizedProduct]] = {
    "more than 128 rows": lambda: QuantizedProduct(drawn(129, 8), int8(4, 8)),
    "is empty": lambda: QuantizedProduct(drawn(0, 8), int8(4, 8)),
    "not contiguous": lambda: QuantizedProduct(drawn(1, 8), strange(codes(8, 4).mT)),
    "autograd follows": lambda: QuantizedProduct(drawn(1, 8).requires_grad_(), int8(4, 8)),
    "of torch.float64": lambda: QuantizedProduct(drawn(1, 8).double(), int8(4, 8)),
    "plain int8": lambda: QuantizedProduct(drawn(1, 8), strange(codes(4, 8).int())),
}


@compiled
@pytest.mark.parametrize("reason", REFUSED)
def test_what_c_leaves_to_torch(reason: str) -> None:
    product = REFUSED[reason]()
    said = kernels.explain(product)
    assert reason in said.splitlines()[0]
    assert f"{FLOATS}: taken" in said
    read = round_in_groups(product.x)
    want = F.linear(read, floats_of(product.weight).to(product.x.dtype))
    torch.testing.assert_close(multiply_quantized(*product), want)


def test_what_is_rounded_in_groups() -> None:
    x = drawn(3, 4, 2 * GROUP)
    x[0], x[1, 2, 3] = 0, 1e4
    largest = x.unflatten(-1, (2, GROUP)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, GROUP)
    error = (round_in_groups(x) - x).abs()
    assert (error <= largest.flatten(-2) / 65534 * (1 + 1e-2)).all()


@compiled
@pytest.mark.parametrize("kernel", [ROWS, FLOATS])
@pytest.mark.parametrize("spoiled", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("made", [int8, int4])
def test_what_is_not_finite_stays_so(
    kernel: str, spoiled: float, made: Callable[[int, int], QuantizedWeight]
) -> None:
    x, weight = drawn(2, 3 * GROUP), made(5, 3 * GROUP)
    x[1, 40] = spoiled
    with kernels.only(kernel):
        found = multiply_quantized(x, weight)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("make", [int8, int4])
def test_gradients_reach_what_is_multiplied(make: Callable[[int, int], QuantizedWeight]) -> None:
    x, weight = drawn(3, GROUP).requires_grad_(), make(4, GROUP)
    multiply_quantized(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, floats_of(weight).float().sum(0).expand(3, GROUP))
