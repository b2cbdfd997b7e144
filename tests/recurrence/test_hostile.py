"""Values that break implementations: resets, vanishing and absent decay, repeated keys, zeros,
extreme scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from cases import CASES, DECAYING, Case, Shape, Streams, cast, each, multiplied, normal
from checks import check, check_gradients, gradients, oracle, weighted
from fastweights.methods import Auto, Chunkwise, Method, Recurrent, evaluate
from fastweights.recurrence import (
    Amplified,
    Cholesky,
    ConjugateGradient,
    Decay,
    Delta,
    Mesa,
    Normalized,
    Recurrence,
)
from kinds import one_of_each_rule
from tolerances import TOLERANCE, assert_close, error

pytestmark = pytest.mark.sampled

# what float64 gets wrong here, float32 does as well
DTYPES = [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def named(prefix: str) -> list[Case]:
    return [case for case in CASES if case.name.startswith(prefix)]


def everywhere(value: float) -> Callable[[Tensor], Tensor]:
    return lambda log_decay: torch.full_like(log_decay, value)


def at_token(index: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(log_decay: Tensor) -> Tensor:
        changed = log_decay.clone()
        changed[:, index] = value
        return changed

    return change


def in_channel(log_decay: Tensor) -> Tensor:
    changed = log_decay.clone()
    changed[..., 0] = -torch.inf
    return changed


DECAYS = {
    "all reset": everywhere(-torch.inf),
    "a channel resets": in_channel,
    "reset first": at_token(0, -torch.inf),
    "reset last": at_token(-1, -torch.inf),
    "all vanish": everywhere(-1e4),
    "one vanishes": at_token(5, -1e4),
    "hardly any": everywhere(-1e-8),
    "exactly none": everywhere(0.0),
    "steep": everywhere(-90.0),
}


@each_dtype
@pytest.mark.parametrize("change", DECAYS.values(), ids=DECAYS.keys())
@pytest.mark.parametrize("case", one_of_each_rule(DECAYING), ids=str)
def test_hostile_decays(case: Case, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    shape = Shape(b=1, t=9)
    streams, state = case.streams(shape, dtype), case.start(shape, dtype)
    streams["log_decay"] = change(streams["log_decay"])
    check(case, streams, state, dtype, Recurrent(), Chunkwise(4), Auto())
    check_gradients(case, streams, state, dtype, Chunkwise(4), Auto())


def zero(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def one(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def twice(x: Tensor) -> Tensor:
    return torch.full_like(x, 2)


def repeated(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x).clone()


KINDS = [case.values[0] for case in one_of_each_rule(CASES) if not case.marks]
VALUES = [
    *((case, {name: zero}) for case in KINDS for name in ("q", "k", "v") if name in case.draws),
    *((case, {"q": zero, "v": zero}) for case in KINDS),
    *((case, {"beta": value}) for case in named("delta") for value in (zero, one, twice)),
    *(
        (case, {"k": repeated, "beta": value})
        for case in named("delta")
        for value in (zero, one, twice)
    ),
    *((case, {"beta": value}) for case in named("mesa") for value in (zero, one)),
    *((case, {"k": repeated, "q": repeated, "beta": one}) for case in named("mesa")),
]


def described(value: object) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{name}={f.__name__}" for name, f in value.items())
    return str(value)


@each_dtype
@pytest.mark.parametrize(("case", "changes"), VALUES, ids=described)
def test_hostile_values(
    case: Case, changes: dict[str, Callable[[Tensor], Tensor]], dtype: torch.dtype
) -> None:
    shape = Shape(b=1, t=19, k=8)
    streams, state = case.streams(shape, dtype), case.start(shape, dtype)
    streams |= {name: change(streams[name]) for name, change in changes.items()}
    check(case, streams, state, dtype, Chunkwise(8), Auto())
    check_gradients(case, streams, state, dtype, Chunkwise(8), Auto())


def scaled(streams: Streams, factors: dict[str, float]) -> Streams:
    return {name: s * factors.get(name, 1.0) for name, s in streams.items()}


SCALES = [
    *(
        (case, {"q": f, "k": f})
        for case in named("decay") + named("normalized-none")
        for f in (1e6, 1e-6)
    ),
    *((case, {"v": f}) for case in KINDS for f in (1e6, 1e-6)),
    *((case, {"q": f}) for case in named("mesa") + named("delta") for f in (1e8, 1e-8)),
    *((case, {"k": 1e-6}) for case in named("mesa") + named("delta")),
    *((case, {"q": f, "k": f}) for case in named("softmax") for f in (1e-4, 1e3)),
]


@pytest.mark.parametrize(("case", "factors"), SCALES, ids=str)
def test_extreme_scales(case: Case, factors: dict[str, float]) -> None:
    shape = Shape(b=1, t=19)
    streams, state = scaled(case.streams(shape), factors), case.start(shape)
    want, _ = oracle(case, streams, state)
    expected = gradients(case, streams, state, Recurrent())
    noise = 1e-5 * max(1.0, *factors.values())
    for method in (Chunkwise(8), Auto()):
        assert_close(
            evaluate(case.rule(**streams), state, method)[0], want, f"o of {method}", floor=1e-30
        )
        for name, gradient in gradients(case, streams, state, method).items():
            assert_close(gradient, expected[name], f"gradient of {name} by {method}", floor=noise)
    single = {name: cast(s, torch.float32) for name, s in streams.items()}
    for gradient in gradients(case, single, case.start(shape, torch.float32), Auto()).values():
        assert torch.isfinite(gradient).all()


def falling(gain: Tensor) -> Tensor:
    return gain + torch.linspace(300, -300, gain.shape[1], dtype=gain.dtype)[:, None, None]


def jumping(gain: Tensor) -> Tensor:
    return (
        gain + 300 * torch.tensor([1, -1, 0, 1, 0, 0, -1, 1, -1], dtype=gain.dtype)[:, None, None]
    )


GAINS = {
    "huge": lambda gain: gain + 300,
    "tiny": lambda gain: gain - 300,
    "one huge": lambda gain: gain + at_token(4, 300.0)(zero(gain)),
    "falling": falling,
    "rising": lambda gain: falling(gain).flip(1),
    "jumping": jumping,
    "all weightless": everywhere(-torch.inf),
    "first weightless": at_token(0, -torch.inf),
    "last weightless": at_token(-1, -torch.inf),
}


def unstabilised(record: Amplified) -> Normalized:
    """The definition, e^w spelled out."""
    rule, gain = record.inner.inner, record.log_gain.exp()
    own = {
        name: getattr(rule, name) * gain
        for name in ("bonus", "skip")
        if getattr(rule, name, None) is not None
    }
    return Normalized(replace(rule, k=rule.k * gain, **own), record.inner.floor)


def output_gradients(
    record: Callable[[], Recurrence], leaves: Streams, method: Method
) -> dict[str, Tensor]:
    o, _ = evaluate(record(), None, method)
    return dict(
        zip(leaves, torch.autograd.grad(weighted(o, 0), list(leaves.values())), strict=True)
    )


@each_dtype
@pytest.mark.parametrize("change", GAINS.values(), ids=GAINS.keys())
@pytest.mark.parametrize("case", named("amplified"), ids=str)
def test_hostile_gains(case: Case, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    streams = case.streams(Shape(b=1, t=9), dtype)
    streams["log_gain"] = change(streams["log_gain"])
    check(case, streams, None, dtype, Recurrent(), Chunkwise(4), Auto())
    wide = {n: s.double().requires_grad_() for n, s in streams.items()}
    want = output_gradients(lambda: unstabilised(case.rule(**wide)), wide, Recurrent())
    leaves = {n: s.requires_grad_() for n, s in streams.items()}
    for method in (Recurrent(), Chunkwise(4), Auto()):
        for name, gradient in output_gradients(lambda: case.rule(**leaves), leaves, method).items():
            assert_close(gradient, want[name], f"gradient of {name} by {method}", dtype)


@each_dtype
@pytest.mark.parametrize("case", named("amplified"), ids=str)
def test_documents_of_very_different_gains_do_not_see_each_other(
    case: Case, dtype: torch.dtype
) -> None:
    streams = case.streams(Shape(b=1, t=9), dtype)
    streams["log_gain"][:, :5] += 300
    streams["log_gain"][:, 5:] -= 300
    ids = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]])
    wanted, _ = oracle(case, {name: s[:, 5:] for name, s in streams.items()})
    for method in (Recurrent(), Chunkwise(4), Auto()):
        o, _ = evaluate(case.rule(**streams).segments(ids), None, method)
        assert_close(o[:, 5:], wanted, f"o of {method}", floor=1e-30)


SHIFTS = [
    *((case, shift) for case in named("amplified") for shift in (1e4, -1e4)),
    *((case, 1e6) for case in named("amplified") if "floor" not in case.name),
]


@pytest.mark.parametrize(("case", "shift"), SHIFTS, ids=str)
def test_without_a_floor_only_ratios_of_gains_count(case: Case, shift: float) -> None:
    """At e^(10,000) no number holds a weight itself; a floor below it does not matter, one above it
    is all.
    """
    streams = case.streams() | {"log_gain": torch.randint(-4, 4, (2, 19, 2, 1)).double()}
    inner = case.rule(**streams).inner
    plain = evaluate(Amplified(Normalized(inner.inner), streams["log_gain"]))[0]
    for method in (Recurrent(), Chunkwise(4), Auto()):
        o, _ = evaluate(
            case.rule(**streams | {"log_gain": streams["log_gain"] + shift}), None, method
        )
        if inner.floor is None:
            assert_close(o, plain, "o")
        else:
            assert_close(o.abs(), plain.abs() * (shift > 0), "o, whose sign is that of its weight")


@each_dtype
def test_gains_keep_their_digits_over_long_sequences(dtype: torch.dtype) -> None:
    """Weights near e^500, whose logs float32 knows to 3e-5 only, under decays of 1e-6 to 3e-5 per
    token.
    """
    length, g = 30_000, Generator().manual_seed(0)
    log_decay = (-torch.rand(1, length, 1, 1, generator=g) * 3e-5 - 1e-6).to(dtype)
    gain = (500 + torch.rand(1, length, 1, 1, generator=g)).to(dtype)
    v, one = normal(1, length, 1, 1, generator=g).to(dtype) + 3, torch.ones(1, 1, 1, 1, dtype=dtype)
    weight = (gain.double() - 500 - log_decay.double().cumsum(1)).exp()
    want = (weight * v.double()).cumsum(1) / weight.cumsum(1)
    o, state = evaluate(Amplified(Normalized(Decay(one, one, v, log_decay)), gain))
    assert_close(o, want, "o")
    halves = evaluate(Amplified(Normalized(Decay(one, one, v, log_decay)), gain)[: length // 2])[1]
    parts_of_it = Amplified(Normalized(Decay(one, one, v, log_decay)), gain)[length // 2 :]
    for piece in (parts_of_it[i : i + 500] for i in range(0, length // 2, 500)):
        _, halves = evaluate(piece, halves)
    assert_close(
        multiplied(halves) / multiplied(state), np.ones((1, 1, 1, 2)), "state in many pieces", dtype
    )


SOLVED = {torch.float64: 1e-8, torch.float32: 2e-3}
"""The relative error that the gradient of a solved system may have."""


def dense_mesa(
    streams: Streams, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Mesa by torch.linalg.solve, token by token, under plain autograd."""
    (gram, memory), outputs = state, []
    q, k, v, beta, ridge = (streams[name] for name in ("q", "k", "v", "beta", "ridge"))
    alpha = streams["log_decay"].exp() if "log_decay" in streams else torch.ones_like(beta)
    ridge = ridge.expand(*q.shape)
    for t in range(q.shape[1]):
        gram = (
            alpha[:, t, :, :, None] * gram
            + beta[:, t, :, :, None] * k[:, t, :, :, None] * k[:, t, :, None]
        )
        memory = (
            alpha[:, t, :, :, None] * memory
            + beta[:, t, :, :, None] * k[:, t, :, :, None] * v[:, t, :, None]
        )
        x = torch.linalg.solve(gram + torch.diag_embed(ridge[:, t]), q[:, t])
        outputs.append((x[..., None, :] @ memory).squeeze(-2))
    return torch.stack(outputs, 1), (gram, memory)


