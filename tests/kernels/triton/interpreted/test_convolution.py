"""The short convolution in Triton beside torch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.kernels import only, select
from fastweights.kernels.triton.streams import in_place
from fastweights.ops import Convolution, convolve
from fastweights.ops.convolution import convolve_by_taps
from poison import poisoned_memory
from triton_checks import TOLERANCE, relative

pytestmark = pytest.mark.sampled

NAME = "short convolution (Triton)"
HALVES = [torch.float32, torch.bfloat16, torch.float16]


def problem(
    t: int, d: int, taps: int, dtype: torch.dtype, *, weights: torch.dtype | None = None
) -> list[Tensor]:
    """Tail, x, taps and bias."""
    torch.manual_seed(t + d)
    tail, x = torch.randn(2, taps - 1, d), torch.randn(2, t, d)
    kinds = (dtype, dtype, weights or dtype, weights or dtype)
    streams = (tail, x, torch.randn(taps, d), torch.randn(d))
    return [s.to(kind) for s, kind in zip(streams, kinds, strict=True)]


def compare(
    given: list[Tensor], document: Tensor | None = None, *, bias: bool = False, silu: bool = False
) -> None:
    """Outputs, next tails and all gradients."""
    exact = [s.double().requires_grad_() for s in given]
    leaves = [s.clone().requires_grad_() for s in given]
    with poisoned_memory(), only(NAME):
        y, tail = convolve(*leaves[:3], document, leaves[3] if bias else None, silu=silu)
        weights = torch.randn_like(y.float()), torch.randn_like(tail.float())
        ((y * weights[0]).sum() + (tail * weights[1]).sum()).backward()
    record = Convolution(*exact[:3], document, exact[3] if bias else None, silu)
    wanted, after = convolve_by_taps(record)
    ((wanted * weights[0].double()).sum() + (after * weights[1].double()).sum()).backward()
    assert y.dtype == torch.promote_types(given[1].dtype, given[2].dtype)
    limit = TOLERANCE[given[1].dtype]
    assert relative(y, wanted) <= limit
    assert torch.equal(tail.double(), after)
    names = ("tail", "x", "taps", "bias")[: 4 if bias else 3]
    for name, found, want in zip(names, leaves, exact, strict=False):
        assert found.grad is not None
        assert found.grad.dtype == found.dtype
        if want.numel():
            assert relative(found.grad, want.grad) <= limit, name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_outputs_tails_and_gradients(dtype: torch.dtype) -> None:
    compare(problem(40, 20, 4, dtype), bias=True, silu=True)


@pytest.mark.parametrize("t", [1, 2, 3, 33])
def test_lengths(t: int) -> None:
    """Shorter than the tail, a token, more than a tile."""
    compare(problem(t, 17, 4, torch.float32))


@pytest.mark.parametrize("taps", [1, 2, 16])
def test_numbers_of_taps(taps: int) -> None:
    compare(problem(40, 16, taps, torch.float32), silu=True)


def test_taps_wider_than_the_stream() -> None:
    compare(problem(9, 20, 4, torch.bfloat16, weights=torch.float32), bias=True)


def test_more_channels_than_a_tile_in_a_stream_with_gaps() -> None:
    tail, x, taps, bias = problem(6, 150, 3, torch.float32)
    apart = torch.randn(2, 6, 300)
    apart[..., :150] = x
    compare([tail, apart[..., :150], taps, bias])


@pytest.mark.parametrize("silu", [False, True])
def test_documents(silu: bool) -> None:
    """A tail of an earlier document, documents within and across tiles, one that begins last."""
    t, before = 40, 3
    document = torch.zeros(2, before + t, dtype=torch.long)
    document[0, before:] += 1
    document[0, 10:] += 1
    document[0, 35:] += 1
    document[1, -1:] += 1
    compare(problem(t, 18, before + 1, torch.float32), document, bias=True, silu=silu)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_one_token(dtype: torch.dtype) -> None:
    tail, x, taps, bias = problem(1, 150, 4, dtype)
    with poisoned_memory(), only(NAME):
        y, after = convolve(tail, x, taps, None, bias, silu=True)
    wide = [s.double() for s in (tail, x, taps)]
    wanted, following = convolve_by_taps(Convolution(*wide, None, bias.double(), True))
    assert relative(y, wanted) <= TOLERANCE[dtype]
    assert torch.equal(after.double(), following)
    assert after.data_ptr() != tail.data_ptr()
    with in_place(), only(NAME):
        again, moved = convolve(tail, x, taps, None, bias, silu=True)
    assert torch.equal(again, y)
    assert moved.data_ptr() == tail.data_ptr()
    assert torch.equal(tail, after)


def test_a_tail_that_is_shared_is_not_written_to() -> None:
    tail, x, taps, _ = problem(1, 16, 4, torch.float32)
    shared = tail[:1].expand(2, -1, -1)
    before = shared.clone()
    with in_place(), only(NAME):
        _, after = convolve(shared, x, taps)
    assert torch.equal(shared, before)
    assert torch.equal(after, torch.cat([before, x], 1)[:, 1:])


def test_refusals() -> None:
    tail, x, taps, _ = problem(5, 16, 4, torch.float32)
    assert select(Convolution(tail, x, taps)).name == NAME
    for streams in (
        (tail.double(), x.double(), taps.double()),
        (tail.bfloat16(), x, taps),
        (torch.randn(2, 16, 16), x, torch.randn(17, 16)),
    ):
        assert select(Convolution(*streams)).name != NAME
