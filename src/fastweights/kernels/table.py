"""Which kernel evaluates a record: the first of its rule that does not refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels import gemm
from fastweights.kernels.tracing import assume_constant_result
from fastweights.recurrence.base import Recurrence, State


def refuse_nothing(record: Any) -> None:
    """Of a kernel that takes every record of its rule."""


def refuse_complex(recurrence: Recurrence) -> str | None:
    """Of a kernel for real streams."""
    return "its streams are complex" if recurrence.accumulator.is_complex else None


@dataclass(frozen=True)
class Kernel:
    """One way to compute (o, final state) of the records of one rule.

    Attributes:
        name: by which `only` and `explain` know it
        rule: the type of the records that it is for; `Recurrence` for all
        compute: (o, final state) of a record and a state that it does not refuse; it agrees with
            `Recurrence.chunk`, gradients included
        refuses: why it cannot take a record of its rule, or None if it can
        devices: the device types whose streams it reads; none stands for all
    """

    name: str
    rule: type
    compute: Callable[[Any, Any], tuple[Tensor, Any]]
    refuses: Callable[[Any], str | None] = refuse_nothing
    devices: tuple[str, ...] = ()

    def reads(self, device: str) -> bool:
        """Whether it reads streams on this type of device."""
        return not self.devices or device in self.devices


TABLE: list[Kernel] = []
"""All kernels; of those that are for a record, the first that does not refuse it is taken."""

_CANDIDATES: dict[tuple[type, str], tuple[Kernel, ...]] = {}
_only: ContextVar[str | None] = ContextVar("only", default=None)


def register(kernel: Kernel, before: str | None = None) -> None:
    """Let `Auto()` ask `kernel` for the records of its rule.

    Args:
        kernel: a name of its own, and the rule that it is for
        before: the name of the kernel that it is asked before; None: before all others

    Raises:
        ValueError: if another kernel has its name
        LookupError: if no kernel is called `before`
    """
    if any(other.name == kernel.name and other is not kernel for other in TABLE):
        raise ValueError(f"a kernel is already called {kernel.name!r}; choose another name")
    place = 0 if before is None else _position(before)
    if kernel not in TABLE:
        TABLE.insert(place, kernel)
        _CANDIDATES.clear()


def _position(name: str) -> int:
    names = [kernel.name for kernel in TABLE]
    if name not in names:
        raise LookupError(f"no kernel is called {name!r}; there are {', '.join(names)}")
    return names.index(name)


def candidates(record: Any) -> tuple[Kernel, ...]:
    """The kernels for this record's rule and device, in the order in which they are asked."""
    key = type(record), record.device.type
    found = _CANDIDATES.get(key)
    if found is None:
        rule, device = key
        found = tuple(k for k in TABLE if issubclass(rule, k.rule) and k.reads(device))
        _CANDIDATES[key] = found
    return found


def takers(record: Any) -> list[Kernel]:
    """The kernels that can evaluate this record, the one that `Auto()` prefers first."""
    return [kernel for kernel in candidates(record) if kernel.refuses(record) is None]


@assume_constant_result
def _restriction() -> str | None:
    """The one kernel allowed here, or None for all; torch.compile, which cannot trace context,
    fixes it.
    """
    return _only.get()


def may_use(kernel: Kernel) -> bool:
    """Whether `Auto()` may take `kernel` here, where `only` may speak of another."""
    return _restriction() in (None, kernel.name)


def select(record: Any) -> Kernel:
    """The kernel that `Auto()` takes."""
    return _first(record, _restriction())


def run_fastest(record: Any, state: State) -> tuple[Tensor, Any]:
    """(o, state) of a record that another kernel made: `only` speaks of the outer one."""
    return _first(record, None).compute(record, state)


def _first(record: Any, wanted: str | None) -> Kernel:
    for kernel in candidates(record):
        if wanted in (None, kernel.name) and kernel.refuses(record) is None:
            return kernel
    raise LookupError(f"no kernel takes this record:\n{explain(record)}")


def explain(recurrence: Recurrence) -> str:
    """A line per kernel for this rule: taken, possible, or why it refused; and one on float32
    products where torch makes them.
    """
    wanted, taken, lines = _restriction(), False, []
    for kernel in TABLE:
        if not isinstance(recurrence, kernel.rule):
            continue
        reason = _reason(kernel, recurrence, wanted)
        verdict = f"refused: {reason}" if reason else "possible" if taken else "taken"
        taken = taken or reason is None
        lines.append(f"{kernel.name}: {verdict}")
    if recurrence.device.type == "cpu" and recurrence.accumulator == torch.float32:
        lines.append(
            f"float32 matrix products of the torch kernels: {gemm.LIBRARIES[gemm.products_route()]}"
        )
    return "\n".join(lines)


def _reason(kernel: Kernel, record: Any, wanted: str | None) -> str | None:
    """Why `kernel` is not taken where `wanted` is the only one allowed; None if it may be."""
    if not kernel.reads(record.device.type):
        return f"its streams are on {record.device.type}, not {' or '.join(kernel.devices)}"
    reason = kernel.refuses(record)
    if reason is None and wanted not in (None, kernel.name):
        return f"only {wanted!r} is allowed here"
    return reason


@contextmanager
def only(name: str) -> Iterator[None]:
    """Inside the block `Auto()` takes the kernel called `name` or none."""
    _position(name)
    token = _only.set(name)
    try:
        yield
    finally:
        _only.reset(token)
