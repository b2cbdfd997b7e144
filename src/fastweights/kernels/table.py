"""Which kernel evaluates a record: the first of its rule that does not refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels import gemm
from fastweights.kernels.rehearsal import assume_constant_result, rehearsed
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.derivatives import transform_here


def refuse_nothing(record: Any) -> None:
    """Of a kernel that takes every record of its rule."""


def refuse_complex(recurrence: Recurrence) -> str | None:
    """Of a kernel for real streams."""
    return "its streams are complex" if recurrence.accumulator.is_complex else None


@dataclass(frozen=True)
class Kernel:
    """One way to evaluate the records of one rule: recurrences, or operations of layers.

    Attributes:
        name: by which `only` and `explain` know it
        rule: the type of the records that it is for; `Recurrence` for all
        compute: (o, final state) of a record and a state that it does not refuse, which agree with
            `Recurrence.chunk`, gradients included; of an operation, what it says itself
        refuses: why it cannot take a record of its rule, or None if it can
        devices: the device types whose streams it reads; none stands for all
        opaque: whether torch's transforms cannot look into it, as it reads memory itself or has a
            backward of its own
    """

    name: str
    rule: type
    compute: Callable[..., Any]
    refuses: Callable[[Any], str | None] = refuse_nothing
    devices: tuple[str, ...] = ()
    opaque: bool = False

    def reads(self, device: str) -> bool:
        """Whether it reads streams on this type of device."""
        return not self.devices or device in self.devices


TABLE: list[Kernel] = []
"""All kernels; of those that are for a record, the first that does not refuse it is taken."""

_CANDIDATES: dict[tuple[type, str], tuple[Kernel, ...]] = {}
_only: ContextVar[Mapping[type, str]] = ContextVar("only", default=MappingProxyType({}))
"""By family of records, the name of the one kernel that is allowed."""
_preferred: ContextVar[tuple[str, ...]] = ContextVar("preferred", default=())
"""The names of the kernels that are asked before the others."""


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
    key = type(record), rehearsed() or record.device.type
    found = _CANDIDATES.get(key)
    if found is None:
        rule, device = key
        found = tuple(k for k in TABLE if issubclass(rule, k.rule) and k.reads(device))
        _CANDIDATES[key] = found
    return _preferred_first(found)


@assume_constant_result
def _preference() -> tuple[str, ...]:
    """The kernels that are asked first here; torch.compile, which cannot trace context, fixes
    them.
    """
    return _preferred.get()


def _preferred_first(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    names = _preference()
    if not names:
        return kernels
    first = [k for name in names for k in kernels if k.name == name]
    return (*first, *(k for k in kernels if k.name not in names))


def takers(record: Any) -> list[Kernel]:
    """The kernels that can evaluate this record, the one that `Auto()` prefers first."""
    transform = transform_here()
    return [k for k in candidates(record) if _refusal(k, record, transform) is None]


def _refusal(kernel: Kernel, record: Any, transform: str | None) -> str | None:
    """Why it cannot take a record of its rule under this transform of torch, or None if it can."""
    return transform if transform and kernel.opaque else kernel.refuses(record)


def _family(rule: type) -> type:
    """What `only` speaks of together: all recurrences, or the records of one operation."""
    return Recurrence if issubclass(rule, Recurrence) else rule


@assume_constant_result
def _restriction(rule: type) -> str | None:
    """The one kernel allowed here for records of this type, or None for all; torch.compile, which
    cannot trace context, fixes it.
    """
    allowed = _only.get()
    return allowed.get(_family(rule)) if allowed else None


def choices() -> tuple[Any, ...]:
    """What the choice of kernels depends on besides the records: equal where it is the same."""
    return tuple(TABLE), _preferred.get(), _only.get(), transform_here()


def select(record: Any) -> Kernel:
    """The kernel that is taken."""
    return _first(record, _restriction(type(record)))


def run_fastest(record: Any, state: State) -> tuple[Tensor, Any]:
    """(o, state) of a record that another kernel made: `only` speaks of the outer one."""
    return _first(record, None).compute(record, state)


def _first(record: Any, wanted: str | None) -> Kernel:
    transform = transform_here()
    for kernel in candidates(record):
        if wanted in (None, kernel.name) and _refusal(kernel, record, transform) is None:
            return kernel
    raise LookupError(f"no kernel takes this record:\n{explain(record)}")


def explain(record: Any) -> str:
    """A line per kernel for this rule or operation: taken, possible, or why it refused; and one on
    float32 products where torch makes them.

    Args:
        record: a recurrence, or an operation of a layer (`fastweights.ops`)
    """
    wanted, taken, lines = _restriction(type(record)), False, []
    for kernel in _preferred_first(tuple(k for k in TABLE if isinstance(record, k.rule))):
        reason = _reason(kernel, record, wanted)
        verdict = f"refused: {reason}" if reason else "possible" if taken else "taken"
        taken = taken or reason is None
        asked = ", preferred here" if kernel.name in _preference() else ""
        lines.append(f"{kernel.name}: {verdict}{asked}")
    if _multiplies_float32(record):
        lines.append(
            f"float32 matrix products of the torch kernels: {gemm.LIBRARIES[gemm.products_route()]}"
        )
    return "\n".join(lines)


def _multiplies_float32(record: Any) -> bool:
    """Whether torch kernels multiply float32 matrices for it on the CPU."""
    return (
        isinstance(record, Recurrence)
        and record.device.type == "cpu"
        and record.accumulator == torch.float32
    )


def _reason(kernel: Kernel, record: Any, wanted: str | None) -> str | None:
    """Why `kernel` is not taken where `wanted` is the only one allowed; None if it may be."""
    if not kernel.reads(record.device.type):
        return f"its streams are on {record.device.type}, not {' or '.join(kernel.devices)}"
    reason = _refusal(kernel, record, transform_here())
    if reason is None and wanted not in (None, kernel.name):
        return f"only {wanted!r} is allowed here"
    return reason


@contextmanager
def only(name: str) -> Iterator[None]:
    """Inside the block `Auto()` takes the kernel called `name` or none.

    Recurrences are one family, the records of every operation another: a kernel of one leaves the
    choice for the others free.

    Raises:
        LookupError: if no kernel has this name
    """
    rule = TABLE[_position(name)].rule
    token = _only.set({**_only.get(), _family(rule): name})
    try:
        yield
    finally:
        _only.reset(token)


@contextmanager
def added(*kernels: Kernel) -> Iterator[None]:
    """Inside the block the table has these kernels, too, which are asked before all others."""
    TABLE[:0] = kernels
    _CANDIDATES.clear()
    try:
        yield
    finally:
        for kernel in kernels:
            TABLE.remove(kernel)
        _CANDIDATES.clear()


@contextmanager
def prefer(*names: str) -> Iterator[None]:
    """Inside the block the kernels of these names are asked before all others, in this order; what
    they refuse goes to the others.

    Unlike `only`, it holds for records that kernels make, too.

    Raises:
        LookupError: if no kernel has one of these names
    """
    for name in names:
        _position(name)
    token = _preferred.set(names)
    try:
        yield
    finally:
        _preferred.reset(token)