def mesa_gradients(
    streams: Streams,
    state: tuple[Tensor, Tensor],
    run: Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]],
    scale: float = 1.0,
) -> dict[str, Tensor]:
    leaves = {
        n: s.detach().requires_grad_()
        for n, s in (streams | {"gram": state[0], "memory": state[1]}).items()
    }
    gram = (leaves["gram"] + leaves["gram"].mT) / 2
    o, final = run({n: leaves[n] for n in streams}, (gram, leaves["memory"]))
    weights = normal(*o.shape, generator=Generator().manual_seed(3)).to(o.dtype)
    loss = scale * ((o * weights).sum() + sum(s.sin().sum() for s in final))
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("repeat", [False, True], ids=["varied", "repeated"])
@pytest.mark.parametrize("method", [Recurrent(), Chunkwise(16), Auto()], ids=str)
@pytest.mark.parametrize("case", named("mesa"), ids=str)
def test_mesa_gradients_are_those_of_dense_solves(case: Case, method: Method, repeat: bool) -> None:
    shape = Shape(b=1, t=40, k=6)
    streams, state = case.streams(shape), case.start(shape)
    if repeat:
        streams |= {"k": repeated(streams["k"]), "beta": one(streams["beta"])}
    want = mesa_gradients(streams, state, dense_mesa)
    got = mesa_gradients(streams, state, lambda s, start: evaluate(case.rule(**s), start, method))
    for name, gradient in got.items():
        assert_close(gradient, want[name], f"gradient of {name}")


