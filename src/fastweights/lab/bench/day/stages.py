"""The three stages: which jobs, how many at a time, in which order."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, product, starmap
from pathlib import Path
from typing import Any

from fastweights.lab.bench.day.checks import checked, describe, measure_ceilings, repeat, warm
from fastweights.lab.bench.day.decisions import compare_variants, convert, time_token, train
from fastweights.lab.bench.day.findings import Findings
from fastweights.lab.bench.day.jobs import Job, RowGroup, Sitting, run_jobs
from fastweights.lab.bench.day.plan import (
    FAMILIES,
    GOALS,
    MODELS,
    SUITE,
    DayPlan,
    family_of,
)
from fastweights.lab.bench.day.rows import EndRow, MachineRow
from fastweights.lab.bench.day.suite import run_tests
from fastweights.lab.bench.day.times import residuals, time_problem, time_replays
from fastweights.lab.bench.day.tools import COMPUTE_SANITIZER, COUNTED, NCU, count, sanitize
from fastweights.lab.bench.day.tuning import SHARES, compile_peers
from fastweights.lab.bench.day.variants import OF
from fastweights.lab.bench.machine import commit
from fastweights.lab.bench.problems import Problem
from fastweights.lab.bench.report import Header, Report

MACHINE, LOG = "machine", "processes.log"


@dataclass(frozen=True)
class Together:
    """Jobs that run together, so many at once."""

    at_once: int
    jobs: tuple[Job, ...]


Stage = Callable[[DayPlan, Findings], Iterator[Together]]


def correct(plan: DayPlan, ledger: Findings) -> Iterator[Together]:
    """Compile everything, and check it."""
    yield _ceilings(plan)
    sizes = (plan.segmented, plan.plain)
    shapes = starmap(plan.problem, product(chain(*FAMILIES.values()), sizes, plan.dtypes))
    yield Together(plan.processes, _warm_jobs([*shapes, *plan.timed()], plan))
    without = [name for family in ledger.without for name in FAMILIES.get(family, ())]
    tests = partial(run_tests, plan, ledger.passed_tests(), without)
    yield Together(1, (Job.alone(SUITE, "tests", tests, share=4.5),))
    yield Together(6, tuple(Job(f, tuple(checked(f, plan))) for f in FAMILIES))
    repeated = [p for p in plan.timed() if family_of(p.name) != "softmax"]
    yield Together(3, tuple(_alone("repeat", repeat, p, plan) for p in repeated))
    if COMPUTE_SANITIZER not in ledger.missing():
        yield Together(8, tuple(_sanitized(plan)))


def _sanitized(plan: DayPlan) -> Iterator[Job]:
    for tool in ("memcheck", "racecheck"):
        for name in (*GOALS, *FAMILIES["windowed"], "scan real", "RMSNorm", "short convolution"):
            work = partial(sanitize, plan.problem(name, plan.tiny), tool, plan)
            yield Job.alone(family_of(name), f"{tool} {name}", work, share=1.5)


def times(plan: DayPlan, ledger: Findings) -> Iterator[Together]:
    """Time ours and others'."""
    yield _ceilings(plan)
    small = [plan.problem(name, plan.small) for name in GOALS]
    problems = plan.timed()
    goals, rest = problems[: len(GOALS)], problems[len(GOALS) :]
    long = [p for p in rest if p.sizes in (plan.metala, plan.long)]
    compiled = (*_tuned_peers(plan), *_warm_jobs([*problems, *small], plan))
    yield Together(plan.processes, compiled)
    time_one = partial(_alone, "time", time_problem, ceilings=ledger.ceilings())
    yield Together(1, tuple(time_one(p, plan) for p in goals))
    yield Together(1, (Job.alone("mesa", "mesa by steps", partial(residuals, plan), share=1.5),))
    yield Together(1, tuple(time_one(p, plan) for p in (*long, *small)))
    replay = partial(_alone, "replay", time_replays, ceilings=ledger.ceilings())
    yield Together(1, tuple(replay(p, plan) for p in small))
    yield Together(1, tuple(time_one(p, plan) for p in rest if p not in long))


def _tuned_peers(plan: DayPlan) -> Iterator[Job]:
    """Without a GPU there is nothing to tune for."""
    for name, shares in SHARES.items():
        for part in range(0 if plan.rehearses else shares):
            work = partial(compile_peers, name, part, plan)
            yield Job.alone(family_of(name), f"peers {name} {part}", work, share=2.0)


