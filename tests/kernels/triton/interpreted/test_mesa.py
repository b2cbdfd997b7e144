"""Mesa in Triton's interpreter, G read by Triton's Decay as on a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.triton import mesa
from fastweights.kernels.triton.chips import CHIPS, pretend
from fastweights.kernels.triton.decay import TRITON_DECAY, expand_streams
from fastweights.kernels.triton.mesa import TRITON_MESA, MesaSettings, System
from fastweights.kernels.triton.steps import STEPS
from fastweights.methods import Chunkwise, Recurrent, evaluate
from fastweights.recurrence import (
    Cholesky,
    ConjugateGradient,
    Decay,
    Mesa,
    ShermanMorrison,
    UnrolledSolver,
    solver_statistics,
)
from poison import poisoned_memory
from triton_checks import TOLERANCE, Streams, check, relative

pytestmark = pytest.mark.sampled

EXACT = ConjugateGradient(60, 1e-7)
WIDE = ("beta", "log_decay", "ridge")
"""The streams that stay float32 where the others are of half precision."""


@pytest.fixture(autouse=True)
def _read_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(mesa, "run_fastest", TRITON_DECAY.compute)


def streams(
    t: int, k: int, v: int, b: int = 1, h: int = 2, *, decay: str = "scalar", ridge: str = "head"
) -> Streams:
    """In float64; some tokens write nothing. The ridge is one per `head`, `token` or as a
    `number`.
    """
    q, key = (F.normalize(torch.randn(b, t, h, k).double(), dim=-1) for _ in range(2))
    beta = torch.rand(b, t, h, 1).double()
    beta[:, 1::7] = 0.0
    gates = F.logsigmoid(torch.randn(b, t, h, 1).double() + 3)
    if decay == "resets":
        gates[:, 2::9] = -torch.inf
    shape = {"head": (h, k), "token": (b, t, h, k), "number": (h, 1)}[ridge]
    return {
        "q": q,
        "k": key,
        "v": torch.randn(b, t, h, v).double(),
        "beta": beta,
        "log_decay": None if decay == "none" else gates,
        "ridge": 0.5 + torch.rand(shape).double(),
    }


def build(given: Streams) -> Mesa:
    """Solved by conjugate gradients, and directly in float64."""
    assert given["q"] is not None
    solver = Cholesky() if given["q"].dtype == torch.float64 else EXACT
    return Mesa(**given, solver=solver)  # type: ignore[arg-type]


def narrow(given: Streams, dtype: torch.dtype, solver: ConjugateGradient) -> Mesa:
    kinds = {n: torch.float32 if n in WIDE else dtype for n in given}
    return Mesa(
        **{n: None if s is None else s.to(kinds[n]) for n, s in given.items()},  # type: ignore[arg-type]
        solver=solver,
    )


def widen(record: Mesa, dtype: torch.dtype) -> Mesa:
    return replace(record, **{n: s.to(dtype) for n, s in record.streams.items()})


def positive(root: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """H before the first token is symmetric and positive."""
    return root @ root.mT / root.shape[-1], memory


def solve(record: Mesa, gram: Tensor, steps: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x in float32, H after the last token)."""
    parts = expand_streams(record, "k", "beta", "log_decay")
    system = System(gram, *parts, mesa.expand_ridge(record))  # type: ignore[arg-type]
    assert isinstance(record.solver, ConjugateGradient)
    with poisoned_memory():
        x = torch.empty(record.q.shape)
        last = mesa.solve(MesaSettings.of(record.solver), record.q, system, x, steps)
    return x, last


@pytest.mark.parametrize(
    ("t", "k", "v", "decay", "ridge"),
    [
        (40, 16, 24, "scalar", "head"),
        (70, 24, 16, "none", "number"),
        (40, 40, 16, "resets", "token"),
        (1, 16, 40, "scalar", "head"),
    ],
)
def test_results_and_gradients(t: int, k: int, v: int, decay: str, ridge: str) -> None:
    given = streams(t, k, v, h=1 if t > 100 else 2, decay=decay, ridge=ridge)
    check(TRITON_MESA, build, given, wide=WIDE, start=positive)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_and_gradients_of_half_precision(dtype: torch.dtype) -> None:
    check(TRITON_MESA, build, streams(40, 16, 24), dtype, wide=WIDE, start=positive)


@pytest.mark.slow
def test_streams_may_be_shared_and_lie_anyhow() -> None:
    given = streams(34, 16, 24, b=2, h=1)
    for name in ("q", "k", "v", "beta"):
        s = given[name]
        assert s is not None
        given[name] = s[:1].transpose(1, 3).contiguous().transpose(1, 3)
    check(TRITON_MESA, build, given, wide=WIDE, start=positive)


