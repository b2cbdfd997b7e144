"""Checks and benchmarks of everything on one GPU in a few minutes, the most important first.

1. Every recurrence's output and gradients in float32 against float64 on the CPU, by each of our
kernels, and how often it makes the host wait for the device.

2. The same with bfloat16 streams; the state must stay float32.

3. The problems of `fastweights.lab.bench.problems` timed beside flash-linear-attention, FlashQLA,
SDPA and the roofline, with peak memory.

4. A model's token beside the time in which its weights and state are read, and what first calls
cost.

The last rows say which goals are met.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from fastweights.lab.bench.cases import CASES, RecurrenceCase
from fastweights.lab.bench.contenders import Case, Implementation, Inputs, Phase, Sizes, bind
from fastweights.lab.bench.decode import DecodePlan, measure_model, preset_model, small_model
from fastweights.lab.bench.first_call import first_call
from fastweights.lab.bench.ops import Errors, OpsPlan, errors_on, measure
from fastweights.lab.bench.peers import FLA
from fastweights.lab.bench.problems import MAIN, PROBLEMS, SMALL, Problem
from fastweights.lab.bench.report import Report
from fastweights.lab.bench.timing import Budget, Failure
from fastweights.methods import evaluate
from fastweights.mixers import MIXERS
from fastweights.models import FastWeightsForCausalLM
from fastweights.recurrence.streams import state_parts

SOFTMAX = Problem("softmax", MAIN)
TIMES_FLA = {
    "decay tied": 3.5,
    "decay vector gentle": 2.5,
    "decay scalar": 1.8,
    "mesa 30 steps": 3.0,
    "delta scalar": 1.5,
}
"""How many times faster than flash-linear-attention, by case, at the sizes of `MAIN`."""

TIMES_FLA_SMALL = 2.0
"""The same at the sizes of `SMALL`, where launches take longer than their work."""

OF_COPY = {"scan real": 0.8}
"""Which part of the rate of a copy."""

OVER_FLOOR = 1.3
"""A model's token over the time in which its weights and state are read."""

TINY = Sizes(1, 16, 2, 4, 4)
TINY_CHANNELS = Sizes(1, 16, 3, 1, 1)


@dataclass(frozen=True)
class GpuPlan:
    """The settings of the GPU benchmark, and its time limit in seconds."""

    seconds: float = 440.0
    check: Sizes = Sizes(2, 200, 4, 64, 64)
    check_channels: Sizes = Sizes(2, 200, 96, 1, 1)
    problems: tuple[Problem, ...] = (*PROBLEMS, SOFTMAX)
    models: tuple[str, ...] = ("metala-360m",)
    first_calls: tuple[Problem, ...] = tuple(Problem(name, SMALL) for name in TIMES_FLA)
    budget: Budget = Budget(seconds=0.5, runs=20)

    @classmethod
    def tiny(cls) -> GpuPlan:
        """Return a plan of seconds instead of minutes, for any device."""
        return cls(
            seconds=60.0,
            check=Sizes(1, 9, 2, 4, 4),
            check_channels=Sizes(1, 9, 3, 1, 1),
            problems=tuple(map(_tiny, PROBLEMS)),
            models=("metala",),
            first_calls=(Problem("decay tied", TINY),),
            budget=Budget(0.001, 1),
        )


@dataclass(frozen=True)
class CheckRow:
    """The errors of one of our kernels on the device.

    Attributes:
        syncs: How often forward and backward made the host wait; None where that cannot be counted.
        state: Dtype of the state, apart from cached tokens.
    """

    op: str
    sizes: Sizes
    dtype: str
    device: str
    contender: str
    auto: bool
    error: float | None
    gradient_error: float | None
    syncs: int | None
    state: str
    note: str


@dataclass(frozen=True)
class CutRow:
    """The groups for which no time was left."""

    groups: tuple[str, ...]


@dataclass(frozen=True)
class FailureRow:
    """A group that could not be measured at all, and the reason."""

    reason: str


@dataclass(frozen=True)
class GoalRow:
    """A goal beside what was found.

    Attributes:
        what: The figure that the goal is about.
        met: Whether `found` is at least `wanted`, or for a model's token, at most.
    """

    op: str
    sizes: str
    phase: str
    what: str
    wanted: float
    found: float
    met: bool


@dataclass(frozen=True)
class _Job:
    name: str
    run: Callable[[], None]


def run_gpu(report: Report, plan: GpuPlan, device: torch.device) -> None:
    """Run the checks and timings in order of importance until the time is up.

    The last rows say which goals are met, and name the groups for which no time was left.
    """
    end = time.monotonic() + plan.seconds
    jobs = list(_jobs(report, plan, device))
    left = jobs
    while left and time.monotonic() <= end:
        job, *left = left
        try:
            job.run()
        except Exception as error:
            report.add(job.name, [FailureRow(Failure.of(error).reason)])
    if (goals := list(find_goals(report.rows))) and not report.has("goals"):
        report.add("goals", goals)
    if left:
        report.add("cut", [CutRow(tuple(job.name for job in left))])


def _jobs(report: Report, plan: GpuPlan, device: torch.device) -> Iterator[_Job]:
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES:
            yield _check_job(report, plan, case, dtype, device)
    for problem in plan.problems:
        yield _timing_job(report, plan, problem, device)
    for name in plan.models:
        yield _Job(f"model {name}", partial(_time_model, report, plan, name, device))
    for problem in plan.first_calls:
        yield _Job(f"first call {problem}", partial(_time_first_call, report, problem, device))


