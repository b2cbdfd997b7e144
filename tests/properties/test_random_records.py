"""Random records of every rule: widths, lengths, broadcast axes, dtypes, decays and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Generator, Tensor

from cases import CASES, LINEAR, Case, Shape, Streams, cast, each, parts
from fastweights.methods import Auto, Chunkwise, Method, Parallel, Recurrent, evaluate
from fastweights.recurrence import Recurrence, ShapeError
from laws import law
from tolerances import TOLERANCE, error

WIDTHS = st.integers(1, 9) | st.sampled_from([16, 31, 32, 33, 64, 65])
LENGTHS = st.integers(0, 12) | st.sampled_from([31, 63, 64, 65, 70])
SHAPES = st.builds(Shape, b=st.integers(1, 3), t=LENGTHS, h=st.integers(1, 4), k=WIDTHS, v=WIDTHS)
METHODS = st.sampled_from([Auto(), Parallel()]) | st.builds(Chunkwise, st.integers(1, 70))
DTYPES = st.sampled_from([torch.float64, torch.float32])
DECAYS = {
    "as drawn": None,
    "none": 0.0,
    "tiny": -1e-8,
    "steep": -90.0,
    "huge": -1e30,
    "resets": -torch.inf,
}


@dataclass(frozen=True)
class Drawn:
    """A record to be made.

    Attributes:
        case: Its rule.
        shape: Its sizes.
        dtype: Of its streams.
        seed: Of all its numbers.
        decay: Key of `DECAYS`.
        share: The share of the log decays that are this.
        scale: What v is multiplied by.
    """

    case: Case
    shape: Shape
    dtype: torch.dtype
    seed: int
    decay: str
    share: float
    scale: float

    def streams(self) -> Streams:
        streams = self.case.streams(self.shape, self.dtype, self.seed)
        value = DECAYS[self.decay]
        if "log_decay" in streams and value is not None:
            chosen = torch.rand(streams["log_decay"].shape, generator=self.generator) < self.share
            streams["log_decay"] = streams["log_decay"].masked_fill(chosen, value)
        streams["v"] = streams["v"] * self.scale
        return streams

    @property
    def generator(self) -> Generator:
        return Generator().manual_seed(self.seed)

    def record(self) -> Recurrence:
        return self.case.rule(**self.streams())

    def compare(self, got: Any, want: Any, what: str) -> None:
        """The norms of outputs are relative to those of v."""
        assert torch.isfinite(got).all(), f"{what} is not finite"
        assert error(got, want, max(self.scale, 1e-30)) <= TOLERANCE[self.dtype], what

    def compare_states(self, got: Any, want: Any) -> None:
        """What the rule compares of them."""
        plain = self.case.plain
        for ours, theirs in zip(parts(plain(got)), parts(plain(want)), strict=True):
            self.compare(ours, theirs, "state")


def drawn(
    cases: list[Case] = CASES, dtypes: st.SearchStrategy[torch.dtype] = DTYPES, **fixed: Any
) -> st.SearchStrategy[Drawn]:
    choices = {
        "case": st.sampled_from(cases),
        "shape": SHAPES,
        "dtype": dtypes,
        "seed": st.integers(0, 2**31),
        "decay": st.sampled_from(list(DECAYS)),
        "share": st.sampled_from([0.1, 1.0]),
        "scale": st.sampled_from([1.0, 1e-40, 1e-6, 1e6]),
    }
    return st.builds(Drawn, **{**choices, **{n: st.just(value) for n, value in fixed.items()}})


def in_float64(streams: Streams) -> Streams:
    return {name: cast(s, torch.float64) for name, s in streams.items()}


@pytest.mark.long
@law(calls=1500, few=40, drawn=drawn(), method=METHODS, begun=st.booleans())
def test_every_method_is_the_rule_token_by_token(drawn: Drawn, method: Method, begun: bool) -> None:
    streams = drawn.streams()
    state = drawn.case.start(drawn.shape, drawn.dtype, drawn.seed) if begun else None
    if begun:
        assume(drawn.scale == 1)
    start = None if state is None else each(state, lambda s: cast(s, torch.float64))
    want, after = evaluate(drawn.case.rule(**in_float64(streams)), start, Recurrent())
    got, reached = evaluate(drawn.case.rule(**streams), state, method)
    drawn.compare(got, want, "o")
    drawn.compare_states(reached, after)


@law(calls=500, drawn=drawn(dtypes=st.just(torch.bfloat16), scale=1.0), method=METHODS)
def test_bfloat16_is_rounded_and_no_more(drawn: Drawn, method: Method) -> None:
    streams = drawn.streams()
    got, _ = evaluate(drawn.case.rule(**streams), None, method)
    want, _ = evaluate(drawn.case.rule(**in_float64(streams)), None, Recurrent())
    assert got.dtype == drawn.record().output
    assert error(got, want) <= TOLERANCE[torch.bfloat16] * 2


@law(calls=700, drawn=drawn(), place=st.floats(0, 1), methods=st.tuples(METHODS, METHODS))
def test_a_record_may_be_cut_anywhere(
    drawn: Drawn, place: float, methods: tuple[Method, Method]
) -> None:
    record, cut = drawn.record(), round(place * drawn.shape.t)
    whole, end = evaluate(record, None, methods[0])
    first, state = evaluate(record[:cut], None, methods[0])
    second, reached = evaluate(record[cut:], state, methods[1])
    drawn.compare(torch.cat([first, second], 1), whole, "o")
    drawn.compare_states(reached, end)


def one_row(streams: Streams, tokens: Tensor) -> Streams:
    """The tokens of a batch of one."""
    return {n: s[:, tokens] if s.ndim == 4 else s for n, s in streams.items()}


ALONE = st.builds(Shape, b=st.just(1), t=LENGTHS, h=st.integers(1, 4), k=WIDTHS, v=WIDTHS)


@law(calls=500, drawn=drawn(), shape=ALONE, method=METHODS, share=st.floats(0, 1))
def test_padding_leaves_no_trace(drawn: Drawn, shape: Shape, method: Method, share: float) -> None:
    alone = Drawn(**{**drawn.__dict__, "shape": shape})
    streams = alone.streams()
    mask = torch.rand(1, shape.t, generator=alone.generator) < share
    got, state = evaluate(alone.case.rule(**streams).keep(mask), None, method)
    want, after = evaluate(alone.case.rule(**one_row(streams, mask[0])), None, Recurrent())
    alone.compare(got[:, mask[0]], want, "o")
    if alone.case in LINEAR:
        alone.compare_states(state, after)


@pytest.mark.long
@law(calls=500, drawn=drawn(), shape=ALONE, method=METHODS, share=st.floats(0, 1))
def test_documents_know_nothing_of_each_other(
    drawn: Drawn, shape: Shape, method: Method, share: float
) -> None:
    alone = Drawn(**{**drawn.__dict__, "shape": shape})
    streams = alone.streams()
    ids = (torch.rand(1, shape.t, generator=alone.generator) < share).long().cumsum(1)
    got, _ = evaluate(alone.case.rule(**streams).segments(ids), None, method)
    for document in ids.unique():
        inside = ids[0] == document
        want, _ = evaluate(alone.case.rule(**one_row(streams, inside)), None, Recurrent())
        alone.compare(got[:, inside], want, "o")


@law(calls=400, drawn=drawn(), method=METHODS, order=st.randoms(use_true_random=False))
def test_rows_know_nothing_of_each_other(drawn: Drawn, method: Method, order: Any) -> None:
    streams = drawn.streams()
    rows = order.sample(range(drawn.shape.b), drawn.shape.b)
    permuted = {n: s[rows] if s.ndim == 4 else s for n, s in streams.items()}
    got, _ = evaluate(drawn.case.rule(**permuted), None, method)
    want, _ = evaluate(drawn.case.rule(**streams), None, method)
    drawn.compare(got, want[rows], "o")


@law(calls=400, drawn=drawn(), method=METHODS, place=st.floats(0, 1))
def test_no_token_sees_a_later_one(drawn: Drawn, method: Method, place: float) -> None:
    streams, cut = drawn.streams(), round(place * drawn.shape.t)
    other = Drawn(**{**drawn.__dict__, "seed": drawn.seed + 1}).streams()
    changed = {
        n: torch.cat([s[:, :cut], other[n][:, cut:]], 1) if s.ndim == 4 else s
        for n, s in streams.items()
    }
    got, _ = evaluate(drawn.case.rule(**changed), None, method)
    want, _ = evaluate(drawn.case.rule(**streams), None, method)
    drawn.compare(got[:, :cut], want[:, :cut], "o")


UNGROUPED = [case for case in CASES if not case.name.startswith(("softmax", "windowed"))]


@law(
    calls=600,
    drawn=drawn(UNGROUPED),
    axes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=5),
    method=METHODS,
)
def test_an_axis_of_length_one_is_an_expanded_one(
    drawn: Drawn, axes: list[tuple[int, int]], method: Method
) -> None:
    short = drawn.streams()
    named = [name for name, s in short.items() if s.ndim == 4 and name not in ("q", "v")]
    for stream, axis in axes:
        if named and drawn.shape.t:
            name = named[stream % len(named)]
            short[name] = short[name].narrow(axis, 0, 1)
    b, t, h = drawn.shape.b, drawn.shape.t, drawn.shape.h
    whole = {n: s.expand(b, t, h, -1) if s.ndim == 4 else s for n, s in short.items()}
    got, reached = evaluate(drawn.case.rule(**short), None, method)
    want, after = evaluate(drawn.case.rule(**in_float64(whole)), None, Recurrent())
    drawn.compare(got, want, "o")
    drawn.compare_states(reached, after)


@law(calls=600, drawn=drawn(), method=METHODS | st.just(Recurrent()))
def test_gradients_are_finite(drawn: Drawn, method: Method) -> None:
    streams = {n: s.requires_grad_() for n, s in drawn.streams().items()}
    o, state = evaluate(drawn.case.rule(**streams), None, method)
    real = [torch.view_as_real(s) if s.is_complex() else s for s in (o, *parts(state))]
    total = torch.stack([s.abs().sum() for s in real if s.is_floating_point()]).sum()
    assume(total.requires_grad)
    total.backward()
    for name, stream in streams.items():
        if stream.grad is not None:
            assert torch.isfinite(
                torch.view_as_real(stream.grad) if stream.is_complex() else stream.grad
            ).all(), name


@pytest.mark.usefixtures("unchecked")
@law(
    calls=500,
    drawn=drawn(decay="as drawn", scale=1.0),
    stream=st.integers(0, 9),
    axis=st.integers(0, 1),
    length=st.integers(2, 80),
    method=METHODS,
)
def test_lengths_that_do_not_fit_are_refused(
    drawn: Drawn, stream: int, axis: int, length: int, method: Method
) -> None:
    streams = drawn.streams()
    name = sorted(streams)[stream % len(streams)]
    wrong = streams[name]
    axis %= wrong.ndim
    sizes = list(wrong.shape)
    lengths = {s.shape[axis] for s in streams.values() if s.ndim == wrong.ndim}
    assume(length not in {1, *lengths} and 1 not in lengths and length % 2 and len(streams) > 1)
    sizes[axis] = length
    streams[name] = torch.ones(sizes, dtype=wrong.dtype)
    if (name == "v" and axis == 3) or (
        name in ("fq", "fk", "q", "k") and "log_decay" not in streams
    ):
        assume(axis != 3)
    with pytest.raises((ShapeError, ValueError, TypeError)):
        evaluate(drawn.case.rule(**streams), None, method)
