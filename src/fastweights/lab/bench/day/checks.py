"""The stage `correct`: what the machine is, kernels compiled ahead, and their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import product
from time import monotonic

import torch
from torch import Tensor

from fastweights.kernels.triton.chips import CHIPS
from fastweights.kernels.triton.launch import launch_with
from fastweights.lab.bench.contenders import Inputs, TensorFunction, dtype_name
from fastweights.lab.bench.day.jobs import RowGroup
from fastweights.lab.bench.day.plan import FAMILIES, DayPlan, draw
from fastweights.lab.bench.day.rows import MachineRow, RepeatRow, WarmRow
from fastweights.lab.bench.day.tools import COMPUTE_SANITIZER, NCU, find_tool
from fastweights.lab.bench.day.variants import AS_IS, VARIANTS
from fastweights.lab.bench.gpu import CheckRow, check_kernels
from fastweights.lab.bench.machine import Ceilings, versions
from fastweights.lab.bench.offline import Log, offline
from fastweights.lab.bench.problems import Problem, launch_all

WANTED = ("triton", "beartype", "xdist", "pytest_timeout", "fla", "einops", "peft")
"""What the stages use where it is there."""


def describe(plan: DayPlan) -> Iterator[MachineRow]:
    """Yield what the machine is."""
    device, capability = plan.place.type, ""
    if plan.place.type == "cuda":
        found = torch.cuda.get_device_properties(plan.place)
        device = f"{found.name}, {found.total_memory >> 30} GiB"
        capability = f"sm_{found.major}{found.minor}, {found.multi_processor_count} processors"
    missing = [name for name in WANTED if find_spec(name) is None]
    missing += [tool for tool in (COMPUTE_SANITIZER, NCU) if find_tool(tool) is None]
    yield MachineRow(device, capability, os.cpu_count() or 1, versions(), tuple(missing))


def measure_ceilings(plan: DayPlan) -> Iterator[Ceilings]:
    """Yield the rates of products and of a copy."""
    yield Ceilings.measure_now(plan.place, quick=plan.rehearses)


def warm(problem: Problem, plan: DayPlan, variant: str = AS_IS) -> Iterator[WarmRow]:
    """Compile all that the kernel table launches for a problem, from tensors without memory."""
    start = monotonic()
    with VARIANTS[variant](), _compiling(plan) as kernels:
        count = kernels(problem)
    yield WarmRow(
        problem.name, problem.sizes, dtype_name(problem.dtype), variant, count, monotonic() - start
    )


@contextmanager
def _compiling(plan: DayPlan) -> Iterator[Callable[[Problem], int]]:
    """How many kernels a problem compiles: those of Hopper where the CPU is in a GPU's place."""
    if plan.rehearses:
        with offline(CHIPS[90]) as log:
            yield lambda problem: len(launch_all(problem, log).kernels)
        return
    found: dict[int, object] = {}

    def compile_only(kernel, grid, arguments, options) -> None:
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        compiled._init_handles()
        found[id(compiled)] = compiled

    def count(problem: Problem) -> int:
        launch_all(problem, Log())
        return len(found)

    with launch_with(compile_only):
        yield count


def check(problem: Problem, plan: DayPlan) -> Iterator[CheckRow]:
    """Yield the errors of all our kernels on a case."""
    yield from check_kernels(problem.case, problem.sizes, problem.dtype, plan.place)


def repeat(problem: Problem, plan: DayPlan) -> Iterator[RepeatRow]:
    """Run forward and backward on memory full of NaN, and compare all runs bit by bit."""
    inputs = {n: x.requires_grad_() for n, x in draw(problem, plan.place).items()}
    run = problem.case.implementations(inputs)[0].load()
    upstream = torch.randn_like(run(inputs))
    with poisoned():
        first = _results(run, inputs, upstream)
        differs = {n for n, x in first.items() if not torch.isfinite(x).all()}
        for _ in range(plan.repeats - 1):
            again = _results(run, inputs, upstream)
            differs |= {n for n, x in first.items() if not torch.equal(x, again[n])}
    yield RepeatRow(
        problem.name, problem.sizes, dtype_name(problem.dtype), plan.repeats, tuple(sorted(differs))
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block torch fills memory that nothing has written yet with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyrefly: ignore[missing-attribute]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _results(run: TensorFunction, inputs: Inputs, upstream: Tensor) -> dict[str, Tensor]:
    o = run(inputs)
    found = torch.autograd.grad(o, list(inputs.values()), upstream, allow_unused=True)
    named = {f"d {name}": x for name, x in zip(inputs, found, strict=True) if x is not None}
    return {"o": o.detach(), **named}


def checked(family: str, plan: DayPlan) -> Iterator[RowGroup]:
    """Yield the checks of a family at the widths that are timed."""
    for name, dtype, shape in product(FAMILIES[family], plan.dtypes, ("plain", "segmented")):
        work = partial(check, plan.problem(name, getattr(plan, shape), dtype), plan)
        yield RowGroup(f"check {name} {shape} {dtype_name(dtype)}", work)
