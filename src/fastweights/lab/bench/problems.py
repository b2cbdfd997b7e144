"""The problems that kernels for GPUs are compiled, counted and timed at, and their compilation
without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastweights.kernels.triton.chips import Chip
from fastweights.lab.bench.cases import find_case
from fastweights.lab.bench.contenders import Case, Inputs, Sizes, dtype_name
from fastweights.lab.bench.offline import Compiled, Launch, Log, offline

META = torch.device("meta")

MAIN = Sizes(8, 4096, 16, 128, 128)
METALA = Sizes(8, 4096, 16, 64, 128)
LONG = Sizes(1, 32768, 16, 128, 128)
SMALL = Sizes(8, 512, 4, 64, 64)
CHANNELS = Sizes(8, 4096, 2048, 1, 1)


class Problem(NamedTuple):
    """One of the benchmarks' cases at one size, in one dtype (decays stay in float32)."""

    name: str
    sizes: Sizes
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.name} {self.sizes} {dtype_name(self.dtype)}"

    @property
    def case(self) -> Case:
        return find_case(self.name)

    def shapes(self) -> Inputs:
        """Its inputs on the meta device: without numbers."""
        with META:
            return self.case.inputs(self.sizes, self.dtype, META)


@dataclass(frozen=True)
class Program:
    """What the kernel table launches for a problem.

    Attributes:
        kernel: the name of the entry of the table that is taken where gradients are wanted
        inference: launches of the forward pass where no gradients are wanted
        forward: of the forward pass before a backward pass
        backward: of the backward pass
    """

    kernel: str
    inference: list[Launch]
    forward: list[Launch]
    backward: list[Launch]

    @property
    def kernels(self) -> list[Compiled]:
        """Every kernel, once."""
        launches = [*self.inference, *self.forward, *self.backward]
        return list({id(launch.kernel): launch.kernel for launch in launches}.values())


def compile_for(problem: Problem, chip: Chip) -> Program:
    """Compile all that the kernel table would launch for `problem` on `chip`."""
    with offline(chip) as log:
        return launch_all(problem, log)


def launch_all(problem: Problem, log: Log) -> Program:
    """Let the kernel table launch all phases of `problem`, inside of the `offline` that keeps
    `log`.
    """
    inputs, first = problem.shapes(), len(log.launches)
    with torch.no_grad():
        problem.case.implementations(inputs)[0].load()(inputs)
    inference = len(log.launches)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    contender = problem.case.implementations(leaves)[0]
    o = contender.load()(leaves)
    forward = len(log.launches)
    torch.autograd.grad(o, list(leaves.values()), torch.empty_like(o), allow_unused=True)
    return Program(
        contender.name,
        log.launches[first:inference],
        log.launches[inference:forward],
        log.launches[forward:],
    )


MATRICES = (
    "decay none",
    "decay scalar",
    "decay vector gentle",
    "decay vector steep",
    "decay tied",
    "normalized decay none",
    "delta none",
    "delta scalar",
    "delta vector",
    "mesa 30 steps",
    "mesa tol 1e-5",
    "windowed linear 64",
    "landmarks 64",
)
"""Cases on heads of some width."""

SCANS = ("scan real", "scan complex", "selective scan", "short convolution", "RMSNorm")
"""Cases on channels."""

SEVERAL_SHAPES = ("decay scalar", "decay tied", "delta scalar")
"""Those that are looked at in more than one shape."""


def _channels(name: str) -> Problem:
    problem = Problem(name, CHANNELS)
    return problem._replace(sizes=CHANNELS._replace(k=problem.case.state))


PROBLEMS: tuple[Problem, ...] = (
    *(Problem(name, MAIN) for name in MATRICES),
    Problem("decay tied", METALA),
    *map(_channels, SCANS),
    *(Problem(name, sizes) for sizes in (LONG, SMALL) for name in SEVERAL_SHAPES),
)
"""Every family of kernels at the sizes of the goals, the most important first."""
