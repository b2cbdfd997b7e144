"""Streams of bfloat16 in the compiled kernels, against float64 on the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from test_native import RULES, record, results
from torch import Tensor
from torch.nn import functional as F

from cases import spread
from extension import compiled, every_lesser_isa
from fastweights import kernels
from fastweights.kernels.native import decay_delta, library, operators
from fastweights.methods import Recurrent
from fastweights.ops import Convolution, RMSNorm, convolve, rms_normalize
from fastweights.recurrence.base import Recurrence
from tolerances import SAME, TOLERANCE, assert_close, error

NARROW, WIDE = torch.bfloat16, torch.float32
SHAPES = [(1, 16, 64), (33, 3, 65), (70, 32, 20), (257, 16, 16)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def mixed(recurrence: Recurrence, wide: tuple[str, ...]) -> Recurrence:
    """In bfloat16, but for the streams called `wide`."""
    streams = recurrence.streams.items()
    return replace(recurrence, **{n: s.to(WIDE if n in wide else NARROW) for n, s in streams})


def assert_agrees(recurrence: Recurrence, wide: tuple[str, ...] = ("log_decay",)) -> None:
    """`recurrence` in bfloat16, by the compiled kernels, as in float64 on the rounded numbers."""
    given = mixed(recurrence, wide)
    state = torch.randn(given.state_shapes[0])
    kernel = kernels.select(given).name
    assert "compiled" in kernel
    wanted = results(given.map_streams(Tensor.double), state.double(), method=Recurrent())
    with kernels.only(kernel):
        got = results(given, state)
    leaves = [given.q.new_empty(0, dtype=given.output), state, *given.streams.values(), state]
    names = ["o", "state", *recurrence.streams, "initial state"]
    for name, x, y, like in zip(names, got, wanted, leaves, strict=True):
        assert x.dtype == like.dtype, name
        # all gradients are made of that of o, which autograd has in bfloat16
        assert_close(x, y, name, WIDE if name == "state" else NARROW, floor=1e-3)


def calls_of(isa: str) -> Callable[[str, Any], int]:
    """`library.call` of the functions compiled for an instruction set."""
    call = library.call
    return lambda name, given: call(f"{name}_{isa}", given)


@pytest.mark.sampled
@compiled
@pytest.mark.parametrize(("rule", "decay", "gate"), RULES)
def test_narrow_streams_equal_the_definition(rule: str, decay: str, gate: str) -> None:
    t, k, v = SHAPES[RULES.index((rule, decay, gate)) % len(SHAPES)]
    assert_agrees(record(rule, decay, gate, b=2, t=t, h=3, k=k, v=v))


@compiled
@pytest.mark.parametrize("rule", ["decay", "delta"])
def test_every_stream_may_be_of_either_dtype(rule: str) -> None:
    given = record(rule, "vector", "gentle", b=1, t=40, h=2, k=16, v=24)
    for count in range(len(given.streams)):
        for wide in combinations(given.streams, count):
            assert_agrees(given, wide)


@compiled
@pytest.mark.parametrize("rule", ["decay", "delta"])
def test_narrow_streams_of_any_strides(rule: str) -> None:
    given = record(rule, "vector", "gentle", b=2, t=40, h=2, k=16, v=24)
    assert_agrees(given.map_streams(spread))
    assert_agrees(replace(given, q=given.q[:1], v=given.v[:, :, :1]))


@compiled
def test_states_and_sums_are_not_rounded() -> None:
    """A thousand equal writes, which bfloat16 stops to add at 256."""
    ones = torch.ones(1, 1000, 1, 1, dtype=NARROW)
    o, state = decay_delta.NATIVE_DECAY.compute(
        replace(record("decay", "none", "gentle", 1, 1, 1, 1, 1), q=ones, k=ones, v=ones),
        torch.zeros(1, 1, 1, 1),
    )
    assert state.item() == 1000
    assert o[0, -1].item() == 1000


@compiled
@every_lesser_isa
def test_sums_are_rounded_as_by_torch(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """To the nearest, of two to the even one; what is not a number stays so."""
    monkeypatch.setattr(library, "call", calls_of(isa))
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.38e38, 1e-38])
    values = torch.cat([special, torch.randn(250)]).to(NARROW)
    tail, x = values.view(1, 1, -1), values[torch.randperm(len(values))].view(1, 1, -1)
    with kernels.only("short convolution (compiled)"):
        y, _ = convolve(tail, x, torch.ones(2, len(values), dtype=NARROW))
    wanted = (tail.float() + x.float()).to(NARROW)
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)


@compiled
@every_lesser_isa
@pytest.mark.parametrize("rule", ["decay", "delta"])
def test_narrow_streams_by_lesser_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, rule: str, isa: str
) -> None:
    monkeypatch.setattr(library, "call", calls_of(isa))
    assert_agrees(record(rule, "vector", "mixed", b=1, t=40, h=2, k=20, v=33))
    assert_convolution(NARROW, NARROW, NARROW, documents=True)
    assert_norm(33)


@compiled
@pytest.mark.parametrize("rule", ["decay", "delta", "dplr"])
def test_narrow_streams_in_a_compiled_graph(rule: str) -> None:
    given = mixed(record(rule, "scalar", "gentle", b=1, t=12, h=2, k=8, v=8), ("log_decay",))
    streams = decay_delta.Streams.of(decay_delta.MATRIX, given)
    leaves = [None if s is None else s.detach().requires_grad_() for s in streams]
    start = torch.randn(given.state_shapes[0], requires_grad=True)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(operators.native, (False, False, start, *leaves), test_utils=checks)


@compiled
def test_norms_of_two_dtypes_are_left_to_torch() -> None:
    norm = RMSNorm(torch.randn(3, 8).to(NARROW), torch.randn(8), 1e-2)
    assert "its weight is torch.float32 and its x torch.bfloat16" in kernels.explain(norm)
    assert kernels.select(norm).name == "RMSNorm (torch)"


def assert_convolution(
    tail: torch.dtype, x: torch.dtype, taps: torch.dtype, documents: bool, d: int = 300
) -> None:
    shapes = ((2, 3, d), tail), ((2, 37, d), x), ((4, d), taps)
    given = [torch.randn(shape).to(dtype) for shape, dtype in shapes]
    ids = torch.randint(2, (2, 40)).cumsum(1) if documents else None
    found = []
    for dtype in (None, torch.float64):
        leaves = [s.to(dtype or s.dtype).detach().requires_grad_() for s in given]
        y, _ = convolve(*leaves, ids)
        upstream = torch.ones(y.shape).cumsum(1).to(y.dtype)
        found.append([y, *torch.autograd.grad(y, leaves, upstream)])
    dtypes = [torch.promote_types(torch.promote_types(tail, x), taps), tail, x, taps]
    for got, wanted, dtype in zip(*found, dtypes, strict=True):
        assert got.dtype == dtype
        assert error(got, wanted) <= (SAME if dtype == WIDE else TOLERANCE[NARROW])


@compiled
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("tail", "x", "taps"), [*product([NARROW, WIDE], repeat=3)])
def test_narrow_convolutions(
    tail: torch.dtype, x: torch.dtype, taps: torch.dtype, documents: bool
) -> None:
    shapes = ((1, 3, 5), tail), ((1, 7, 5), x), ((4, 5), taps)
    given = Convolution(*(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes))
    assert kernels.select(given).name == "short convolution (compiled)"
    assert_convolution(tail, x, taps, documents)


def assert_norm(width: int, weighted: bool = True) -> None:
    x, upstream = torch.randn(3, 50, width).to(NARROW), torch.randn(3, 50, width).to(NARROW)
    weight = torch.randn(width).to(NARROW) if weighted else None
    assert kernels.select(RMSNorm(x, weight, 1e-2)).name == "RMSNorm (compiled)"
    found = []
    for dtype in (NARROW, torch.float64):
        leaves = [s.to(dtype).requires_grad_() for s in (x, weight) if s is not None]
        normalize = rms_normalize if dtype == NARROW else _normalize
        y = normalize(leaves[0], leaves[1] if weighted else None, 1e-2)
        found.append([y, *torch.autograd.grad(y, leaves, upstream.to(dtype))])
    for got, wanted in zip(*found, strict=True):
        assert got.dtype == NARROW
        assert error(got, wanted) <= 4e-3  # one rounding


def _normalize(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


@compiled
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 33, 64, 300])
def test_narrow_norms(width: int, weighted: bool) -> None:
    assert_norm(width, weighted)
