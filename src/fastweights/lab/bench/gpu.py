"""Checks and benchmarks of everything on one GPU in a few minutes, the most important first.

1. Every recurrence's output and gradients in float32 against float64 on the CPU, and how often its
kernel makes the host wait for the device.

2. The same with bfloat16 streams; the state must stay float32.

3. Times in bfloat16 beside flash-linear-attention, SDPA and the roofline, with peak memory, largest
headroom first.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch

from fastweights.lab.bench.cases import CASES, RecurrenceCase
from fastweights.lab.bench.contenders import Case, Implementation, Inputs, Phase, Sizes, bind
from fastweights.lab.bench.ops import Errors, OpsPlan, errors_on, measure
from fastweights.lab.bench.report import Report
from fastweights.lab.bench.timing import Budget, Failure
from fastweights.methods import evaluate

ORDER = (
    "decay tied",
    "decay vector gentle",
    "decay scalar",
    "delta scalar",
    "mesa 30 steps",
    "scan real",
    "softmax",
    "delta vector",
    "decay none",
    "decay vector steep",
    "selective scan",
)
"""The cases that are timed, in this order; the others are only checked."""


@dataclass(frozen=True)
class GpuPlan:
    """The settings of the GPU benchmark, and its time limit in seconds."""

    seconds: float = 440.0
    check: Sizes = Sizes(2, 200, 4, 64, 64)
    check_channels: Sizes = Sizes(2, 200, 96, 1, 1)
    matrix: tuple[Sizes, ...] = (
        Sizes(8, 4096, 16, 128, 128),
        Sizes(1, 32768, 16, 128, 128),
        Sizes(8, 512, 4, 64, 64),
    )
    channels: tuple[Sizes, ...] = (Sizes(8, 4096, 2048, 1, 1),)
    budget: Budget = Budget(seconds=0.5, runs=20)

    @classmethod
    def tiny(cls) -> GpuPlan:
        """Return a plan of seconds instead of minutes, for any device."""
        return cls(
            seconds=60.0,
            check=Sizes(1, 9, 2, 4, 4),
            check_channels=Sizes(1, 9, 3, 1, 1),
            matrix=(Sizes(1, 16, 2, 4, 4),),
            channels=(Sizes(1, 16, 3, 1, 1),),
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
class _Job:
    name: str
    run: Callable[[], None]


def run_gpu(report: Report, plan: GpuPlan, device: torch.device) -> None:
    """Run the checks and timings in order of importance until the time is up.

    The last row names the groups for which no time was left.
    """
    end = time.monotonic() + plan.seconds
    jobs = list(_jobs(report, plan, device))
    for place, job in enumerate(jobs):
        if time.monotonic() > end:
            report.add("cut", [CutRow(tuple(left.name for left in jobs[place:]))])
            return
        try:
            job.run()
        except Exception as error:
            report.add(job.name, [FailureRow(Failure.of(error).reason)])


def _jobs(report: Report, plan: GpuPlan, device: torch.device) -> Iterator[_Job]:
    for dtype in (torch.float32, torch.bfloat16):
        for case in CASES:
            yield _check_job(report, plan, case, dtype, device)
    named = {case.name: case for case in CASES}
    longest = max(len(plan.matrix), len(plan.channels))
    for place in range(longest):
        for name in ORDER:
            sizes = named[name].sizes(plan.matrix, plan.channels)
            if place < len(sizes):
                yield _timing_job(report, plan, named[name], sizes[place], device)


def _check_job(
    report: Report, plan: GpuPlan, case: Case, dtype: torch.dtype, device: torch.device
) -> _Job:
    (sizes,) = case.sizes((plan.check,), (plan.check_channels,))
    group = f"check {case.name} {sizes} {dtype}"

    def run() -> None:
        if not report.has(group):
            report.add(group, check_kernels(case, sizes, dtype, device))

    return _Job(group, run)


def _timing_job(
    report: Report, plan: GpuPlan, case: Case, sizes: Sizes, device: torch.device
) -> _Job:
    memory = 60.0 if device.type == "cuda" else 0.0
    timing = OpsPlan(dtype=torch.bfloat16, budget=plan.budget, error_tokens=0, memory_limit=memory)
    return _Job(f"time {case.name} {sizes}", lambda: measure(report, timing, case, sizes, device))


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
    return sum("synchronizing" in str(w.message) for w in caught)


def _state_dtype(case: Case, inputs: Inputs) -> str:
    if not isinstance(case, RecurrenceCase):
        return ""
    with torch.no_grad():
        _, state = evaluate(case.record(inputs))
    numbers = [
        s.dtype for s in (state if isinstance(state, tuple) else (state,)) if s.dtype != torch.long
    ]
    return str(reduce(torch.promote_types, numbers)).removeprefix("torch.")