@each_dtype
@pytest.mark.parametrize("method", [Chunkwise(7), Auto()], ids=str)
@pytest.mark.parametrize("case", named("mesa"), ids=str)
def test_mesa_backward_at_any_scale_is_that_of_dense_solves(
    case: Case, method: Method, dtype: torch.dtype
) -> None:
    """Averaging the loss over many tokens makes upstream gradients small; no part of the backward
    may notice.
    """
    shape = Shape(b=1, t=37, k=6)
    streams, state = case.streams(shape), case.start(shape)
    want = mesa_gradients(streams, state, dense_mesa)
    narrow = {name: cast(s, dtype) for name, s in streams.items()}
    start = each(state, lambda s: cast(s, dtype))
    for scale in (1, 1e-3, 1e-6, 1e-9, 1e-20):
        got = mesa_gradients(
            narrow, start, lambda s, start: evaluate(case.rule(**s), start, method), scale
        )
        for name, gradient in got.items():
            found = error(gradient.double() / scale, want[name], floor=1e-3)
            assert found <= SOLVED[dtype], f"{name} at {scale}: {found:.1e}"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_conjugate_gradients_improve_with_every_step(steps: int) -> None:
    case = named("mesa-scalar")[0]
    streams, exact = case.streams(Shape(k=8)), None
    exact, _ = evaluate(Mesa(**streams, solver=Cholesky()))
    few, _ = evaluate(Mesa(**streams, solver=ConjugateGradient(steps)))
    more, _ = evaluate(Mesa(**streams, solver=ConjugateGradient(steps + 1)))
    assert error(more, exact) < error(few, exact)