def decide(plan: DayPlan, ledger: Findings) -> Iterator[Together]:
    """Compare what was fixed beforehand, and run whole models."""
    yield _ceilings(plan)
    tried = {name: plan.problem(name, plan.main) for name in OF}
    compiled = (
        Job.alone(family_of(name), f"warm {name}, {variant}", partial(warm, problem, plan, variant))
        for name, problem in tried.items()
        for variant in OF[name]
    )
    yield Together(plan.processes, tuple(compiled))
    yield Together(
        1, tuple(_alone("variants of", compare_variants, p, plan) for p in tried.values())
    )
    if NCU not in ledger.missing():
        counted = (
            Job.alone(family_of(name), f"ncu {kernel}", partial(count, kernel, plan))
            for kernel, name in COUNTED.items()
        )
        yield Together(1, tuple(counted))
    token = partial(time_token, plan, ledger.ceilings())
    yield Together(1, (Job.alone(MODELS, "a token", token),))
    yield Together(1, (Job.alone(MODELS, "training", partial(train, plan), share=1.5),))
    yield Together(1, (Job.alone(MODELS, "linearizing", partial(convert, plan), share=3.0),))


STAGES: dict[str, Stage] = {stage.__name__: stage for stage in (correct, times, decide)}


def run_stage(stage: Stage, plan: DayPlan, out: Path, without: Collection[str] = ()) -> Findings:
    """Run a stage into `out`, or go on with it, until it is done or its time is up.

    What has failed before is tried again after all else.

    Raises:
        ValueError: If `out` holds results of another commit or machine.
    """
    name, end = stage.__name__, time.monotonic() + plan.seconds
    out.mkdir(parents=True, exist_ok=True)
    log = out / LOG
    device = _find_machine(plan, end, log)
    settings = {"device": plan.device, "main": list(plan.main)}
    header = Header(name, commit(), {"device": device.device}, {}, settings)
    report = Report.open(out / f"{name}.json", header, dict)
    ledger = Findings(report, frozenset(without))
    report.add(MACHINE, [device])
    failed, sitting = ledger.failed(), Sitting(ledger.post, end, plan.task_seconds, log)
    for wanted in (lambda group: group not in failed, lambda group: group in failed):
        for phase in stage(plan, ledger):
            jobs = [job for job in phase.jobs if job.family not in ledger.without]
            ledger.expect(task.group for job in jobs for task in job.tasks)
            run_jobs(_left(jobs, ledger, wanted), phase.at_once, sitting)
    return ledger


def _left(jobs: list[Job], ledger: Findings, wanted: Callable[[str], bool]) -> Iterator[Job]:
    """What of the jobs is still to be done."""
    done = ledger.done()
    for job in jobs:
        tasks = (t for t in job.tasks if wanted(t.group) and t.group not in done)
        yield replace(job, tasks=tuple(tasks))


def _find_machine(plan: DayPlan, end: float, log: Path) -> MachineRow:
    """Asked in a process of its own: this one never touches the GPU.

    Raises:
        ValueError: If there is none.
    """
    rows: list[object] = []
    sitting = Sitting(lambda _, row: rows.append(row), end, plan.task_seconds, log)
    run_jobs([Job.alone(MACHINE, MACHINE, partial(describe, plan))], 1, sitting)
    found = [row for row in rows if isinstance(row, MachineRow)]
    if not found:
        reason = next((row.reason for row in rows if isinstance(row, EndRow)), "no answer")
        raise ValueError(f"this needs an NVIDIA GPU, and torch cannot use one: {reason}")
    return found[0]


def _ceilings(plan: DayPlan) -> Together:
    return Together(1, (Job.alone("ceilings", "ceilings", partial(measure_ceilings, plan)),))


def _alone(
    verb: str, work: Callable[..., Any], problem: Problem, plan: DayPlan, **settings: Any
) -> Job:
    """A problem in a process of its own."""
    run = partial(work, problem, plan, **settings)
    return Job.alone(family_of(problem.name), f"{verb} {problem}", run)


def _warm_jobs(problems: Iterable[Problem], plan: DayPlan) -> tuple[Job, ...]:
    """One for every case and dtype: cases share few kernels."""
    unique = dict.fromkeys(problems)
    kinds = sorted(unique, key=lambda p: (p.name, str(p.dtype)))
    jobs = [
        Job(
            family_of(name),
            tuple(RowGroup(f"warm {p}", partial(warm, p, plan)) for p in group),
        )
        for (name, _), group in groupby(kinds, key=lambda p: (p.name, p.dtype))
    ]
    order = list(FAMILIES)
    return tuple(sorted(jobs, key=lambda job: order.index(job.family)))
