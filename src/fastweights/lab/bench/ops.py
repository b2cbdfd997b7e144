"""Benchmarks of recurrences beside other libraries': time, error, memory and scaling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.lab.bench.cases import CASES, OURS
from fastweights.lab.bench.contenders import (
    Case,
    Implementation,
    Inputs,
    Phase,
    Sizes,
    TensorFunction,
    Work,
    bind,
    dtype_name,
    gradients,
    matching,
)
from fastweights.lab.bench.machine import Ceilings
from fastweights.lab.bench.memory import MemoryTask, peak_bytes
from fastweights.lab.bench.report import Report
from fastweights.lab.bench.timing import (
    Budget,
    Failure,
    TimedRow,
    Times,
    clock_of,
    time_in_turn,
    timed,
)

MATRIX_SIZES = (Sizes(1, 2048, 8, 64, 64), Sizes(1, 2048, 8, 128, 128), Sizes(4, 2048, 16, 64, 64))
CHANNEL_SIZES = (Sizes(1, 2048, 1024, 1, 1), Sizes(4, 2048, 1024, 1, 1))
QUICK_MATRIX_SIZES = (Sizes(1, 256, 2, 16, 16),)
QUICK_CHANNEL_SIZES = (Sizes(1, 256, 32, 1, 1),)
SCALING = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUICK_SCALING = (64, 128, 256)
NO_GRADIENTS = "it computes no gradients"
PATIENCE = 3.0
"""Seconds of a call after which a scaling goes no further: softmax takes four times as long for
each doubling.
"""


@dataclass(frozen=True)
class OpsPlan:
    """The settings of the benchmark of recurrences.

    Attributes:
        only: A shell pattern, or a part, of the cases' names.
        first: Whether only the first of a case's sizes is measured.
        error_tokens: Most tokens of the sequences on which errors are measured; 0 for no errors.
        memory_limit: Seconds after which a measurement of memory is given up; 0 for none.
    """

    quick: bool = False
    only: str = "*"
    first: bool = False
    dtype: torch.dtype = torch.float32
    budget: Budget = Budget()
    error_tokens: int = 512
    memory_limit: float = 120.0

    def cases(self) -> list[Case]:
        """Return the cases to measure.

        Raises:
            ValueError: If there are none.
        """
        found = matching(self.only, [case.name for case in CASES], "no case")
        return [case for case in CASES if case.name in found]

    def sizes(self, case: Case) -> Sequence[Sizes]:
        """Return the sizes to measure a case at."""
        quick, whole = (QUICK_MATRIX_SIZES, QUICK_CHANNEL_SIZES), (MATRIX_SIZES, CHANNEL_SIZES)
        return case.sizes(*(quick if self.quick else whole))[: 1 if self.first else None]


@dataclass(frozen=True, kw_only=True)
class OpRow(TimedRow):
    """The results of one implementation on one case, compared with the kernel that `Auto()` takes.

    Attributes:
        auto: Whether `Auto()` takes this kernel.
        gemm: The case's FLOPs / seconds / the machine's rate of matrix products, if it computes the
            case.
        bandwidth: The case's bytes / seconds / the machine's bandwidth, likewise.
        error: Relative error of o, ‖o - o₆₄‖ / ‖o₆₄‖, and the largest one of the gradients.
    """

    op: str
    sizes: Sizes
    dtype: str
    device: str
    phase: str
    contender: str
    library: str
    auto: bool
    gemm: float | None
    bandwidth: float | None
    error: float | None
    gradient_error: float | None
    peak_bytes: int | None


@dataclass(frozen=True)
class SlopeRow:
    """The slope d log time / d log T of the kernel that `Auto()` takes.

    It is over all lengths and over the upper half of them.

    Attributes:
        sizes: Sizes at the first length.
    """

    op: str
    sizes: Sizes
    phase: str
    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    slope: float
    upper_slope: float


@dataclass(frozen=True)
class Errors:
    """The relative errors of an implementation against float64.

    Attributes:
        output: Error of o; None where the implementation computes something else or raises.
        gradients: The largest error of the inputs' gradients; None likewise.
        reason: Why the errors are unknown; empty if they are known.
    """

    output: float | None = None
    gradients: float | None = None
    reason: str = ""


def run_ops(report: Report, plan: OpsPlan, device: torch.device) -> None:
    """Measure every case in every size, forward and with backward."""
    for case in plan.cases():
        for sizes in plan.sizes(case):
            measure(report, plan, case, sizes, device)


def measure(report: Report, plan: OpsPlan, case: Case, sizes: Sizes, device: torch.device) -> None:
    """Measure all contenders on one case and size: two groups of rows."""
    groups = {
        phase: f"{case.name} {sizes} {dtype_name(plan.dtype)} {phase.value}" for phase in Phase
    }
    if all(map(report.has, groups.values())):
        return
    inputs = case.inputs(sizes, plan.dtype, device)
    contenders = case.implementations(inputs)
    errors = {c.name: error_of(case, c, plan, sizes, device) for c in contenders}
    for phase, group in groups.items():
        if not report.has(group):
            times = time_implementations(contenders, inputs, phase, plan.budget, device)
            ceilings = Ceilings(**report.ceilings)
            made = _PhaseRows(case, sizes, plan, phase, inputs, errors, ceilings, device)
            report.add(group, list(made.of(contenders, times)))


def run_scaling(report: Report, plan: OpsPlan, device: torch.device) -> None:
    """Measure the time of our own kernels against the length, from 512 to 65,536 tokens."""
    for case in plan.cases():
        first = plan.sizes(case)[0]
        for phase in Phase:
            group = f"scaling {case.name} {phase.value}"
            if not report.has(group):
                report.add(group, [_slope(plan, case, first, phase, device)])


def time_implementations(
    contenders: Sequence[Implementation],
    inputs: Inputs,
    phase: Phase,
    budget: Budget,
    device: torch.device,
) -> dict[str, Times | Failure]:
    """Time all contenders in turn; one that cannot be loaded or raises gets a `Failure`."""
    functions, failed = {}, {}
    for contender in contenders:
        key = contender_key(contender)
        try:
            functions[key] = bind(contender.load(), inputs, phase)
        except Exception as error:
            failed[key] = Failure.of(error)
    return {**time_in_turn(functions, clock_of(device), budget), **failed}


def contender_key(contender: Implementation) -> str:
    return f"{contender.library}: {contender.name}"


def error_of(
    case: Case, contender: Implementation, plan: OpsPlan, sizes: Sizes, device: torch.device
) -> Errors:
    """Compare a contender on `device` with float64 on the CPU, on a short sequence."""
    if not (contender.exact and plan.error_tokens):
        return Errors()
    inputs = case.inputs(sizes._replace(t=min(sizes.t, plan.error_tokens)), plan.dtype, device)
    try:
        return errors_on(case, contender.load(), inputs)
    except Exception as error:
        return Errors(reason=f"error unknown: {Failure.of(error).reason}")


class Exact(NamedTuple):
    """A case's output and gradients in float64."""

    output: Tensor
    gradients: Inputs

    @classmethod
    def of(cls, case: Case, inputs: Inputs) -> Exact:
        """Compute them on the CPU, of these inputs."""
        exact = {n: x.detach().cpu().double().requires_grad_() for n, x in inputs.items()}
        return cls(*gradients(case.reference, exact))


