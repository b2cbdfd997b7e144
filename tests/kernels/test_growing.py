"""A softmax cache that grows in place is the one that is made anew at every token, whatever becomes
of it in between.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastweights import kernels
from fastweights.kernels.growing import LEAST_ROOM, append, drop_oldest
from fastweights.methods import Recurrent, evaluate
from fastweights.recurrence import Softmax
from fastweights.recurrence.cached import Cache

TOKENS = 2 * LEAST_ROOM + 9
TAKEN = "attention, one token (torch): taken"


def record(window: int | None, dtype: torch.dtype = torch.float64, b: int = 3) -> Softmax:
    generator = torch.Generator().manual_seed(window or 0)
    q, k, v = (
        torch.randn(b, TOKENS, heads, width, generator=generator, dtype=torch.float64).to(dtype)
        for heads, width in ((4, 6), (2, 6), (2, 5))
    )
    return Softmax(q, k, v, window)


def after(softmax: Softmax, count: int) -> Cache:
    """The cache behind the first tokens, grown one by one."""
    cache: Cache = softmax.initial_state()
    for i in range(count):
        cache = following(softmax, i, cache)[1]
    return cache


def following(softmax: Softmax, token: int, cache: Cache) -> tuple[Tensor, Cache]:
    return evaluate(softmax[token : token + 1], cache)  # type: ignore[return-value]


def same(found: Cache, want: Cache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("window", [None, 1, 2, 7, TOKENS + 1])
def test_every_token_is_that_of_the_definition(
    window: int | None, mode: Callable[[], torch.no_grad]
) -> None:
    softmax = record(window)
    with mode():
        want, end = evaluate(softmax, None, Recurrent())
        cache: Cache = softmax.initial_state()
        for i in range(TOKENS):
            assert TAKEN in kernels.explain(softmax[i : i + 1])
            o, cache = following(softmax, i, cache)
            torch.testing.assert_close(o, want[:, i : i + 1])
        assert same(cache, end)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 7])
def test_two_futures_of_one_cache_do_not_meet(window: int | None) -> None:
    softmax = record(window)
    start = after(softmax, 20)
    before = [part.clone() for part in start]
    _, first = following(softmax, 20, start)
    kept = [part.clone() for part in first]
    _, second = following(softmax, 21, start)
    _, third = following(softmax, 22, first)
    assert same(start, tuple(before))  # type: ignore[arg-type]
    assert same(first, tuple(kept))  # type: ignore[arg-type]
    assert same(second, softmax[21:22].step(start)[1])
    assert same(third, softmax[22:23].step(first)[1])


SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "reordered": lambda x: x[torch.tensor([2, 0, 0])],
    "a view": lambda x: x[:],
    "repeated": lambda x: x.repeat_interleave(2, dim=0)[:3],
    "copied": copy.deepcopy,
    "detached": Tensor.detach,
}


@pytest.mark.parametrize("kind", SELECTIONS)
@pytest.mark.parametrize("window", [None, 7])
def test_a_selection_of_sequences_goes_on(window: int | None, kind: str) -> None:
    softmax = record(window)
    start = after(softmax, 20)
    selected: Cache = tuple(map(SELECTIONS[kind], start))  # type: ignore[assignment]
    found, want = selected, tuple(part.clone() for part in selected)
    for i in range(20, 30):
        following(softmax, i, start)
        _, found = following(softmax, i, found)
        _, want = softmax[i : i + 1].step(want)  # type: ignore[arg-type]
        assert same(found, want)


@pytest.mark.parametrize("window", [None, 7])
def test_padding_before_it_stays_forgotten(window: int | None) -> None:
    softmax = record(window)
    keep = torch.ones(3, 20, dtype=torch.bool)
    keep[0, :4], keep[1, 3:9] = False, False
    _, cache = evaluate(softmax[:20].keep(keep))
    want: Cache = cache  # type: ignore[assignment]
    for i in range(20, 40):
        o, cache = following(softmax, i, cache)  # type: ignore[arg-type]
        expected, want = softmax[i : i + 1].step(want)
        torch.testing.assert_close(o, expected)
        assert same(cache, want)


def test_a_graph_that_keeps_the_cache_does_not_mind_that_it_grows() -> None:
    softmax = record(None)
    with torch.no_grad():
        cache = after(softmax, 20)
    q = softmax.q[:, 20:21].clone().requires_grad_()
    o, _ = evaluate(Softmax(q, softmax.k[:, 20:21], softmax.v[:, 20:21]), cache)
    weights = (q[:, 0, 0, :, None] * cache[0][:, 0].mT).sum()
    with torch.no_grad():
        following(softmax, 20, cache)
    (o.sum() + weights).backward()
    assert q.grad is not None


def test_gradients_of_a_token_are_those_of_the_definition() -> None:
    cache = after(record(None), 20)
    gradients = []
    for evaluated in (evaluate, lambda r, s: evaluate(r, s, Recurrent())):
        softmax = record(None)[20:21]
        softmax.k.requires_grad_()
        gradients.append(torch.autograd.grad(evaluated(softmax, cache)[0].sum(), softmax.k))
    torch.testing.assert_close(*gradients)


def test_a_cache_of_inference_mode_goes_on_outside_of_it() -> None:
    softmax = record(None)
    with torch.inference_mode():
        cache = after(softmax, 20)
    with torch.no_grad():
        assert same(following(softmax, 20, cache)[1], softmax[20:21].step(cache)[1])


def test_a_stored_cache_is_plain_tensors() -> None:
    cache, file = after(record(7), 20), io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), cache)


def test_it_grows_where_it_is() -> None:
    new = torch.ones(1, 1, 1, 2)
    grown = append(torch.zeros(1, 1, 3, 2), new)
    places = {grown.data_ptr()}
    for _ in range(LEAST_ROOM):
        grown = append(grown, new)
        places.add(grown.data_ptr())
    assert len(places) == 1
    assert drop_oldest(grown, 0) is grown
    shorter = drop_oldest(grown, 3)
    assert torch.equal(shorter, torch.ones(1, 1, LEAST_ROOM + 1, 2))
    assert append(shorter, new).data_ptr() != shorter.data_ptr()  # all room is taken
