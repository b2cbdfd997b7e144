"""Every recurrence × every property."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from cases import CASES, LINEAR, MAPPED, METHODS, Case, Shape, Streams, cast, parts
from checks import (
    PACKED,
    as_tensors,
    check,
    check_documents,
    check_gradients,
    check_padding,
    check_states,
    gradients,
    oracle,
)
from fastweights.kernels import only, takers
from fastweights.methods import Auto, Chunkwise, Method, Parallel, Recurrent, evaluate
from fastweights.recurrence import (
    Amplified,
    Decay,
    Delta,
    LogLinear,
    NoFiniteFormError,
    Normalized,
    Preconditioned,
    Recurrence,
    Signed,
)
from kinds import one_of_each_rule
from tolerances import assert_close

pytestmark = pytest.mark.sampled

DTYPES = [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)]
KERNELS_DTYPES = [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_kind = pytest.mark.parametrize("case", one_of_each_rule(CASES), ids=str)
each_linear = pytest.mark.parametrize("case", LINEAR, ids=str)
REAL = [case for case in CASES if "complex" not in case.name]
each_real = pytest.mark.parametrize("case", one_of_each_rule(REAL), ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def scalar_skips(streams: Streams) -> Streams:
    """`streams` with one skip per head, without which there is no one map per head."""
    return {n: s[..., :1] if n == "skip" else s for n, s in streams.items()}


def with_values(record: Recurrence, v: Tensor) -> Recurrence:
    if isinstance(record, Normalized | Amplified | Signed | LogLinear):
        return replace(record, inner=with_values(record.inner, v))
    return replace(record, v=v)


def values_of(record: Recurrence) -> Tensor:
    return (
        values_of(record.inner)
        if isinstance(record, Normalized | Amplified | Signed | LogLinear)
        else record.v
    )


@each_dtype
@each_case
def test_agrees_with_the_oracle(case: Case, dtype: torch.dtype) -> None:
    check(case, case.streams(dtype=dtype), case.start(dtype=dtype), dtype, *METHODS)


@each_case
def test_agrees_with_the_oracle_from_the_empty_state(case: Case) -> None:
    check(case, case.streams(), None, torch.float64, *METHODS)


@each_dtype
@each_kind
def test_gradients_agree(case: Case, dtype: torch.dtype) -> None:
    check_gradients(case, case.streams(dtype=dtype), case.start(dtype=dtype), dtype, *METHODS)


@pytest.mark.parametrize("dtype", KERNELS_DTYPES, ids=str)
@each_kind
def test_every_kernel_agrees(case: Case, dtype: torch.dtype) -> None:
    shape = Shape(t=67)
    streams, state = case.streams(shape, dtype), case.start(shape, dtype)
    kernels = takers(case.rule(**streams))
    assert kernels
    for kernel in kernels:
        with only(kernel.name):
            check(case, streams, state, dtype, Auto())
    followed = {name: s.clone().requires_grad_() for name, s in streams.items()}
    for kernel in takers(case.rule(**followed)):
        with only(kernel.name):
            check_gradients(case, streams, state, dtype, Auto())


# that others have the gradients of Recurrent is tested above
@pytest.mark.parametrize(
    "method", [Recurrent(), pytest.param(Auto(), marks=pytest.mark.slow)], ids=str
)
@each_kind
def test_gradients_are_those_of_finite_differences(case: Case, method: Method) -> None:
    shape = Shape(b=1, t=3, h=1, k=2, v=2)
    streams, state = case.streams(shape), case.start(shape)
    finite = {name: s.clamp(min=-3) if not s.is_complex() else s for name, s in streams.items()}
    floats = [s for s in parts(state) if s.dtype != torch.long]
    rest = parts(state)[len(floats) :]

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(finite, leaves, strict=False))
        given = (*leaves[len(finite) :], *rest)
        o, final = evaluate(
            case.rule(**named), case.adjust(given if isinstance(state, tuple) else given[0]), method
        )
        return o, *(s for s in parts(case.plain(final)) if s.dtype != torch.long)

    leaves = [s.detach().clone().requires_grad_() for s in (*finite.values(), *floats)]
    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, rtol=1e-6)


@each_case
def test_any_cut_of_the_sequence(case: Case) -> None:
    shape = Shape(t=13)
    record, state = case.rule(**case.streams(shape)), case.start(shape)
    for method in (Recurrent(), Chunkwise(4), Auto()):
        whole, final = evaluate(record, state, method)
        for cut in (0, 1, 8, 13):
            left, between = evaluate(record[:cut], state, method)
            right, end = evaluate(record[cut:], between, method)
            assert_close(torch.cat([left, right], 1), whole, "o")
            check_states(case.plain(end), case.plain(final), torch.float64)


@pytest.mark.parametrize("t", [0, 1, 2, 31, 65, pytest.param(130, marks=pytest.mark.slow)])
@each_kind
def test_any_length(case: Case, t: int) -> None:
    shape = Shape(b=1, t=t, h=2)
    check(
        case,
        case.streams(shape),
        case.start(shape),
        torch.float64,
        Chunkwise(16),
        Parallel(),
        Auto(),
    )


@pytest.mark.parametrize(
    ("k", "v"),
    [(1, 4), (8, 1), *(pytest.param(*w, marks=pytest.mark.slow) for w in ((1, 1), (2, 7)))],
    ids=str,
)
@each_kind
def test_any_widths(case: Case, k: int, v: int) -> None:
    shape = Shape(b=1, t=11, k=k, v=v)
    streams, state = case.streams(shape), case.start(shape)
    check(case, streams, state, torch.float64, Recurrent(), Chunkwise(4), Auto())
    check_gradients(case, streams, state, torch.float64, Chunkwise(4), Auto())


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "time", "heads"])
@each_kind
def test_streams_of_length_one_broadcast(case: Case, axis: int) -> None:
    streams, state = case.streams(Shape(t=4)), case.start(Shape(t=4))
    narrow_ones = [
        n for n, s in streams.items() if s.dim() == 4 and not (n == "q" and case not in LINEAR)
    ]
    for name in narrow_ones:
        narrow = streams[name].narrow(axis, 0, 1)
        wide = narrow.expand(streams[name].shape)
        want = gradients(case, streams | {name: wide}, state, Auto())
        want[name] = want[name].sum(axis, keepdim=True)
        for method in (Recurrent(), Auto()):
            got = gradients(case, streams | {name: narrow}, state, method)
            for stream, gradient in got.items():
                assert_close(gradient, want[stream], f"gradient of {stream} with a narrow {name}")
        check(case, streams | {name: narrow}, state, torch.float64, Auto())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@each_real
def test_low_precision_streams_keep_a_float32_state(case: Case, dtype: torch.dtype) -> None:
    exact = ("log_decay", "ridge")
    streams = {
        n: cast(s, torch.float32 if n in exact else dtype) for n, s in case.streams().items()
    }
    state = case.start(dtype=torch.float32 if case in LINEAR else dtype)
    for method in METHODS:
        o, final = evaluate(case.rule(**streams), state, method)
        want, want_final = oracle(case, streams, state)
        assert o.dtype == dtype
        assert_close(o, want, f"o of {method}")
        if case in LINEAR:
            assert {s.dtype for s in parts(final)} <= {torch.float32, torch.long}
            # the rule has written along other keys than the record's, which it has rounded
            rounded = dtype if isinstance(case.rule(**streams), Preconditioned) else torch.float32
            check_states(case.plain(final), as_tensors(want_final), rounded)


@each_real
def test_output_has_the_dtype_of_queries_and_values(case: Case) -> None:
    streams = case.streams(dtype=torch.float32)
    for q, v, expected in (
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16,) * 3,
        (torch.float64,) * 3,
    ):
        k = {"k": streams["k"].to(q)} if "k" in streams else {}
        mixed = streams | k | {"q": streams["q"].to(q), "v": streams["v"].to(v)}
        for method in (Recurrent(), Chunkwise(4), Auto()):
            assert evaluate(case.rule(**mixed), method=method)[0].dtype == expected


@pytest.mark.parametrize("case", MAPPED, ids=str)
def test_map_is_the_impulse_response_and_gives_the_output(case: Case) -> None:
    record = case.rule(**scalar_skips(case.streams(Shape(t=13))))
    weights = record.attention_map()
    v = values_of(record)
    v = v.repeat_interleave(weights.shape[1] // v.shape[2], dim=2).to(weights.dtype)
    assert_close(
        torch.einsum("bhts,bshv->bthv", weights, v),
        evaluate(record, method=Recurrent())[0],
        "map @ v",
    )
    impulses = torch.eye(13, dtype=torch.float64)[None, :, None]
    response, _ = evaluate(with_values(record, impulses), method=Recurrent())
    assert_close(response.permute(0, 2, 1, 3), weights, "impulse response")


@each_linear
def test_linear_systems_are_the_rule(case: Case) -> None:
    streams = case.streams(Shape(t=13))
    record = case.rule(**streams)
    system, u = record.ltv(), streams["v"]
    o, final = evaluate(record, method=Recurrent())
    y, state = system.simulate(u)
    assert_close(y, o, "simulated output")
    widest = system.extend(system.A.width + 2)
    assert_close(widest.simulate(u)[0], o, "output of the extended system")
    assert widest.B.shape[-1] == system.A.width + 2
    memory = next(s for s in reversed(parts(final)) if s.dim() == 4)
    assert_close(state[:, :, : memory.shape[2]], memory[..., : u.shape[-1]], "simulated state")
    assert_close(system.dense(u.shape[-1]).simulate(u), o, "output in DSF's dimensions")


@each_linear
def test_kernel_of_the_linear_system_is_the_map(case: Case) -> None:
    record = case.rule(**scalar_skips(case.streams(Shape(t=13))))
    assert_close(record.ltv().kernel(), record.attention_map(), "kernel")


def test_eigenvalues_and_memory_horizon() -> None:
    alpha = torch.tensor([0.5, 1.0, 0.9], dtype=torch.float64).expand(1, 4, 1, 3)
    q = torch.ones(1, 4, 1, 3, dtype=torch.float64)
    k = torch.tensor([1.0, 0, 0], dtype=torch.float64).expand(1, 4, 1, 3)
    diagonal = Decay(q, k, q, alpha.log()).ltv()
    assert_close(diagonal.eigenvalues(), alpha, "eigenvalues")
    assert diagonal.memory_horizon()[0, 0, 0, 1] == torch.inf
    assert_close(diagonal.memory_horizon()[..., 2], -1 / alpha[..., 2].log(), "horizon")
    reflected = Delta(q, k, q, torch.full((1, 4, 1, 1), 1.5, dtype=torch.float64)).ltv()
    assert_close(
        reflected.eigenvalues()[0, 0, 0].real.sort().values, np.array([-0.5, 1, 1]), "eigenvalues"
    )


def test_systems_are_not_extended_downwards() -> None:
    with pytest.raises(ValueError, match="only upwards"):
        CASES[0].rule(**CASES[0].streams()).ltv().extend(2)


def test_softmax_has_no_finite_linear_form() -> None:
    case = next(c for c in CASES if c.name == "softmax")
    with pytest.raises(NoFiniteFormError, match="Lemma 1"):
        case.rule(**case.streams()).ltv()


def test_a_bonus_is_linear_across_a_reset() -> None:
    case = next(c for c in CASES if c.name == "bonus-scalar")
    record = case.rule(**case.streams()).segments((torch.arange(19) // 4)[None].expand(2, -1))
    assert_close(
        record.ltv().simulate(values_of(record))[0], evaluate(record, method=Recurrent())[0], "o"
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name.startswith("windowed")], ids=str
)
def test_a_window_is_a_shift_register(case: Case) -> None:
    record = case.rule(**case.streams(Shape(t=13)))
    padded = record.keep(torch.rand(2, 13, generator=Generator().manual_seed(3)) < 0.7)
    for one in (
        record,
        padded,
        padded.segments(torch.arange(13).div(6, rounding_mode="floor").expand(2, 13)),
    ):
        system, v = one.ltv(), one.v.repeat_interleave(2, dim=2)
        assert_close(
            system.simulate(v)[0], evaluate(one, method=Recurrent())[0], "simulated output"
        )
        assert_close(system.kernel(), one.attention_map(), "kernel")


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_window_keeps_no_more_than_it_can_still_see(window: int) -> None:
    case = next(c for c in CASES if c.name == "softmax")
    for method in (Recurrent(), Chunkwise(4), Auto()):
        _, (keys, values, age) = evaluate(
            replace(case.rule(**case.streams()), window=window), None, method
        )
        assert keys.shape[2] == values.shape[2] == age.shape[1] == window - 1


@each_kind
def test_padding_is_as_if_absent(case: Case) -> None:
    shape = Shape(b=4, t=11)
    streams, state = case.streams(shape), case.start(shape)
    mask = torch.rand(4, 11, generator=Generator().manual_seed(5)) < 0.6
    mask[1] = torch.arange(11) >= 4
    mask[2] = False
    padded = replace(case, rule=lambda **streams: case.rule(**streams).keep(mask))
    check_gradients(padded, streams, state, torch.float64, Chunkwise(4), Auto())
    check_padding(case, shape, state, mask, states=case in LINEAR)


@each_kind
def test_packed_documents_do_not_see_each_other(case: Case) -> None:
    shape = Shape(b=1, t=11)
    state = case.start(shape)
    packed = replace(case, rule=lambda **streams: case.rule(**streams).segments(PACKED))
    check_gradients(packed, case.streams(shape), state, torch.float64, Chunkwise(4), Auto())
    check_documents(case, state, states=case in LINEAR)
