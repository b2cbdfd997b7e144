"""Launches beside what a GPU can do: the time that none can stay below, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastweights.lab.bench.contenders import Phase
from fastweights.lab.bench.offline import Launch
from fastweights.lab.bench.problems import Problem, Program
from static.gpus import GPUS, Gpu
from static.work import CountedLaunch, Work

LIMITS = ("memory", "products", "special", "issue", "floor")
"""The times of a launch that are added up over those of a phase."""


@dataclass(frozen=True)
class LaunchRow:
    """One launch of a problem on a GPU.

    Attributes:
        blocks: on a multiprocessor at once
        waves: programs over the places that all multiprocessors have for them
        moved: bytes that are asked for, as if no cache held any
        touched: bytes of the sectors that are read or written, once each
        issued: instructions of all warps
        memory, products, special, issue: seconds that each takes at the GPU's rate
    """

    problem: str
    gpu: str
    phase: str
    kernel: str
    grid: tuple[int, ...]
    warps: int
    stages: int
    registers: int
    spills: int
    shared_memory: int
    blocks: int
    waves: float
    instructions: int
    mix: dict[str, int]
    moved: float
    touched: float
    flops: float
    specials: float
    issued: float
    memory: float
    products: float
    special: float
    issue: float
    floor: float


@dataclass(frozen=True)
class PhaseRow:
    """All launches of a problem's phase, beside the least that any implementation needs.

    Attributes:
        memory, products, special, issue: seconds that each takes at the GPU's rate in all launches
        compilation: seconds in which this machine compiled the kernels, one after another
    """

    problem: str
    gpu: str
    phase: str
    entry: str
    launches: int
    memory: float
    products: float
    special: float
    issue: float
    floor: float
    roofline: float
    compilation: float


def rows_of(
    problem: Problem, gpu_name: str, program: Program, work: Work
) -> list[LaunchRow | PhaseRow]:
    """The rows of the forward and the backward pass, in which the forward pass keeps what the
    backward pass needs; without a backward pass, of the forward pass alone.
    """
    gpu, found = GPUS[gpu_name], []
    compiled, counted = program.forward, work.forward
    phases = [("forward", compiled, counted), ("backward", program.backward, work.backward)]
    for phase, launches, counts in phases:
        rows = [
            _launch_row(problem, gpu_name, gpu, phase, launch, count)
            for launch, count in zip(launches, counts, strict=True)
        ]
        kernels = {id(launch.kernel): launch.kernel for launch in launches}.values()
        found += rows
        found.append(
            PhaseRow(
                str(problem),
                gpu_name,
                phase,
                program.kernel,
                len(rows),
                *(sum(getattr(row, name) for row in rows) for name in LIMITS),
                roofline(problem, phase, gpu),
                sum(kernel.seconds for kernel in kernels),
            )
        )
    return found


def roofline(problem: Problem, phase: str, gpu: Gpu) -> float:
    """Seconds in which the GPU moves each stream once, or makes the products, whichever is more."""
    inputs, sizes = problem.shapes(), problem.sizes
    output = sizes.tokens * (1 if problem.case.channels else sizes.v) * problem.dtype.itemsize
    forward, both = (problem.case.work(inputs, output, sizes, part) for part in Phase)
    flops, moved = forward.flops, forward.bytes
    if phase == "backward":
        flops, moved = both.flops - flops, both.bytes - moved
    return max(moved / gpu.bandwidth, flops / gpu.half_products)


def _launch_row(
    problem: Problem, gpu_name: str, gpu: Gpu, phase: str, launch: Launch, counted: CountedLaunch
) -> LaunchRow:
    if launch.kernel.name != counted.name:
        raise ValueError(f"{launch.kernel.name} was compiled where {counted.name} was counted")
    kernel, counts = launch.kernel, counted.counts
    programs = math.prod(launch.grid)
    # multiprocessors without a program add nothing to products, special functions and issue
    busy = min(1.0, programs / gpu.chip.multiprocessors)
    moved = counts.loaded + counts.stored
    memory = moved / gpu.bandwidth
    products = counts.half_products / gpu.half_products + counts.tf32_products / gpu.tf32_products
    products, special = products / busy, counts.special / gpu.special / busy
    issued = kernel.warps * kernel.code.issued(programs, counted.passed)
    issue = issued / gpu.issue / busy
    return LaunchRow(
        problem=str(problem),
        gpu=gpu_name,
        phase=phase,
        kernel=kernel.name,
        grid=launch.grid,
        warps=kernel.warps,
        stages=kernel.stages,
        registers=kernel.registers,
        spills=kernel.spill_stores,
        shared_memory=kernel.shared_memory,
        blocks=kernel.blocks,
        waves=programs / (gpu.chip.multiprocessors * max(1, kernel.blocks)),
        instructions=kernel.instructions,
        mix=kernel.mix,
        moved=moved,
        touched=counts.touched,
        flops=counts.half_products + counts.tf32_products,
        specials=counts.special,
        issued=issued,
        memory=memory,
        products=products,
        special=special,
        issue=issue,
        floor=max(memory, products, special, issue),
    )
