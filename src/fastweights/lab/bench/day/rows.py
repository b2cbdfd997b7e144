"""What is found: rows of a kind for every kind of result.

A row is known by its group, its kind and the fields of `NAMES`; a later one with the same stands in
its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastweights.lab.bench.contenders import Sizes
from fastweights.lab.bench.ops import NO_GRADIENTS
from fastweights.lab.bench.timing import TimedRow

Row = dict[str, Any]
NAMES = (
    *("op", "sizes", "dtype", "phase", "contender", "round", "steps"),
    *("test", "tool", "variant", "kernel", "what"),
)
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""Relative errors, ‖x - x₆₄‖ / ‖x₆₄‖."""


@dataclass(frozen=True)
class EndRow:
    """The end of a group: `reason` says why it has not ended well."""

    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class MachineRow:
    """The machine, what is installed on it, and which of what can be used is `missing`."""

    device: str
    capability: str
    cores: int
    versions: dict[str, str]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class WarmRow:
    """Kernels compiled into Triton's cache, and the seconds that this took."""

    op: str
    sizes: Sizes
    dtype: str
    variant: str
    kernels: int
    seconds: float


@dataclass(frozen=True)
class OutcomeRow:
    """One test: passed, skipped or failed."""

    test: str
    outcome: str
    seconds: float
    note: str = ""


@dataclass(frozen=True)
class RepeatRow:
    """Whether all runs on memory full of NaN gave the same finite bits; `differs` names what did
    not.
    """

    op: str
    sizes: Sizes
    dtype: str
    runs: int
    differs: tuple[str, ...]


@dataclass(frozen=True)
class ToolRow:
    """What one of NVIDIA's tools said of one operation or kernel."""

    op: str
    tool: str
    kernel: str
    text: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class TimeRow(TimedRow):
    """The time of one phase of one implementation, compared with none.

    Attributes:
        round: 0 or 1: each is measured twice
        peak_bytes: of memory beyond what the phase began with
        bandwidth: the phase's bytes / seconds / the rate of a copy
        host: seconds until the call returns, where the device is not waited for
        kernels: milliseconds of a call by kernel
        wrong: whether its results are known to be wrong
    """

    op: str
    sizes: Sizes
    dtype: str
    phase: str
    contender: str
    library: str
    round: int
    peak_bytes: int | None = None
    bandwidth: float | None = None
    host: float | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    wrong: bool = False


@dataclass(frozen=True)
class ResidualRow:
    """What so many steps of Mesa's solver take, and how far from the exact solution they end."""

    op: str
    contender: str
    library: str
    steps: int
    error: float | None
    forward: float | None
    backward: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class VariantRow(TimedRow):
    """A kernel launched otherwise, compared with the kernel as it is, and how far its results are
    from those.
    """

    op: str
    phase: str
    variant: str
    difference: float | None = None


@dataclass(frozen=True)
class FiguresRow:
    """What a command of the library found."""

    what: str
    figures: dict[str, float]


def key_of(row: Row) -> tuple[str, ...]:
    """What tells a row from the others."""
    named = (f"{name}={row[name]}" for name in NAMES if name in row)
    return (row["group"], row["type"], *named)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without those that a later one stands for."""
    return list({key_of(row): row for row in rows}.values())


def fault(row: Row) -> str:
    """Return why a row is no success; empty if it is one.

    A peer's fault is its own: the session has not failed.
    """
    if row["type"] == "CheckRow":
        return _inexact(row) if row["note"] in ("", NO_GRADIENTS) else row["note"]
    if row["type"] == "RepeatRow":
        return f"not the same, or not finite: {', '.join(row['differs'])}" if row["differs"] else ""
    if row["type"] == "OutcomeRow":
        return row["note"] or row["outcome"] if row["outcome"] == "failed" else ""
    if row["type"] in ("TimeRow", "ResidualRow"):
        return row["note"] if row["library"] == "fastweights" else ""
    return row.get("reason") or row.get("note", "")


def _inexact(row: Row) -> str:
    """Of our kernel, whose solver may have stopped at an accuracy of its own."""
    limit = max(TOLERANCE[row["dtype"]], 1e-4 if "tol" in row["op"] else 0.0)
    found = [e for e in (row["error"], row["gradient_error"]) if e is not None]
    wrong = [e for e in found if not e < limit]
    if wrong or not found:
        return f"errors {found} against float64, more than {limit:g}"
    return f"the host waits {row['syncs']} times" if row["syncs"] and row["auto"] else ""
