"""The implementations that benchmarks measure: functions of named input tensors, ours and
others'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatch
from typing import NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
TensorFunction = Callable[[Inputs], Tensor]
NARROW = ("q", "k", "v", "x", "weight")
"""Inputs that have the dtype of a benchmark; decays, gates and ridges are float32 at least."""


def matching(pattern: str, names: Sequence[str], what: str) -> list[str]:
    """Return the names that a shell pattern, or a part of them, means.

    Raises:
        ValueError: If there are none; `what` begins the message.
    """
    found = [name for name in names if fnmatch(name, pattern) or pattern in name]
    if not found:
        raise ValueError(f"{what} matches {pattern!r}; there are {', '.join(names)}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that rows have of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


class Phase(Enum):
    """The part of a function that is timed."""

    FORWARD = "forward"
    BOTH = "forward+backward"


class Sizes(NamedTuple):
    """The sizes of a problem: b batch · t time · h heads (or channels, for the scans) · k, v
    widths."""

    b: int
    t: int
    h: int
    k: int
    v: int

    def __str__(self) -> str:
        return f"b{self.b} t{self.t} h{self.h} k{self.k} v{self.v}"

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences and heads."""
        return self.b * self.t * self.h


@dataclass(frozen=True)
class Implementation:
    """One implementation of a benchmark case.

    Attributes:
        load: Imports what it needs (and may fail) and returns the function.
        library: "fastweights", or the library that it comes from.
        exact: Whether it computes the case's function, so that its error against float64 is
            meaningful.
        note: Remarks, such as what it computes instead.
    """

    name: str
    library: str
    load: Callable[[], TensorFunction]
    exact: bool = True
    note: str = ""


@dataclass(frozen=True)
class Work:
    """The least work of a case: FLOPs of its matrix products, and bytes of its streams and output,
    once each."""

    flops: float
    bytes: float


Draw = Callable[[Sizes, torch.Generator], Tensor]


class Case(ABC):
    """A benchmark case: something to compute from inputs, and the implementations that can.

    Attributes:
        draws: Functions that draw the inputs, by name.
        channels: Whether it works on single channels, rather than on heads of some width.
        state: Width of the state of such a channel.
    """

    name: str
    draws: Mapping[str, Draw]
    channels: bool
    state: int
    gpu_peers: tuple[Implementation, ...] = ()

    def inputs(
        self,
        sizes: Sizes,
        dtype: torch.dtype,
        device: torch.device,
        source: torch.Generator | None = None,
    ) -> Inputs:
        """Draw random inputs, the same for the same arguments; without a `source`, on the CPU."""
        generator, wide = (
            source or torch.Generator().manual_seed(0),
            torch.promote_types(dtype, torch.float32),
        )
        drawn = {name: draw(sizes, generator) for name, draw in self.draws.items()}
        return {name: x.to(device, dtype if name in NARROW else wide) for name, x in drawn.items()}

    @abstractmethod
    def implementations(self, inputs: Inputs) -> list[Implementation]:
        """Return the implementations that accept these inputs; the library's own choice comes
        first."""

    @abstractmethod
    def reference(self, inputs: Inputs) -> Tensor:
        """Compute the output as plainly and exactly as possible."""

    @abstractmethod
    def flops(self, sizes: Sizes, phase: Phase) -> float:
        """Return the FLOPs of the matrix products that the case needs."""

    def sizes(self, matrices: Sequence[Sizes], channels: Sequence[Sizes]) -> list[Sizes]:
        """Return `matrices`, or `channels` with the width of this case's state."""
        return [s._replace(k=self.state) for s in channels] if self.channels else list(matrices)

    def work(self, inputs: Inputs, output_bytes: int, sizes: Sizes, phase: Phase) -> Work:
        """Return the least work of a phase.

        Forward reads the inputs and writes o; backward reads them and do, and writes a gradient for
        each.
        """
        read = sum(x.nbytes for x in inputs.values())
        moved = read + output_bytes if phase is Phase.FORWARD else 3 * read + 2 * output_bytes
        return Work(self.flops(sizes, phase), float(moved))


def bind(run: TensorFunction, inputs: Inputs, phase: Phase) -> Callable[[], object]:
    """Return a call of `run` for one phase: without autograd, or with the gradients of all
    inputs."""
    if phase is Phase.FORWARD:
        return torch.no_grad()(lambda: run(inputs))
    return _ForwardBackward(run, {name: x.detach().requires_grad_() for name, x in inputs.items()})


class _ForwardBackward:
    """Forward and backward; the upstream gradient is drawn at the first call, the warm-up, only."""

    def __init__(self, run: TensorFunction, leaves: Inputs) -> None:
        self.run, self.leaves = run, leaves
        self.upstream: Tensor | None = None

    def __call__(self) -> object:
        o = self.run(self.leaves)
        if self.upstream is None:
            self.upstream = _upstream(o)
        return torch.autograd.grad(o, list(self.leaves.values()), self.upstream, allow_unused=True)


def gradients(run: TensorFunction, leaves: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and the gradient of every input for the same random upstream gradient."""
    o = run(leaves)
    found = torch.autograd.grad(o, list(leaves.values()), _upstream(o), allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return o.detach(), {name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs}


def _upstream(o: Tensor) -> Tensor:
    drawn = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    return drawn.to(device=o.device, dtype=o.dtype)
