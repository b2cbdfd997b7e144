"""What only the Mesa rule has: solvers that stop when they should, their statistics, and a compiled
kernel.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from extension import compiled, every_lesser_isa
from fastweights import kernels
from fastweights.analysis.capture import mesa_records
from fastweights.kernels.native import mesa
from fastweights.methods import Auto, Chunkwise, Recurrent, evaluate
from fastweights.mixers.mesa import mesa_layers, set_tolerance, use_solver
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.recurrence import (
    Cholesky,
    ConjugateGradient,
    Mesa,
    Recurrence,
    ShermanMorrison,
    Solver,
    UnrolledSolver,
    condition_numbers,
    solver_statistics,
)
from fastweights.recurrence.solvers import ChunkGram, TokenGram
from tolerances import assert_close, error

EXACT = ConjugateGradient(200, 1e-12)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def record(
    b: int, t: int, h: int, k: int, v: int, dtype: torch.dtype = torch.float64, gate: float = 2.0
) -> Mesa:
    q, key = (F.normalize(torch.randn(b, t, h, k, dtype=dtype), dim=-1) for _ in range(2))
    value, beta = torch.randn(b, t, h, v, dtype=dtype), torch.rand(b, t, h, 1, dtype=dtype)
    log_decay = F.logsigmoid(torch.randn(b, t, h, 1, dtype=dtype) + gate)
    return Mesa(q, key, value, beta, log_decay, 0.25 + torch.rand(h, k, dtype=dtype), EXACT)


def states(of: Recurrence) -> tuple[Tensor, ...]:
    """H symmetric and positive definite, G anything."""
    square, other, *_ = of.state_shapes
    root = torch.randn(square, dtype=of.accumulator)
    return root @ root.mT / square[-1], torch.randn(other, dtype=of.accumulator)


def results(of: Recurrence, state: tuple[Tensor, ...], **how: object) -> list[Tensor]:
    """o, the final state, and the gradients of all streams and the initial state."""
    leaves = {name: stream.detach().requires_grad_() for name, stream in of.streams.items()}
    start = tuple(s.detach().requires_grad_() for s in state)
    o, last = evaluate(replace(of, **leaves), start, **how)
    weights = torch.Generator().manual_seed(1)
    found = [o, *last]
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=weights, dtype=torch.float64)).sum()
        for x in found
    )
    gradients = torch.autograd.grad(loss, [*leaves.values(), *start])
    # H is read as a symmetric matrix: only the symmetric part of its gradient means anything
    return [*found, *gradients[:-2], gradients[-2] + gradients[-2].mT, gradients[-1]]


def single(of: Mesa) -> Mesa:
    return replace(of.map_streams(Tensor.float), solver=ConjugateGradient(60))


def assert_native_agrees(of: Mesa) -> None:
    """float32 in C against the definition in float64; with gradients, and without (which reads in C
    too).
    """
    state = states(of)
    narrow = tuple(s.float() for s in state)
    wanted = results(of, state, method=Recurrent())
    with kernels.only("mesa (compiled)"):
        got = results(single(of), narrow)
        with torch.no_grad():
            o, last = evaluate(single(of), narrow)
    for x, y in zip([*got, o, *last], [*wanted, *wanted[:3]], strict=True):
        assert x.isfinite().all()
        assert error(x, y, floor=1e-3) < 1e-4


@compiled
@pytest.mark.parametrize(
    ("t", "k", "v"), [(1, 16, 32), (1, 5, 3), (2, 16, 16), (5, 3, 7), (67, 33, 16), (40, 64, 70)]
)
def test_native_is_the_definition(t: int, k: int, v: int) -> None:
    assert_native_agrees(record(2, t, 3, k, v))


@compiled
@every_lesser_isa
def test_lesser_instruction_sets(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setattr(mesa, "CODE", f"fw_mesa_{isa}")
    for t in (1, 11):
        assert_native_agrees(record(1, t, 2, 20, 20))


@compiled
def test_threads_start_from_states_between_the_spans() -> None:
    given, threads = single(record(1, 600, 2, 32, 32, gate=6.0)), torch.get_num_threads()
    state = tuple(s.float() for s in states(given))
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            o, last = evaluate(given, state)
            found.append((o, *last))
    finally:
        torch.set_num_threads(threads)
    for alone, together in zip(*found, strict=True):
        assert torch.equal(alone, together)
    assert_close(found[0][0], evaluate(given, state, Chunkwise(64))[0], "o")


@compiled
def test_native_reads_any_strides_and_broadcasts() -> None:
    given = record(2, 9, 3, 5, 6)
    turned = {n: s.transpose(1, 3).contiguous().transpose(1, 3) for n, s in given.streams.items()}
    assert_native_agrees(replace(given, **turned))
    for axis, name in product((0, 1, 2), ("q", "k", "beta", "log_decay", "ridge")):
        stream = given.streams[name]
        assert_native_agrees(replace(given, **{name: stream.narrow(axis, 0, 1)}))


@pytest.mark.parametrize("solver", [EXACT, Cholesky(), ShermanMorrison()])
def test_a_ridge_of_one_number_is_a_multiple_of_the_identity(solver: Solver) -> None:
    given = replace(record(1, 20, 2, 16, 8, torch.float32), ridge=torch.rand(2, 1) + 0.5)
    written_out = given.ridge.expand(1, 1, 2, 16).contiguous()
    for method in (Auto(), Chunkwise(), Recurrent()):
        one = evaluate(replace(given, solver=solver), method=method)[0]
        every = evaluate(replace(given, solver=solver, ridge=written_out), method=method)[0]
        assert_close(one, every, "o")


@compiled
@pytest.mark.parametrize("tol", [1e-1, 1e-3, 1e-5])
def test_every_token_takes_the_steps_it_needs(tol: float) -> None:
    """The compiled kernel counts what the definition counts, and a converged token takes no further
    step.
    """
    given = replace(record(1, 50, 2, 16, 8, torch.float32), solver=ConjugateGradient(30, tol))
    empty = given.initial_state()
    _, _, taken = mesa.solve_and_count(given, empty)
    wanted = solver_statistics(given).steps.transpose(1, 2)
    assert (taken == wanted).float().mean() > 0.97
    assert len(wanted.unique()) > 1


def test_a_tolerance_holds_for_every_token() -> None:
    given = replace(record(2, 70, 3, 16, 8), solver=ConjugateGradient(100, 1e-6))
    steps, residual = solver_statistics(given)
    assert steps.shape == residual.shape == (2, 70, 3)
    assert residual.max() < 1e-6
    assert steps.min() < steps.max() < 100
    for tol in (1e-2, 1e-4):
        fewer, rest = solver_statistics(replace(given, solver=ConjugateGradient(100, tol)))
        assert (fewer <= steps).all()
        assert rest.max() < tol


def test_statistics_go_on_from_a_state() -> None:
    given = record(1, 40, 2, 8, 4)
    _, state = evaluate(given[:17])
    for whole, part in zip(
        solver_statistics(given), solver_statistics(given[17:], state), strict=True
    ):
        assert_close(part, whole[:, 17:], "statistics")
    assert_close(
        condition_numbers(given[17:], state), condition_numbers(given)[:, 17:], "condition"
    )


def test_condition_numbers_are_those_of_the_matrices() -> None:
    given = record(1, 5, 1, 4, 4)
    gram = torch.zeros(4, 4, dtype=torch.float64)
    for t in range(5):
        k = given.k[0, t, 0]
        gram = given.log_decay[0, t, 0].exp() * gram + given.beta[0, t, 0] * torch.outer(k, k)
        want = torch.linalg.cond(gram + given.ridge[0, 0, 0].diag())
        assert_close(condition_numbers(given)[0, t, 0], want, "condition number")


class Counted(ChunkGram):
    """Counts the rows that it multiplies."""

    rows = 0

    def apply(self, p: Tensor) -> Tensor:
        Counted.rows += p.shape[0] * p.shape[1]
        return super().apply(p)

    def take(self, tiles: Tensor) -> Counted:
        return Counted(**vars(super().take(tiles)))


def test_converged_tiles_are_no_longer_multiplied() -> None:
    given = record(8, 16, 1, 12, 4)
    easy = torch.tensor([0, 0, 0, 0, 0, 0, 3, 3], dtype=torch.float64)
    given = replace(given, k=given.k * easy[:, None, None, None])
    operator, q = next(given.iterate_systems(size=16))
    Counted.rows = 0
    with torch.no_grad():
        steps = ConjugateGradient(50, 1e-8).solve(Counted(**vars(operator)), q).steps
    longest = int(steps.max()) * q.shape[0] * q.shape[1]
    assert Counted.rows < 0.7 * longest


@pytest.mark.parametrize("gate", [None, 9.0, 1.0], ids=["no decay", "hardly any", "some"])
def test_recursive_least_squares_are_exact_or_noticed(gate: float | None) -> None:
    given = record(2, 60, 2, 6, 4, gate=gate or 0.0)
    given = replace(given, solver=Cholesky(), log_decay=given.log_decay if gate else None)
    want, final = evaluate(given)
    recursive = replace(given, solver=ShermanMorrison(1e-9, Cholesky()))
    with torch.no_grad():
        for method in (Recurrent(), Chunkwise(7), Auto()):
            o, state = evaluate(recursive, method=method)
            assert_close(o, want, f"o by {method}")
            assert_close(state[0], final[0], "H")
            inverse = state[2] @ (state[0] + torch.diag_embed(given.ridge[:, 0].expand(2, -1, -1)))
            assert_close(inverse, torch.eye(6, dtype=torch.float64).expand_as(inverse), "R (H + Λ)")


def test_recursive_least_squares_solve_nothing_without_decay() -> None:
    given = replace(
        record(1, 30, 2, 6, 4), log_decay=None, solver=ShermanMorrison(1e-8, _Refusing())
    )
    begun = replace(given, solver=ShermanMorrison(1e-8, Cholesky()))
    with torch.no_grad():
        _, state = evaluate(begun[:1], method=Recurrent())
        evaluate(given[1:], state, method=Recurrent())


class _Refusing(Cholesky):
    def solve(self, operator: object, b: Tensor) -> object:
        raise AssertionError("a system was solved anew")


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_unrolled_steps_have_the_gradients_of_finite_differences(steps: int) -> None:
    given = replace(record(1, 3, 1, 3, 2), solver=UnrolledSolver(ConjugateGradient(steps)))
    names = list(given.streams)

    def run(*leaves: Tensor) -> Tensor:
        return evaluate(replace(given, **dict(zip(names, leaves, strict=True))))[0]

    leaves = [s.clone().requires_grad_() for s in given.streams.values()]
    assert torch.autograd.gradcheck(run, leaves, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("steps", [0, 2])
def test_unrolled_steps_of_all_chunks_at_once_are_those_of_one_token_after_the_other(
    steps: int,
) -> None:
    given = replace(record(2, 300, 2, 5, 3), solver=UnrolledSolver(ConjugateGradient(steps)))
    state = states(given)
    with kernels.only("blocked mesa (torch)"):
        got = results(given, state)
    for x, y in zip(got, results(given, state, method=Recurrent()), strict=True):
        assert_close(x, y, "unrolled")


def test_unrolled_steps_end_where_all_tokens_have_converged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied = list[int]()

    def counted(gram: ChunkGram, p: Tensor, apply: Any = ChunkGram.apply) -> Tensor:
        applied.append(0)
        return apply(gram, p)

    monkeypatch.setattr(ChunkGram, "apply", counted)
    given = replace(record(2, 30, 2, 5, 3), solver=UnrolledSolver(ConjugateGradient(30, 1e-3)))
    state = states(given)
    few = results(given, state)
    taken = len(applied)
    monkeypatch.setattr(ConjugateGradient, "_looks", lambda solver, x: False)
    for x, y in zip(few, results(given, state), strict=True):
        assert torch.equal(x, y)
    assert 0 < 2 * taken < len(applied) - taken


@torch.no_grad()
def test_a_tolerance_needs_no_numbers_to_look_at() -> None:
    root, b = (torch.randn(3, 2, rows, 4, dtype=torch.float64) for rows in (4, 1))
    gram, ridge = root @ root.mT, torch.ones_like(b)

    def solve(*theta: Tensor) -> Tensor:
        return ConjugateGradient(30, 1e-6).solve(TokenGram(*theta[:2]), theta[2]).x

    each = torch.stack([solve(*one) for one in zip(gram, ridge, b, strict=True)])
    assert torch.equal(torch.func.vmap(solve)(gram, ridge, b), each)
    first = gram[0], ridge[0], b[0]
    assert solve(*(s.to("meta") for s in first)).shape == each[0].shape
    with FakeTensorMode() as mode:
        fake = solve(*(mode.from_tensor(s) for s in first))
    assert fake.shape == each[0].shape


def model(**arguments: object) -> FastWeightsForCausalLM:
    mixer = {"name": "mesa", "heads": 2, **arguments}
    return FastWeightsForCausalLM(
        FastWeightsConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, mixers=[mixer])
    )


def test_the_solver_of_a_model_is_chosen_from_outside() -> None:
    given, ids = model().eval(), torch.randint(16, (2, 20))
    with torch.no_grad():
        exact = given(ids).logits
        with use_solver(given, ConjugateGradient(0)):
            assert error(given(ids).logits, exact) > 1e-4
        assert torch.equal(given(ids).logits, exact)
        set_tolerance(given, 1e-5)
        assert_close(given(ids).logits, exact, "logits")
    assert [layer.solver for layer in mesa_layers(given)] == [ConjugateGradient(30, 1e-5)] * 2
    assert [solver_statistics(r).steps.shape for r in mesa_records(given, ids)] == [(2, 20, 2)] * 2


def test_a_model_without_mesa_layers_has_nothing_to_solve() -> None:
    config = FastWeightsConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, mixers=[{"name": "gla"}]
    )
    with pytest.raises(ValueError, match="no Mesa layer"):
        set_tolerance(FastWeightsForCausalLM(config), 1e-4)


def test_random_steps_are_drawn_in_training_only() -> None:
    given = model(random_steps=True, steps=8)
    ids = torch.randint(16, (1, 3))
    drawn = {record.solver for _ in range(40) for record in mesa_records(given, ids)}
    assert {
        solver.inner.max_steps for solver in drawn if isinstance(solver, UnrolledSolver)
    } == set(range(9))
    assert {record.solver for record in mesa_records(given.eval(), ids)} == {ConjugateGradient(8)}
