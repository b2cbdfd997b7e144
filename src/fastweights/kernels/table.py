"""Which kernel evaluates a record: the first in the table that does not refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels import gemm
from fastweights.recurrence.base import Recurrence, State


@dataclass(frozen=True)
class Kernel:
    """One way to compute (o, final state).

    Attributes:
        refuses: why the kernel cannot take a record, or None if it can
        run: the computation, for what it does not refuse; it agrees with `Recurrence.chunk`,
            gradients included
    """

    name: str
    refuses: Callable[[Recurrence], str | None]
    compute: Callable[[Any, Any], tuple[Tensor, State]]


TABLE: list[Kernel] = []
_only: ContextVar[str | None] = ContextVar("only", default=None)


@torch.compiler.assume_constant_result
def _restriction() -> str | None:
    """The one kernel allowed here, or None for all; torch.compile, which cannot trace context,
    fixes it.
    """
    return _only.get()


def may_use(kernel: Kernel) -> bool:
    """Whether `Auto()` may take `kernel` here, where `only` may speak of another."""
    return _restriction() in (None, kernel.name)


def select(recurrence: Recurrence) -> Kernel:
    """The kernel that `Auto()` takes."""
    return _first(recurrence, _restriction())


def run_fastest(recurrence: Recurrence, state: State) -> tuple[Tensor, Any]:
    """(o, state) of a record that another kernel made: `only` speaks of the outer one."""
    return _first(recurrence, None).compute(recurrence, state)


def _first(recurrence: Recurrence, wanted: str | None) -> Kernel:
    for kernel in TABLE:
        if wanted in (None, kernel.name) and kernel.refuses(recurrence) is None:
            return kernel
    raise LookupError(f"no kernel takes this record:\n{explain(recurrence)}")


def explain(recurrence: Recurrence) -> str:
    """A line per kernel: taken, possible, or why it refused; and one on float32 products where
    torch makes them.
    """
    wanted, taken, lines = _restriction(), False, []
    for kernel in TABLE:
        reason = kernel.refuses(recurrence)
        if reason is None and wanted not in (None, kernel.name):
            reason = f"only {wanted!r} is allowed here"
        verdict = f"refused: {reason}" if reason else "possible" if taken else "taken"
        taken = taken or reason is None
        lines.append(f"{kernel.name}: {verdict}")
    if recurrence.device.type == "cpu" and recurrence.accumulator == torch.float32:
        lines.append(f"float32 matrix products of the torch kernels: {gemm.probe_gemm()}")
    return "\n".join(lines)


@contextmanager
def only(name: str) -> Iterator[None]:
    """Inside the block `Auto()` takes the kernel called `name` or none."""
    names = [kernel.name for kernel in TABLE]
    if name not in names:
        raise LookupError(f"no kernel is called {name!r}; there are {', '.join(names)}")
    token = _only.set(name)
    try:
        yield
    finally:
        _only.reset(token)
