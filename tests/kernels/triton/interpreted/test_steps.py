"""One token by Triton beside the definitions in float64, into new states and in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.generate import Decoder
from fastweights.kernels import select
from fastweights.kernels.native import library
from fastweights.kernels.triton import steps
from fastweights.kernels.triton.streams import in_place
from fastweights.methods import Recurrent, evaluate
from fastweights.models.graph import StaticStep, states_of
from fastweights.recurrence import (
    Amplified,
    Bonus,
    Cholesky,
    ConjugateGradient,
    Decay,
    Delta,
    Mesa,
    Normalized,
    Recurrence,
    Signed,
)
from poison import poisoned_memory
from tiny import tiny, tokens
from triton_checks import TOLERANCE, relative, tensors_of

pytestmark = pytest.mark.sampled

Streams = dict[str, Tensor]
Build = Callable[[Streams], Recurrence]


@pytest.fixture(autouse=True)
def no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """C would take what is on the CPU."""
    monkeypatch.setattr(library, "library", lambda: None)


def draw(b: int, h: int, k: int, v: int) -> Streams:
    """Streams of one token."""
    torch.manual_seed(k + v)
    unit = torch.nn.functional.normalize(torch.randn(b, 1, h, k), dim=-1)
    return {
        "q": torch.randn(b, 1, h, k) * k**-0.5,
        "k": unit,
        "v": torch.randn(b, 1, h, v),
        "scalar": -torch.rand(b, 1, h, 1) * 2,
        "vector": -torch.rand(b, 1, h, k) * 0.01,
        "beta": torch.rand(b, 1, h, 1),
        "gain": torch.randn(b, 1, h, 1) * 3,
        "sign": torch.randn(b, 1, h, 1),
        "skip": torch.randn(b, 1, 1, v),
        "ridge": torch.rand(1, 1, h, k) + 0.5,
    }


def mesa(s: Streams, **settings: Any) -> Mesa:
    solver = ConjugateGradient(**settings)
    return Mesa(s["q"], s["k"], s["v"], s["beta"], s["scalar"], s["ridge"], solver)


RULES: dict[str, Build] = {
    "none": lambda s: Decay(s["q"], s["k"], s["v"], None),
    "scalar": lambda s: Decay(s["q"], s["k"], s["v"], s["scalar"], s["gain"]),
    "vector": lambda s: Decay(s["q"], s["k"], s["v"], s["vector"], s["skip"]),
    "tied": lambda s: Decay(s["q"], None, s["v"], s["vector"]),
    "shared": lambda s: Decay(s["q"][:, :, :1], s["k"][:1], s["v"], s["scalar"][:1]),
    "delta": lambda s: Delta(s["q"], s["k"], s["v"], s["beta"]),
    "gated delta": lambda s: Delta(s["q"], s["k"], s["v"], s["beta"], s["scalar"]),
    "delta of vectors": lambda s: Delta(s["q"], s["k"], s["v"], s["beta"], s["vector"]),
    "bonus": lambda s: Bonus(s["q"], s["k"], s["v"], s["vector"], s["gain"]),
    "mesa": mesa,
}
COMPOSED: dict[str, Build] = {
    "normalized": lambda s: Normalized(Decay(s["q"], s["k"], s["v"], s["scalar"]), 0.3),
    "normalized bonus": lambda s: Normalized(
        Bonus(s["q"].abs(), s["k"].abs(), s["v"], None, s["beta"])
    ),
    "amplified": lambda s: Amplified(
        Normalized(Decay(s["q"], s["k"], s["v"], s["scalar"]), 1.0), s["gain"]
    ),
    "amplified bonus": lambda s: Amplified(
        Normalized(Bonus(s["q"].abs(), s["k"].abs(), s["v"], s["scalar"], s["beta"])), s["gain"]
    ),
    "signed": lambda s: Signed(Decay(s["q"], s["k"], s["v"], s["scalar"]), s["sign"]),
    "signed delta": lambda s: Signed(
        Delta(s["q"], s["k"], s["v"], s["beta"], s["scalar"]), s["sign"]
    ),
    "signed mesa": lambda s: Signed(mesa(s), s["sign"]),
}
ALL = {**RULES, **COMPOSED}
WIDE = ("scalar", "vector", "gain", "sign", "ridge")


def start(record: Recurrence) -> tuple[Tensor, ...]:
    """A state that the rule may have: that of some tokens."""
    torch.manual_seed(1)
    found = tensors_of(record.initial_state())
    if isinstance(record.innermost, Mesa):
        keys = torch.randn(*found[0].shape[:2], 9, found[0].shape[-1])
        return keys.mT @ keys * 0.1, torch.randn_like(found[1])
    return tuple(torch.rand_like(s) + (s.abs() > 1e20) for s in found)


def compare(build: Build, streams: Streams, dtype: torch.dtype, limit: float | None = None) -> None:
    """o and the states: of new memory, and in place."""
    given = {n: s.to(torch.float32 if n in WIDE else dtype) for n, s in streams.items()}
    record, exact = build(given), build({n: s.double() for n, s in given.items()})
    before = start(record)
    o, last = evaluate(exact, as_state([s.double() for s in before]), Recurrent())
    limit = TOLERANCE[dtype] if limit is None else limit
    with poisoned_memory(), torch.no_grad():
        found, after = evaluate(record, as_state([s.clone() for s in before]))
    assert found.dtype == record.output
    assert relative(found, o) <= limit
    for got, want in zip(tensors_of(after), tensors_of(last), strict=True):
        assert got.dtype == torch.float32
        assert relative(got, want) <= max(limit if dtype == torch.float32 else 0, 3e-6)
    places = tuple(s.clone() for s in before)
    with torch.no_grad(), in_place():
        again, moved = evaluate(record, as_state(list(places)))
    assert torch.equal(again, found)
    for got, want in zip(tensors_of(moved), tensors_of(after), strict=True):
        assert torch.equal(got, want)
    if not isinstance(record, Signed | Amplified):
        assert [s.data_ptr() for s in tensors_of(moved)] == [s.data_ptr() for s in places]


def as_state(parts: list[Tensor]) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)


@pytest.mark.parametrize("rule", ALL)
def test_every_rule(rule: str) -> None:
    limit = 1e-5 if "mesa" in rule else None
    compare(ALL[rule], draw(2, 3, 20, 12), torch.float32, limit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", ["vector", "gated delta", "mesa", "normalized"])
def test_half_precision(rule: str, dtype: torch.dtype) -> None:
    compare(ALL[rule], draw(2, 2, 16, 24), dtype)


@pytest.mark.parametrize("rule", ["scalar", "tied", "gated delta", "bonus"])
@pytest.mark.parametrize(
    "shape",
    [(2, 150, 16, 1), (2, 70, 1, 1), (1, 40, 1, 20), (1, 2, 130, 70), (3, 1, 300, 9)],
    ids=str,
)
def test_widths(rule: str, shape: tuple[int, int, int, int]) -> None:
    """Many heads of small states, and heads of several tiles."""
    compare(RULES[rule], draw(*shape), torch.float32)


@pytest.mark.parametrize("rule", ALL)
def test_every_rule_comes_to_the_kernels(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(steps, "launch", lambda kernel, *_, **__: launched.append(kernel))
    evaluate(ALL[rule](draw(1, 2, 16, 16)))
    assert len(launched) == 1


def test_resets_empty_the_state() -> None:
    streams = draw(1, 2, 16, 16)
    streams["scalar"][:, :, 0] = -torch.inf
    for rule in ("scalar", "gated delta", "mesa"):
        compare(RULES[rule], streams, torch.float32, 1e-5)


def test_tokens_one_after_the_other_in_place() -> None:
    torch.manual_seed(0)
    t, streams = 6, draw(1, 2, 16, 16)
    long = {n: torch.cat([s * torch.rand(()) for _ in range(t)], 1) for n, s in streams.items()}
    record = ALL["gated delta"](long)
    wanted, last = evaluate(record, method=Recurrent())
    state = record.initial_state()
    place = state.data_ptr()
    with in_place():
        outputs = []
        for token in record.split(1):
            o, state = evaluate(token, state)
            outputs.append(o)
    assert state.data_ptr() == place
    assert relative(torch.cat(outputs, 1), wanted.double()) < 3e-6
    assert relative(state, last.double()) < 3e-6


@pytest.mark.parametrize("settings", [{"max_steps": 3}, {"tol": 1e-2}, {"max_steps": 0}], ids=str)
def test_mesa_stops_where_the_definition_stops(settings: dict[str, Any]) -> None:
    compare(lambda s: mesa(s, **settings), draw(2, 2, 20, 12), torch.float32, 1e-5)


def test_a_query_of_zeros() -> None:
    streams = draw(1, 2, 16, 16)
    streams["q"][:] = 0
    compare(mesa, streams, torch.float32)


def test_a_state_that_is_shared_is_not_written_to() -> None:
    record = RULES["scalar"](draw(2, 2, 16, 16))
    shared = torch.randn(1, 2, 16, 16)
    before = shared.clone()
    with in_place():
        evaluate(record, shared)
    assert torch.equal(shared, before)


def test_refusals() -> None:
    streams = draw(2, 2, 16, 16)
    rules = {**RULES, "normalized": COMPOSED["normalized"]}
    for rule, record in ((n, build(streams)) for n, build in rules.items()):
        assert "one token (Triton)" in select(record).name, rule
    q = streams["q"]
    for refused in (
        Decay(*(torch.cat([q, q], 1),) * 3, None),
        Decay(*(q.double(),) * 3, None),
        Decay(*(q.to(torch.complex64),) * 3, None),
        Decay(q.clone().requires_grad_(), q, q, None),
        Decay(*(torch.randn(1, 1, 1, 1025),) * 3, None),
        Mesa(q, q, q, streams["beta"], None, streams["ridge"], Cholesky()),
        mesa(draw(1, 1, 129, 16)),
    ):
        assert "one token (Triton)" not in select(refused).name
    state = torch.randn(2, 2, 16, 16, requires_grad=True)
    o, _ = evaluate(Decay(q, q, q, None), state)
    assert o.requires_grad


@pytest.mark.parametrize(
    "name",
    [
        *("metala", "mlstm"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gated_deltanet", "rwkv4", "mesa", "mamba")
        ),
    ],
)
def test_models_decode_in_place(name: str) -> None:
    """Steps, convolutions and norms of a whole model, on states that stay where they are."""
    model, ids = tiny(name, torch.float32), tokens(2, 5)
    token, decoder = ids[:, 0], Decoder(model)
    step = StaticStep(model, decoder.cache, decoder.read(ids))
    wanted = model(torch.cat([ids, token[:, None], token[:, None]], 1)).logits[:, -1]
    places = [state.data_ptr() for state in states_of(decoder.cache)]
    step(token)
    assert relative(step(token), wanted.double()) < 1e-4
    assert [state.data_ptr() for state in states_of(decoder.cache)] == places
