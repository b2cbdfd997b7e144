"""Any rule beside a window of softmax: rules × normalisers × windows × sinks × properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Generator, Tensor

from beside import RULES, SOME, beside_window
from cases import Case, Shape, cast, group_features
from cases import features as query_features
from checks import as_tensors, check, check_documents, check_gradients, check_padding, check_states
from fastweights.kernels import explain
from fastweights.methods import Auto, Chunkwise, Method, Parallel, Recurrent, evaluate
from fastweights.recurrence import (
    Bonus,
    Decay,
    Normalized,
    Recurrence,
    ShapeError,
    Softmax,
    Windowed,
    WindowedLinear,
)
from tolerances import assert_close

pytestmark = pytest.mark.sampled

SHAPE = Shape(t=9)
WINDOWS = ((0, 0), (1, 0), (5, 0), (0, 2), (3, 2))
"""Windows, and sinks beside them."""
SEVERAL = ("gla", "kda")
"""Rules with and without a normaliser of their own, which meet every window."""
METHODS: tuple[Method, ...] = (Recurrent(), Chunkwise(4), Parallel(), Auto())
MASK = torch.rand(2, 22, generator=Generator().manual_seed(3)) < 0.7
IDS = torch.tensor([[0] * 3 + [1] * 7 + [2] * 12, [0] * 22])
VIEWS: dict[str, Callable[[Recurrence], Recurrence]] = {
    "plain": lambda record: record,
    "padded": lambda record: record.keep(MASK[:, : len(record)]),
    "packed": lambda record: record.segments(IDS[:, : len(record)]),
    "both": lambda record: record.keep(MASK[:, : len(record)]).segments(IDS[:, : len(record)]),
}
EACH_TIME = ((0, 0), (3, 2))
each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            beside_window(name, *sizes),
            marks=() if name in SEVERAL or sizes in EACH_TIME else pytest.mark.slow,
        )
        for name, sizes in product(RULES, WINDOWS)
    ],
    ids=str,
)
some_cases = pytest.mark.parametrize("case", SOME, ids=str)
each_view = pytest.mark.parametrize("view", VIEWS)


@each_case
def test_agrees_with_the_literal_loops(case: Case) -> None:
    streams = case.streams(SHAPE)
    check(case, streams, None, torch.float64, *METHODS)
    if "sinks" not in case.name:
        check(case, streams, case.start(SHAPE), torch.float64, *METHODS)


@each_view
@some_cases
def test_methods_have_the_gradients_of_the_definition(case: Case, view: str) -> None:
    viewed = replace(case, rule=lambda **streams: VIEWS[view](case.rule(**streams)))
    check_gradients(
        viewed, case.streams(SHAPE), case.start(SHAPE), torch.float64, Chunkwise(4), Auto()
    )


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case, shape = beside_window(name, 1, 1), Shape(b=1, t=3, h=1, k=2, v=1)
    streams = case.streams(shape)

    def run(*leaves: Tensor) -> Tensor:
        return evaluate(case.rule(**dict(zip(streams, leaves, strict=True))), method=Auto())[0]

    assert torch.autograd.gradcheck(run, [s.requires_grad_() for s in streams.values()])


@some_cases
def test_any_cut_and_any_length(case: Case) -> None:
    record = case.rule(**case.streams(Shape(t=11)))
    for method in (Recurrent(), Chunkwise(4), Auto()):
        whole, final = evaluate(record, method=method)
        for cut in (0, 1, 6):
            left, between = evaluate(record[:cut], None, method)
            right, end = evaluate(record[cut:], between, Auto())
            assert_close(torch.cat([left, right], 1), whole, "o")
            check_states(end, final, torch.float64)


@pytest.mark.parametrize("name", ["gla", "kda"])
def test_blocks_of_queries_are_the_definition(name: str) -> None:
    case = beside_window(name, 3, 2)
    shape = Shape(b=1, t=70, h=2)
    record = case.rule(**case.streams(shape))
    long = torch.arange(70)[None]
    for one in (record, record.keep(long % 5 != 1).segments(long // 40)):
        want, final = evaluate(one, case.start(shape), Recurrent())
        got, end = evaluate(one, case.start(shape), Auto())
        assert_close(got, want, "o")
        check_states(end, final, torch.float64)


@some_cases
def test_padding_is_as_if_absent(case: Case) -> None:
    mask = MASK[:, :11].clone()
    mask[1] = torch.arange(11) >= 4
    check_padding(case, Shape(t=11), case.start(SHAPE), mask, states=True)


@some_cases
def test_packed_documents_do_not_see_each_other(case: Case) -> None:
    check_documents(case, None, states=False)


@each_view
@some_cases
def test_map_and_linear_system_are_the_rule(case: Case, view: str) -> None:
    streams = case.streams(SHAPE)
    values = streams["v"].repeat_interleave(2, 2)
    record = VIEWS[view](case.rule(**{**streams, "rv": values}))
    o, _ = evaluate(record, method=Recurrent())
    weights = record.attention_map()
    assert_close(torch.einsum("bhts,bshv->bthv", weights, values), o, "map @ v")
    system = record.ltv()
    assert_close(system.simulate(values)[0], o, "simulated output")
    assert_close(system.kernel(), weights, "kernel")
    pieces = system[3:7].heads([1])
    assert_close(pieces.A.dense(), system.A.dense()[:, 3:7, [1]], "a part of A")
    states = torch.randn(2, *system.B.shape[1:], 3, dtype=o.dtype)
    turned = (system.A.dense().mT @ states, system.A.apply_adjoint(states))
    assert_close(turned[1], turned[0], "adjoint")


@each_view
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_the_rule_without_decay_is_windowed_linear(window: int, shared: bool, view: str) -> None:
    streams, g = beside_window("linear", window).streams(SHAPE), Generator().manual_seed(1)
    q, k, v, mix = (streams[n] for n in ("q", "k", "v", "mix"))
    fq, fk = query_features(SHAPE, g), group_features(SHAPE, g)
    fused = WindowedLinear(q, k, v, fq, fk, mix, window, shared, 1.5)
    rule = Normalized(Decay(fq, *(s.repeat_interleave(2, 2) for s in (fk, v)), None))
    general = Windowed(rule, q, k, v, mix, window, shared, softcap=1.5)
    want, _ = evaluate(VIEWS[view](fused), method=Recurrent())
    assert_close(evaluate(VIEWS[view](general))[0], want, "o")
    assert_close(VIEWS[view](general).attention_map(), VIEWS[view](fused).attention_map(), "map")


@pytest.mark.parametrize("name", RULES)
def test_a_window_over_all_tokens_is_softmax(name: str) -> None:
    case = beside_window(name, 9)
    record = replace(case.rule(**case.streams(SHAPE)), softcap=None)
    want, _ = evaluate(Softmax(record.q, record.k, record.v))
    assert_close(evaluate(record)[0], want, "o")
    hidden = replace(record, window=3, sinks=6)
    assert_close(evaluate(hidden)[0], want, "o with sinks")


@some_cases
def test_what_is_kept_does_not_grow(case: Case) -> None:
    states = [evaluate(case.rule(**case.streams(Shape(t=t))))[1] for t in (12, 30)]
    sizes = [sum(s.numel() for s in state) for state in states]
    record = case.rule(**case.streams(Shape(b=1)))
    ages = record.window + record.sinks
    assert sizes == [2 * (record.state_size(12) + ages)] * 2
    assert record.state_size(1) <= record.state_size(100) == record.state_size(12)
    assert record.step_operations(100) < record.step_operations(0) + 10**4
    assert record.chunk_operations(100, 64) > record.inner.chunk_operations(100, 64) - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_rule_keeps_a_float32_state(dtype: torch.dtype) -> None:
    for case in (beside_window("gla", 3, 1), beside_window("kda", 3)):
        streams = {
            n: cast(s, torch.float32 if n == "log_decay" else dtype)
            for n, s in case.streams(SHAPE).items()
        }
        want, state = case.oracle(**{n: s.double().numpy() for n, s in streams.items()})
        o, final = evaluate(case.rule(**streams))
        assert o.dtype == dtype
        assert final[0].dtype == final[1].dtype == dtype
        assert final[-2].dtype == torch.float32
        assert_close(o, want, "o", dtype)
        check_states(final[-2], as_tensors(state)[-2], torch.float32)


def test_the_kernel_is_the_rules() -> None:
    case = beside_window("kda", 3)
    assert "window in blocks" in explain(case.rule(**case.streams(SHAPE))).splitlines()[0]


def test_what_cannot_stand_beside_a_window_is_refused() -> None:
    case = beside_window("gla", 3)
    record = case.rule(**case.streams(SHAPE))
    rule, one = record.inner.inner, record.mix
    for other, message in (
        (Softmax(record.q, record.k, record.v), "a matrix as its state"),
        (Bonus(rule.q, rule.k, rule.v, rule.log_decay, one), "with a bonus"),
        (replace(rule, skip=one), "with a skip"),
    ):
        with pytest.raises(TypeError, match=message):
            replace(record, inner=other)
    with pytest.raises(TypeError, match="normaliser to share"):
        replace(record, inner=rule, shared=True)
    with pytest.raises(ValueError, match="numbers of tokens"):
        replace(record, window=-1)
    with pytest.raises(ValueError, match="bound above 0"):
        replace(record, softcap=0.0)
    with pytest.raises(ShapeError, match="of width 5, the window of 1"):
        replace(record, v=record.v[..., :1])
    with pytest.raises(ShapeError, match="must divide"):
        replace(record, k=record.k[:, :, [0, 0, 0]], v=record.v[:, :, [0, 0, 0]])
    state = case.start(SHAPE)
    with pytest.raises(ShapeError, match="room for them"):
        evaluate(replace(record, sinks=4), state)
    with pytest.raises(ShapeError, match="the rule's state, age"):
        evaluate(record, state[:-1])
