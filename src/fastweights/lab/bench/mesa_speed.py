"""Benchmarks of Mesa's time: beside gated linear attention and a peer, by chunk size, and for one
token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fastweights.kernels import only, select
from fastweights.kernels.blocks import BlockPlan
from fastweights.kernels.mesa import CHUNK, BlockwiseSolve, solve_and_read
from fastweights.lab.bench import peers
from fastweights.lab.bench.cases import OURS, RecurrenceCase, mesa_case
from fastweights.lab.bench.contenders import Inputs, Phase, Sizes, TensorFunction, bind
from fastweights.lab.bench.memory import MemoryTask, peak_bytes
from fastweights.lab.bench.ops import load, relative
from fastweights.lab.bench.report import Report
from fastweights.lab.bench.timing import (
    Budget,
    Failure,
    Function,
    Times,
    clock_of,
    time_in_turn,
)
from fastweights.methods import Chunkwise, evaluate
from fastweights.recurrence import (
    Cholesky,
    ConjugateGradient,
    Decay,
    Mesa,
    ShermanMorrison,
    Solver,
    solver_statistics,
)
from fastweights.recurrence.solvers import Operator, SolverResult

STEPS = 30
GLA, PEER = "gated linear attention", "naive CG, 30 steps"
LENGTHS, QUICK_LENGTHS = (2048, 8192, 32768), (64, 128)
NAIVE_BACKWARD = 8192
"""The longest sequence of which the peer is asked for gradients: it keeps about 1 MB per token of 8
heads of 64.
"""
COUNTED = 512
CHUNKS = (16, 32, 64, 128)
GATES = (1.0, 0.999, 0.99, 0.9)
READ, DECODED = 256, 32
STOPPING = ConjugateGradient(STEPS, 1e-4)
DECODERS: dict[str, Solver] = {
    f"{STEPS} steps": ConjugateGradient(STEPS),
    "tol 1e-4": STOPPING,
    "Cholesky": Cholesky(),
    "Sherman-Morrison": ShermanMorrison(),
}


@dataclass(frozen=True)
class LengthRow:
    """The time of one contender at one length.

    Attributes:
        over_gla: Its time / that of `GLA` on the same streams, in the same run.
        steps: Steps of conjugate gradients per token, the mean over the first tokens.
        over_gla_per_step: The part of over_gla that one step costs, if reading and writing cost one
            `GLA`.
    """

    contender: str
    library: str
    phase: str
    length: int
    seconds: Times | None
    over_gla: float | None
    steps: float | None
    over_gla_per_step: float | None
    peak_bytes: int | None
    note: str


@dataclass(frozen=True)
class ChunkRow:
    """The time of the blocked torch kernel with chunks of some size, for `STEPS` steps.

    Attributes:
        over: Its time / that of `CHUNK`.
    """

    contender: str
    seconds: Times | None
    over: float | None
    note: str


@dataclass(frozen=True)
class DecodeRow:
    """The time of one token decoded after `READ` others.

    Attributes:
        gamma: The decay, the same for all tokens.
        over: Its time / that of conjugate gradients which stop at 1e-4.
        fallbacks: Fraction of heads and tokens that recursive least squares left to the fallback.
        error: Error of o against float64.
    """

    contender: str
    gamma: float
    seconds: Times | None
    over: float | None
    fallbacks: float | None
    error: float | None
    note: str


@dataclass(frozen=True)
class SpeedPlan:
    """The settings of the benchmark of Mesa's time.

    Attributes:
        parts: Which of `PARTS` are measured.
    """

    parts: tuple[str, ...]
    quick: bool = False
    budget: Budget = Budget()
    memory_limit: float = 120.0

    @property
    def sizes(self) -> Sizes:
        return Sizes(1, 64, 2, 8, 8) if self.quick else Sizes(1, LENGTHS[0], 8, 64, 64)

    @property
    def lengths(self) -> tuple[int, ...]:
        return QUICK_LENGTHS if self.quick else LENGTHS


def run_mesa_timing(report: Report, plan: SpeedPlan, device: torch.device) -> None:
    """Measure those parts of the plan that the report does not hold yet."""
    for part in plan.parts:
        for group, rows in PARTS[part](plan, device):
            if not report.has(group):
                report.add(group, rows())


Groups = Iterator[tuple[str, Callable[[], list[Any]]]]


# against length -----------------------------------------------------------------------------------
# ------------------


def _lengths(plan: SpeedPlan, device: torch.device) -> Groups:
    for length in plan.lengths:
        for phase in Phase:
            sizes = plan.sizes._replace(t=length)
            yield f"lengths {sizes} {phase.value}", partial(_at_length, plan, sizes, phase, device)


def _gla(x: Inputs) -> Tensor:
    return evaluate(Decay(x["q"], x["k"], x["beta"] * x["v"], x["log_decay"]))[0]


def _mesa(case: RecurrenceCase, kernel: str | None, x: Inputs) -> Tensor:
    if kernel is None:
        return evaluate(case.record(x))[0]
    with only(kernel):
        return evaluate(case.record(x))[0]


def _at_length(
    plan: SpeedPlan, sizes: Sizes, phase: Phase, device: torch.device
) -> list[LengthRow]:
    full, stopping = mesa_case(ConjugateGradient(STEPS)), mesa_case(STOPPING)
    inputs = full.inputs(sizes, torch.float32, device)
    runs: dict[str, TensorFunction] = {
        GLA: _gla,
        f"Mesa, {STEPS} steps": partial(_mesa, full, None),
        "Mesa, tol 1e-4": partial(_mesa, stopping, None),
        f"Mesa, {STEPS} steps, torch": partial(_mesa, full, "blocked mesa (torch)"),
    }
    failed: dict[str, Times | Failure] = {}
    too_long = phase is Phase.BOTH and sizes.t > NAIVE_BACKWARD
    peer = (
        Failure("not asked for: its memory grows by about 1 MB per token")
        if too_long
        else load(peers.MESA[0])
    )
    if isinstance(peer, Failure):
        failed[PEER] = peer
    else:
        runs[PEER] = peer
    found = time_in_turn(
        {n: bind(run, inputs, phase) for n, run in runs.items()}, clock_of(device), plan.budget
    )
    steps = {
        f"Mesa, {STEPS} steps": _steps(full, inputs),
        f"Mesa, {STEPS} steps, torch": _steps(full, inputs),
        "Mesa, tol 1e-4": _steps(stopping, inputs),
        PEER: float(STEPS),
    }
    peak = partial(_peak, plan, sizes, phase, full, inputs)
    return [
        _length_row(n, t, found[GLA], steps.get(n), peak(n), sizes, phase)
        for n, t in {**found, **failed}.items()
    ]


def _steps(case: RecurrenceCase, inputs: Inputs) -> float:
    record = cast(Mesa, case.record({n: x[:, :COUNTED] for n, x in inputs.items()}))
    return solver_statistics(record).steps.mean().item()


def _peak(
    plan: SpeedPlan,
    sizes: Sizes,
    phase: Phase,
    case: RecurrenceCase,
    inputs: Inputs,
    name: str,
) -> int | None:
    """Of those that `CASES` knows too."""
    known = {
        f"Mesa, {STEPS} steps": ("mesa 30 steps", select(case.record(inputs)).name),
        f"Mesa, {STEPS} steps, torch": ("mesa 30 steps", "blocked mesa (torch)"),
        PEER: ("mesa 30 steps", PEER),
        GLA: (
            "decay scalar",
            select(Decay(inputs["q"], inputs["k"], inputs["v"], inputs["log_decay"])).name,
        ),
    }
    too_long = name == PEER and phase is Phase.BOTH and sizes.t > NAIVE_BACKWARD
    if name not in known or plan.quick or too_long:
        return None
    task = MemoryTask(*known[name], sizes, torch.float32, phase, torch.get_num_threads())
    return peak_bytes(task, plan.memory_limit)


def _length_row(
    name: str,
    found: Times | Failure,
    gla: Times | Failure,
    steps: float | None,
    peak: int | None,
    sizes: Sizes,
    phase: Phase,
) -> LengthRow:
    library = peers.FLA if name == PEER else OURS
    if isinstance(found, Failure):
        return LengthRow(
            name, library, phase.value, sizes.t, None, None, steps, None, peak, found.reason
        )
    over = found.median / gla.median if isinstance(gla, Times) else None
    each = (over - 1) / steps if over and steps else None
    return LengthRow(name, library, phase.value, sizes.t, found, over, steps, each, peak, "")


# by chunk size ------------------------------------------------------------------------------------
# ------------------


def _chunks(plan: SpeedPlan, device: torch.device) -> Groups:
    for phase in Phase:
        yield f"chunks {plan.sizes} {phase.value}", partial(_by_chunk, plan, phase, device)


def _solve_in_chunks(case: RecurrenceCase, chunk: int, x: Inputs) -> Tensor:
    record = cast(Mesa, case.record(x))
    b, t, h = record.shape
    solve = BlockwiseSolve(record.solver, BlockPlan.of(chunk, b * h, t))
    return solve_and_read(solve, record, record.initial_state())[0]


def _by_chunk(plan: SpeedPlan, phase: Phase, device: torch.device) -> list[ChunkRow]:
    case = mesa_case(ConjugateGradient(STEPS))
    inputs = case.inputs(plan.sizes, torch.float32, device)
    functions = {
        chunk: bind(partial(_solve_in_chunks, case, chunk), inputs, phase) for chunk in CHUNKS
    }
    found = time_in_turn({str(n): f for n, f in functions.items()}, clock_of(device), plan.budget)
    own = found[str(CHUNK)]
    return [_chunk_row(f"chunks of {name}", times, own) for name, times in found.items()]


def _chunk_row(name: str, found: Times | Failure, own: Times | Failure) -> ChunkRow:
    if isinstance(found, Failure):
        return ChunkRow(name, None, None, found.reason)
    return ChunkRow(name, found, found.median / own.median if isinstance(own, Times) else None, "")


# one token ----------------------------------------------------------------------------------------
# ------------------


@dataclass(frozen=True)
class CountingSolver(Solver):
    """The solver `inner`, which counts the systems that it is given."""

    inner: Solver
    systems: list[int] = field(default_factory=list)

    def solve(self, operator: Operator, b: Tensor) -> SolverResult:
        self.systems.append(b[..., 0].numel())
        return self.inner.solve(operator, b)


def _decoding(plan: SpeedPlan, device: torch.device) -> Groups:
    for b in (1,) if plan.quick else (1, 32):
        for gamma in GATES[:: 3 if plan.quick else 1]:
            sizes = plan.sizes._replace(b=b, t=READ + DECODED)
            yield f"decode {sizes} γ {gamma:g}", partial(_decode_rows, plan, sizes, gamma, device)


@torch.no_grad()
def _decode_rows(
    plan: SpeedPlan, sizes: Sizes, gamma: float, device: torch.device
) -> list[DecodeRow]:
    inputs = mesa_case(STOPPING).inputs(sizes, torch.float32, device)
    inputs["log_decay"] = torch.full_like(inputs["log_decay"], gamma).log()
    records = {
        name: cast(Mesa, mesa_case(cast(Any, solver)).record(inputs))
        for name, solver in DECODERS.items()
    }
    functions = {name: _roll(record) for name, record in records.items()}
    found = time_in_turn(functions, clock_of(device), plan.budget)
    base = found["tol 1e-4"]
    return [_decode_row(name, gamma, found[name], base, record) for name, record in records.items()]


def _roll(record: Mesa) -> Function:
    """`DECODED` tokens, one after the other, after the others have been read."""
    _, start = evaluate(record[:READ], method=Chunkwise())
    tokens = [record[t : t + 1] for t in range(READ, len(record))]

    def run() -> Tensor:
        o, state = [], start
        for token in tokens:
            one, state = evaluate(token, state)
            o.append(one)
        return torch.cat(o, 1)

    return run


def _decode_row(
    name: str, gamma: float, found: Times | Failure, base: Times | Failure, record: Mesa
) -> DecodeRow:
    if isinstance(found, Failure):
        return DecodeRow(name, gamma, None, None, None, None, found.reason)
    count = len(record) - READ
    seconds = Times(found.median / count, found.low / count, found.high / count, found.runs)
    over = found.median / base.median if isinstance(base, Times) else None
    got = cast(Tensor, _roll(record)())
    return DecodeRow(
        name, gamma, seconds, over, _fallbacks(record), relative(got, _exactly(record)), ""
    )


def _fallbacks(record: Mesa) -> float | None:
    """The part of the systems of the decoded tokens that `ShermanMorrison` did not solve."""
    solver = record.solver
    if not isinstance(solver, ShermanMorrison):
        return None
    counted = CountingSolver(solver.fallback)
    roll = _roll(replace(record, solver=replace(solver, fallback=counted)))
    counted.systems.clear()
    roll()
    b, t, h = record.shape
    return sum(counted.systems) / (b * h * (t - READ))


def _exactly(record: Mesa) -> Tensor:
    double = replace(
        record, solver=Cholesky(), **{name: s.double() for name, s in record.streams.items()}
    )
    return evaluate(double, method=Chunkwise())[0][:, READ:]


PARTS: dict[str, Callable[[SpeedPlan, torch.device], Groups]] = {
    "lengths": _lengths,
    "chunks": _chunks,
    "decode": _decoding,
}