@pytest.mark.parametrize("tol", [None, 1e-2, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_takes_the_steps_that_the_definition_takes(
    dtype: torch.dtype, tol: float | None
) -> None:
    """The same iteration: after a few steps, not yet converged, x is the same."""
    record = narrow(streams(40, 24, 16, h=1), dtype, ConjugateGradient(6, tol))
    steps = torch.empty(1, 1, 40, dtype=torch.int32)
    x, _ = solve(record, torch.zeros(1, 1, 24, 24), steps)
    definition = widen(record, torch.float32)
    assert torch.equal(steps, solver_statistics(definition).steps.transpose(1, 2).int())
    assert relative(x, definition.optimal_queries()) < 2e-5


@pytest.mark.parametrize(
    ("dtype", "spread", "limit"),
    [
        (torch.float32, 3.0, 3e-6),
        (torch.bfloat16, 0.3, 1e-3),
        (torch.float16, 0.3, 1e-3),
    ],
)
def test_residuals_fall_below_the_precision_of_the_streams(
    dtype: torch.dtype, spread: float, limit: float
) -> None:
    """Also where all keys resemble each other and H + Λ is ill-conditioned: about 150 : 1/4."""
    given = streams(150, 32, 16, h=1, decay="none")
    keys = torch.randn(32) + spread * torch.randn(1, 150, 1, 32)
    given |= {"k": F.normalize(keys, dim=-1), "beta": torch.ones(1, 150, 1, 1)}
    record = narrow(
        {**given, "ridge": torch.full((1, 32), 0.25)}, dtype, ConjugateGradient(60, 1e-6)
    )
    x, _ = solve(record, torch.zeros(1, 1, 32, 32))
    first = 0
    for operator, q in widen(record, torch.float64).iterate_systems():
        rows = slice(first, first := first + q.shape[1])
        left = q - operator.apply(x[:, rows, 0].double())
        assert (left.norm(dim=-1) <= limit * q.norm(dim=-1)).all()


@pytest.mark.slow
def test_few_long_sequences_are_cut_into_segments() -> None:
    record = narrow(streams(1100, 16, 16, h=1), torch.bfloat16, ConjugateGradient(2, None))
    start = torch.eye(16)[None, None]
    x, last = solve(record, start)
    definition = widen(record, torch.float64)
    gram = evaluate(
        Decay(definition.k, definition.k, definition.beta * definition.k, definition.log_decay),
        start.double(),
    )[1]
    assert relative(last, gram) < 1e-5
    assert relative(x[:, -40:], definition.optimal_queries(start.double())[:, -40:]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", ["none", "resets"])
def test_single_tokens(dtype: torch.dtype, decay: str) -> None:
    """By the kernel of one token, which is asked before those of chunks."""
    kernel = next(entry for entry in STEPS if entry.rule is Mesa)
    given = narrow(streams(4, 24, 40, decay=decay, ridge="token"), dtype, EXACT)
    root, memory = (torch.randn(s) for s in given.state_shapes)
    state = positive(root, memory)
    o, last = evaluate(
        replace(widen(given, torch.float64), solver=Cholesky()),
        tuple(s.double() for s in state),
        Recurrent(),
    )
    outputs = []
    for t in range(4):
        with poisoned_memory():
            assert kernel.refuses(given[t : t + 1]) is None
            one, state = kernel.compute(given[t : t + 1], state)
        outputs.append(one)
    assert outputs[0].dtype == dtype
    assert relative(torch.cat(outputs, 1), o) < TOLERANCE[dtype]
    for found, wanted in zip(state, last, strict=True):
        assert found.dtype == torch.float32
        assert relative(found, wanted) < TOLERANCE[torch.float32]


def test_no_step_is_the_start_and_zeros_solve_to_zeros() -> None:
    given = streams(40, 16, 16)
    assert given["q"] is not None
    given["q"][:, 5:9] = 0.0
    record = narrow(given, torch.float32, ConjugateGradient(0))
    for length in (1, 40):
        o, _ = TRITON_MESA.compute(record[:length], record.initial_state())
        wanted, _ = evaluate(record[:length], method=Chunkwise(32))
        assert relative(o, wanted) < 3e-6
    assert (o[:, 5:9] == 0).all()


@pytest.mark.slow
def test_compiled_results_and_gradients_are_those_of_eager_code() -> None:
    """In a process without the type checker, which torch.compile cannot trace."""
    script = Path(__file__).parent / "compiled_mesa.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_refused() -> None:
    record = narrow(streams(4, 16, 16), torch.float32, EXACT)
    for solver in (Cholesky(), ShermanMorrison(), UnrolledSolver(EXACT)):
        refusal = TRITON_MESA.refuses(replace(record, solver=solver))
        assert refusal == f"its solver is a {type(solver).__name__}"
    wide = narrow(streams(2, 129, 16), torch.bfloat16, EXACT)
    assert TRITON_MESA.refuses(wide) == "its keys are 129 wide, wider than 128"
    assert TRITON_MESA.refuses(widen(record, torch.float64)) is not None
    broad = narrow(streams(2, 128, 16), torch.float32, EXACT)
    assert TRITON_MESA.refuses(broad) is None
    with pretend(CHIPS[89]):
        assert "shared memory" in (TRITON_MESA.refuses(broad) or "")
        assert TRITON_MESA.refuses(widen(broad, torch.bfloat16)) is None
