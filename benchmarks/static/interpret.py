"""The work of a problem's launches, interpreted at a size that takes seconds and scaled to its own.

The process needs TRITON_INTERPRET=1 from its start.

Every program works on one head of one sequence, and as much per token as for any other. So one head
is interpreted at two lengths, whose difference is the work of the tokens between them, on a chip of
so many fewer multiprocessors that the kernels are configured as for the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels import table
from fastweights.kernels.triton.chips import Chip, pretend
from fastweights.kernels.triton.chunks import ChunkSizes
from fastweights.kernels.triton.launch import launch_with
from fastweights.lab.bench.cases import LayerCase
from fastweights.lab.bench.contenders import Inputs
from fastweights.lab.bench.problems import Problem
from static.counts import counting
from static.work import CountedLaunch, Counts, Work

LENGTHS = (512, 1024)
LAYER_LENGTHS = (128, 256)
DOUBLINGS = 4
CHANNELS = 128
CPU = torch.device("cpu")
PLAIN = (int, float, bool, str, type(None), ChunkSizes)
"""Arguments of kernels that hold no tensors."""


class _Note(NamedTuple):
    """What a launch is asked to do, where nothing runs; warps and stages change no work."""

    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, str], ...]


class _Small(NamedTuple):
    """A problem of one head, a chip for it, and of how many such the whole is made."""

    problem: Problem
    chip: Chip
    parts: int

    @classmethod
    def of(cls, problem: Problem, chip: Chip, length: int) -> _Small:
        sizes, heads = problem.sizes, _heads(problem)
        parts = sizes.b * sizes.h // heads
        small = problem._replace(sizes=sizes._replace(b=1, t=length, h=heads))
        few = max(1, round(chip.multiprocessors / parts))
        return cls(small, chip._replace(multiprocessors=few), parts)


def work_of(problem: Problem, chip: Chip) -> Work:
    """Raises ValueError where no short problem launches what the whole does."""
    smalls = _smalls(problem, chip)
    works = [_count(small) for small in smalls]
    if len(works) == 2:
        short, long = (small.problem.sizes.t for small in smalls)
        reach = (problem.sizes.t - short) / (long - short)
        phases = (
            [_extended(a, b, reach) for a, b in zip(less, more, strict=True)]
            for less, more in zip(*works, strict=True)
        )
        works = [Work(*phases)]
    return Work(*(list(_times(smalls[0].parts, launches)) for launches in works[0]))


def configuration(problem: Problem, chip: Chip) -> tuple[_Note, ...]:
    """All that decides how a problem's launches are interpreted: equal ones have equal work."""
    smalls = _smalls(problem, chip)
    return tuple(note for s in smalls for note in _dry_run(s.problem, s.chip))


def _heads(problem: Problem) -> int:
    """How many of a problem's heads, or channels, are interpreted: a layer's belong together."""
    if isinstance(problem.case, LayerCase):
        return problem.sizes.h
    return CHANNELS if problem.case.channels else 1


def _smalls(problem: Problem, chip: Chip) -> list[_Small]:
    """The problem at two lengths, the shortest at which it launches what it does as a whole; at
    its own alone if that is short.
    """
    wanted = [note.name for note in _dry_run(problem, chip)]
    lengths = LAYER_LENGTHS if isinstance(problem.case, LayerCase) else LENGTHS
    for doubling in range(DOUBLINGS):
        pair = [length << doubling for length in lengths]
        if problem.sizes.t <= pair[-1]:
            return [_Small.of(problem, chip, problem.sizes.t)]
        smalls = [_Small.of(problem, chip, length) for length in pair]
        if all([n.name for n in _dry_run(s.problem, s.chip)] == wanted for s in smalls):
            return smalls
    raise ValueError(f"{problem}: no short sequence launches {wanted}")


def _dry_run(problem: Problem, chip: Chip) -> list[_Note]:
    """What both passes of a problem launch on a chip, in order."""
    notes: list[_Note] = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: Any, options: dict[str, Any]) -> None:
        given = tuple(a for a in arguments if isinstance(a, PLAIN))
        kept = {n: str(v) for n, v in options.items() if n not in ("num_warps", "num_stages")}
        notes.append(_Note(kernel.fn.__name__, grid, given, tuple(sorted(kept.items()))))

    with pretend(chip), launch_with(note):
        o, leaves = _forward(problem, problem.shapes())
        torch.autograd.grad(o, leaves, torch.empty_like(o), allow_unused=True)
    return notes


def _count(small: _Small) -> Work:
    problem = small.problem
    inputs = problem.case.inputs(problem.sizes, problem.dtype, CPU)
    with _without_c(), pretend(small.chip), counting() as launches:
        o, leaves = _forward(problem, inputs)
        forward = len(launches)
        torch.autograd.grad(o, leaves, torch.randn_like(o), allow_unused=True)
    return Work(launches[:forward], launches[forward:])


def _forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """The output, and the inputs, whose gradients are wanted."""
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    return problem.case.implementations(leaves)[0].load()(leaves), list(leaves.values())


@contextmanager
def _without_c() -> Iterator[None]:
    """Inside the block no kernel in C reads the CPU's tensors before Triton's."""
    before = list(table.TABLE)
    try:
        table.TABLE[:] = [kernel for kernel in before if kernel.devices != ("cpu",)]
        table._CANDIDATES.clear()
        yield
    finally:
        table.TABLE[:] = before
        table._CANDIDATES.clear()


def _extended(less: CountedLaunch, more: CountedLaunch, reach: float) -> CountedLaunch:
    """On the line through both launches, `reach` times as far from the first as the second is."""
    counts = (a + reach * (b - a) for a, b in zip(less.counts, more.counts, strict=True))
    passed = {
        line: a + reach * (more.passed.get(line, 0) - a)
        for line in less.passed.keys() | more.passed.keys()
        for a in [less.passed.get(line, 0)]
    }
    return CountedLaunch(less.name, more.grid, Counts(*counts), passed)


def _times(parts: int, launches: list[CountedLaunch]) -> Iterator[CountedLaunch]:
    for launch in launches:
        passed = {line: parts * n for line, n in launch.passed.items()}
        yield launch._replace(counts=Counts(*(parts * n for n in launch.counts)), passed=passed)