def errors_on(
    case: Case, run: TensorFunction, inputs: Inputs, exact: Exact | None = None
) -> Errors:
    """Compare `run` with float64 on the CPU, on these inputs, for which `exact` may be known; what
    computes no gradients has the error of its output alone.
    """
    want, wanted = exact or Exact.of(case, inputs)
    with torch.no_grad():
        output = relative(run(inputs), want)
    try:
        _, found = gradients(run, {n: x.detach().requires_grad_() for n, x in inputs.items()})
    except LookupError:
        return Errors(output, reason=NO_GRADIENTS)
    return Errors(output, max(relative(found[n], wanted[n]) for n in inputs))


def relative(got: Tensor, want: Tensor) -> float:
    """Return ‖got - want‖ / ‖want‖, or ‖got‖ where want is zero.

    Raises:
        ValueError: If the shapes differ.
    """
    if got.shape != want.shape:
        raise ValueError(f"got shape {list(got.shape)}, not {list(want.shape)}")
    got = got.to(want.device, want.dtype)
    norm = want.norm().item()
    return (got - want).norm().item() / (norm or 1.0)


def _share(work: float, times: Times | None, rate: float) -> float | None:
    """The rate at which work was done, as a fraction of the machine's."""
    return work / times.median / rate if times and work else None