def test_mesa_without_steps_reads_the_jacobi_start() -> None:
    streams = named("mesa-scalar")[0].streams(Shape(k=1))
    exact, _ = evaluate(Mesa(**streams, solver=Cholesky()))
    start, _ = evaluate(Mesa(**streams, solver=ConjugateGradient(0)))
    assert_close(start, exact, "o of width-1 keys, where the diagonal is all of H")


def test_a_tolerance_ends_conjugate_gradients_there() -> None:
    streams = named("mesa-scalar")[0].streams(Shape(k=8))
    exact, _ = evaluate(Mesa(**streams, solver=Cholesky()))
    errors = [
        error(evaluate(Mesa(**streams, solver=ConjugateGradient(30, tol)))[0], exact)
        for tol in (1e-2, 1e-6)
    ]
    assert 1e-9 < errors[1] < 1e-5 < errors[0] < 1e-1


def test_delta_forgets_what_it_overwrites() -> None:
    streams = Shape(b=1, t=9)
    case = named("delta-none")[0]
    drawn = case.streams(streams)
    drawn |= {"k": repeated(drawn["k"]), "beta": one(drawn["beta"])}
    drawn["q"] = drawn["k"]
    assert_close(evaluate(Delta(**drawn))[0], drawn["v"], "the value last written under the key")


def test_a_reset_leaves_nothing_behind() -> None:
    case = named("decay-vector")[0]
    streams = case.streams()
    streams["log_decay"][:, 10] = -torch.inf
    o, final = evaluate(case.rule(**streams), case.start())
    tail, end = evaluate(case.rule(**{name: s[:, 10:] for name, s in streams.items()}))
    assert error(o[:, 10:], tail) <= TOLERANCE[torch.float64]
    assert_close(final, end, "state")
    emptied = Decay(streams["q"], streams["k"] * 0, streams["v"], streams["log_decay"])
    assert (evaluate(emptied, each(case.start(), lambda s: 1e30 * s), Auto())[1] == 0).all()
    assert (evaluate(replace(emptied, log_decay=None), case.start())[1] == case.start()).all()