def _check_job(
    report: Report, plan: GpuPlan, case: Case, dtype: torch.dtype, device: torch.device
) -> _Job:
    (sizes,) = case.sizes((plan.check,), (plan.check_channels,))
    group = f"check {case.name} {sizes} {dtype}"

    def run() -> None:
        if not report.has(group):
            report.add(group, check_kernels(case, sizes, dtype, device))

    return _Job(group, run)


def _timing_job(report: Report, plan: GpuPlan, problem: Problem, device: torch.device) -> _Job:
    memory = 60.0 if device.type == "cuda" else 0.0
    timing = OpsPlan(dtype=problem.dtype, budget=plan.budget, error_tokens=0, memory_limit=memory)
    return _Job(
        f"time {problem}", lambda: measure(report, timing, problem.case, problem.sizes, device)
    )


def _time_model(report: Report, plan: GpuPlan, name: str, device: torch.device) -> None:
    def build() -> FastWeightsForCausalLM:
        small = name in MIXERS
        model = small_model(name, device, quick=True) if small else preset_model(name, device)
        return model.bfloat16()

    measure_model(report, DecodePlan(budget=plan.budget), name, build, (1,))


def _time_first_call(report: Report, problem: Problem, device: torch.device) -> None:
    group = f"first call {problem}"
    if not report.has(group):
        report.add(group, [first_call(problem, device)])


def find_goals(rows: list[dict[str, Any]]) -> Iterator[GoalRow]:
    """The goals that the rows of a report speak of."""
    timed = [row for row in rows if row["type"] == "OpRow" and row["seconds"]]
    peers = {_place(row): row["seconds"]["median"] for row in timed if row["library"] == FLA}
    for row in timed:
        if row["auto"]:
            times = peers.get(_place(row), 0.0) / row["seconds"]["median"]
            yield from _goals_of(row, times)
    for row in rows:
        if row["type"] == "StepRow" and row["over_floor"]:
            found, what = row["over_floor"], "time over that of reading weights and state"
            met = found <= OVER_FLOOR
            yield GoalRow(row["op"], row["sizes"], "token", what, OVER_FLOOR, found, met)


def _place(row: dict[str, Any]) -> tuple[str, Sizes, str]:
    return row["op"], Sizes(*row["sizes"]), row["phase"]


def _goals_of(row: dict[str, Any], times: float) -> Iterator[GoalRow]:
    """Those of the kernel that the table takes, `times` as fast as its peer (0 without one)."""
    op, sizes, phase = _place(row)
    wanted = {
        "times as fast as flash-linear-attention": (
            TIMES_FLA_SMALL if sizes == SMALL else TIMES_FLA.get(op),
            times,
        ),
        "of the rate of a copy": (OF_COPY.get(op), row["bandwidth"]),
    }
    for what, (goal, found) in wanted.items():
        if goal and found:
            yield GoalRow(op, str(sizes), phase, what, goal, found, found >= goal)


def _tiny(problem: Problem) -> Problem:
    sizes = TINY_CHANNELS._replace(k=problem.case.state) if problem.case.channels else TINY
    return problem._replace(sizes=sizes)


def check_kernels(
    case: Case, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> list[CheckRow]:
    """Check every kernel of ours that accepts the case, and return one row for each."""
    inputs = case.inputs(sizes, dtype, device)
    ours = [c for c in case.implementations(inputs) if c.library == "fastweights"]
    return [
        _check_kernel(case, c, sizes, inputs, dtype, auto=place == 0)
        for place, c in enumerate(ours)
    ]


def _check_kernel(
    case: Case,
    contender: Implementation,
    sizes: Sizes,
    inputs: Inputs,
    dtype: torch.dtype,
    *,
    auto: bool,
) -> CheckRow:
    errors, syncs, state = Errors(), None, ""
    try:
        errors = errors_on(case, contender.load(), inputs)
        syncs = host_waits(
            bind(contender.load(), inputs, Phase.BOTH), next(iter(inputs.values())).device
        )
        state = _state_dtype(case, inputs)
    except Exception as error:
        errors = Errors(reason=Failure.of(error).reason)
    return CheckRow(
        op=case.name,
        sizes=sizes,
        dtype=str(dtype).removeprefix("torch."),
        device=next(iter(inputs.values())).device.type,
        contender=contender.name,
        auto=auto,
        error=errors.output,
        gradient_error=errors.gradients,
        syncs=syncs,
        state=state,
        note=errors.reason,
    )


def host_waits(function: Callable[[], object], device: torch.device) -> int | None:
    """Count how often a second call makes the host wait for the device (CUDA only)."""
    if device.type != "cuda":
        return None
    function()
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    # not what torch says once: that this mode does not yet detect "all synchronizing operations"
    return sum("called a synchronizing CUDA operation" in str(w.message) for w in caught)


def _state_dtype(case: Case, inputs: Inputs) -> str:
    if not isinstance(case, RecurrenceCase):
        return ""
    with torch.no_grad():
        _, state = evaluate(case.record(inputs))
    numbers = [s.dtype for s in state_parts(state) if s.dtype != torch.long]
    return str(reduce(torch.promote_types, numbers)).removeprefix("torch.")
