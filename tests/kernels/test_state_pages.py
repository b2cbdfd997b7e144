"""States that are advanced in their pages go on as all others do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import CASES, Case, Shape, cast, each, parts
from extension import compiled
from fastweights import kernels
from fastweights.engines.vllm.layout import ALIGNMENT, PageLayout
from fastweights.features import Hedgehog
from fastweights.kernels.native import NATIVE_IN_PAGES
from fastweights.kernels.native.windowed import NATIVE_WINDOW_IN_PAGES
from fastweights.kernels.pages import InPages, load, store
from fastweights.methods import Method, Recurrent, advance, begin, evaluate
from fastweights.recurrence import Recurrence, WindowedLinear
from fastweights.recurrence.base import NoFiniteFormError
from fastweights.recurrence.mapped import Mapped

SLOTS = torch.tensor([3, 1])
FIRST = 7


def settled(recurrence: Recurrence) -> tuple[Tensor, ...]:
    """The state behind a record, of fixed shapes."""
    try:
        return parts(recurrence.settle(evaluate(recurrence)[1]))
    except NoFiniteFormError:
        pytest.skip("its state grows for ever")


def pages_of(state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Pages that hold a state of two sequences, and the tensors in them."""
    layout = PageLayout.of(state)
    pages = torch.full((5, layout.nbytes + ALIGNMENT), 7, dtype=torch.uint8)
    paged = layout.of_pages(pages)
    store(paged, SLOTS, state)
    return pages, paged


def as_state(like: Any, tensors: tuple[Tensor, ...]) -> Any:
    return tensors if isinstance(like, tuple) else tensors[0]


def assert_goes_on(recurrence: Recurrence, method: Method | None = None) -> InPages:
    """Tokens of a record behind its first ones, one by one and some at once; the last record."""
    start = recurrence.initial_state()
    state = settled(recurrence[:FIRST])
    pages, paged = pages_of(state)
    others = pages[[0, 2, 4]].clone()
    record = InPages(recurrence, as_state(start, paged), SLOTS)
    for span in ((FIRST, FIRST + 1), (FIRST + 1, FIRST + 5), (FIRST + 5, FIRST + 6)):
        tokens = recurrence[slice(*span)]
        expected, after = evaluate(tokens, as_state(start, state))
        given = () if method is None else (method,)
        o = advance(tokens, as_state(start, paged), SLOTS, *given)
        torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-4)
        state = parts(tokens.settle(after))
        for mine, theirs in zip(load(paged, SLOTS), state, strict=True):
            torch.testing.assert_close(mine, theirs.to(mine.dtype), atol=1e-5, rtol=1e-4)
        record = InPages(tokens, as_state(start, paged), SLOTS)
    assert torch.equal(pages[[0, 2, 4]], others)
    return record


def assert_begins(recurrence: Recurrence, method: Method | None = None) -> InPages:
    """The first tokens of a record, some or none, in pages of others; the record of the former."""
    given = () if method is None else (method,)
    for tokens in (recurrence[:0], recurrence[:1], recurrence[:FIRST]):
        expected, after = evaluate(tokens, None, *given)
        state = parts(tokens.settle(after))
        pages, paged = pages_of(tuple(torch.full_like(s, 3) for s in state))
        others = pages[[0, 2, 4]].clone()
        o = begin(tokens, as_state(recurrence.initial_state(), paged), SLOTS, *given)
        torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-4)
        for mine, theirs in zip(load(paged, SLOTS), state, strict=True):
            torch.testing.assert_close(mine, theirs.to(mine.dtype), atol=1e-5, rtol=1e-4)
        assert torch.equal(pages[[0, 2, 4]], others)
    return InPages(tokens, as_state(recurrence.initial_state(), paged), SLOTS, begins=True)


def narrow(case: Case, shape: Shape) -> Recurrence:
    return case.rule(**{name: cast(s, torch.float32) for name, s in case.streams(shape).items()})


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rule_goes_on_in_pages(case: Case) -> None:
    assert_goes_on(narrow(case, Shape()))
    assert_begins(narrow(case, Shape()))


@compiled
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        *product(["Decay", "Delta", "DPLR"], [Shape(k=16, v=16), Shape(v=1), Shape(k=1, v=1)]),
        ("Selective", Shape(v=1)),
    ],
    ids=str,
)
def test_matrices_and_scans_are_advanced_by_c(rule: str, shape: Shape) -> None:
    case = next(one for one in CASES if type(narrow(one, shape)).__name__ == rule)
    record = assert_goes_on(narrow(case, shape))
    assert kernels.select(record) is NATIVE_IN_PAGES
    assert kernels.select(assert_begins(narrow(case, shape))) is not NATIVE_IN_PAGES


@compiled
@pytest.mark.parametrize("step", [1, 5, 17])
@pytest.mark.parametrize("window", [0, 1, 4, 30])
@torch.no_grad()
def test_windows_are_advanced_by_c(window: int, step: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 19, h, 9, generator=drawn) for h in (4, 2, 2))
    phi_q, phi_k = (Hedgehog(h, 9, 6) for h in (4, 2))
    mix = torch.rand(2, 19, 4, 1, generator=drawn)

    def record(begin: int, end: int) -> WindowedLinear:
        own_q, own_k, own_v, own_mix = (s[:, begin:end] for s in (q, k, v, mix))
        mapped = Mapped(phi_q, own_q), Mapped(phi_k, own_k)
        return WindowedLinear(own_q, own_k, own_v, *mapped, own_mix, window)

    expected, _ = evaluate(record(0, 19))
    state = settled(record(0, 2))
    pages, paged = pages_of(tuple(torch.full_like(s, 3) for s in (*state[:2], *state[3:])))
    state = (*paged[:2], paged[0][..., :0], *paged[2:])
    for place in range(0, 19, step):
        some = InPages(record(place, place + step), state, SLOTS, begins=place == 0)
        assert kernels.select(some) is NATIVE_WINDOW_IN_PAGES
        move = advance if place else begin
        o = move(some.recurrence, state, SLOTS)
        torch.testing.assert_close(o, expected[:, place : place + step], atol=1e-5, rtol=1e-4)
    assert (pages[[0, 2, 4]] == 7).all()


def test_a_method_may_be_chosen() -> None:
    assert_goes_on(narrow(CASES[0], Shape()), Recurrent())
    assert_begins(narrow(CASES[0], Shape()), Recurrent())


@compiled
def test_states_that_lie_in_no_pages_are_copied() -> None:
    record = assert_goes_on(narrow(CASES[0], Shape()))
    state = each(record.state, lambda s: s.transpose(-1, -2).contiguous().transpose(-1, -2))
    apart = replace(record, state=state)
    assert "do not lie in pages" in kernels.explain(apart)
    wanted = advance(record.recurrence, each(record.state, Tensor.clone), SLOTS)
    torch.testing.assert_close(advance(apart.recurrence, state, SLOTS), wanted)