@dataclass(frozen=True)
class _PhaseRows:
    """The rows of one phase of a case."""

    case: Case
    sizes: Sizes
    plan: OpsPlan
    phase: Phase
    inputs: Inputs
    errors: dict[str, Errors]
    ceilings: Ceilings
    device: torch.device

    def of(
        self, contenders: Sequence[Implementation], times: dict[str, Times | Failure]
    ) -> Iterator[OpRow]:
        # the first kernel may take no gradients, and the next of ours then has this phase
        ours = [c for c in contenders if c.library == contenders[0].library]
        ran = (c for c in ours if isinstance(times[contender_key(c)], Times))
        taken = next(ran, contenders[0])
        first = times[contender_key(taken)]
        for contender in contenders:
            found = times[contender_key(contender)]
            yield self._row(contender, found, first, auto=contender is taken)

    def _row(
        self,
        contender: Implementation,
        found: Times | Failure,
        first: Times | Failure,
        *,
        auto: bool,
    ) -> OpRow:
        times = found if isinstance(found, Times) else None
        work = self._work() if contender.exact else Work(0.0, 0.0)
        errors = self.errors[contender.name]
        return OpRow(
            op=self.case.name,
            sizes=self.sizes,
            dtype=dtype_name(self.plan.dtype),
            device=self.device.type,
            phase=self.phase.value,
            contender=contender.name,
            library=contender.library,
            auto=auto,
            gemm=_share(work.flops, times, self.ceilings.gemm(self.plan.dtype)),
            bandwidth=_share(work.bytes, times, self.ceilings.bandwidth),
            error=errors.output,
            gradient_error=errors.gradients,
            peak_bytes=self._peak(contender) if times else None,
            **timed(found, first, "; ".join(filter(None, (contender.note, errors.reason)))),
        )

    def _work(self) -> Work:
        values = self.sizes.v if not self.case.channels else 1
        element = torch.finfo(self.plan.dtype).bits // 8
        return self.case.work(
            self.inputs, self.sizes.tokens * values * element, self.sizes, self.phase
        )

    def _peak(self, contender: Implementation) -> int | None:
        if not self.plan.memory_limit:
            return None
        threads = torch.get_num_threads()
        task = MemoryTask(
            self.case.name, contender.name, self.sizes, self.plan.dtype, self.phase, threads
        )
        return peak_bytes(task, self.plan.memory_limit)


def _slope(plan: OpsPlan, case: Case, sizes: Sizes, phase: Phase, device: torch.device) -> SlopeRow:
    found: dict[int, float] = {}
    for t in QUICK_SCALING if plan.quick else SCALING:
        if max(found.values(), default=0) < PATIENCE:
            found[t] = _length_time(plan, case, sizes._replace(t=t), phase, device)
    lengths, seconds = tuple(found), tuple(found.values())
    half = len(lengths) // 2
    return SlopeRow(
        case.name,
        sizes._replace(t=lengths[0]),
        phase.value,
        lengths,
        seconds,
        _log_slope(lengths, seconds),
        _log_slope(lengths[half:], seconds[half:]),
    )


def _length_time(
    plan: OpsPlan, case: Case, sizes: Sizes, phase: Phase, device: torch.device
) -> float:
    """Of a warm call: in the first, while the system clears the pages of long results, lengths
    would not compare.
    """
    inputs = case.inputs(sizes, plan.dtype, device)
    ours = case.implementations(inputs)[0]
    assert ours.library == OURS
    budget = replace(plan.budget, seconds=max(plan.budget.seconds, PATIENCE))
    found = time_implementations([ours], inputs, phase, budget, device)[contender_key(ours)]
    return found.median if isinstance(found, Times) else math.nan


def _log_slope(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Of the least-squares line."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (lengths, seconds))
    x = x - x.mean()
    return ((x * y).sum() / x.square().sum()).item()
