"""Work for a day on a GPU that says something and then ends as badly as work can.

It imports little that the processes of jobs have not: each of them imports it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from functools import partial

from fastweights.lab.bench.day.findings import Findings
from fastweights.lab.bench.day.jobs import Job, RowGroup
from fastweights.lab.bench.day.plan import DayPlan
from fastweights.lab.bench.day.rows import FiguresRow
from fastweights.lab.bench.day.stages import Together


def say(what: str) -> Iterator[FiguresRow]:
    yield FiguresRow(what, {"it": 1.0})


def say_and(what: str, end) -> Iterator[FiguresRow]:
    yield from say(what)
    end()


def fail(reason: str) -> None:
    raise RuntimeError(reason)


def segfault() -> None:
    ctypes.string_at(0)


def lose_the_context() -> Iterator[FiguresRow]:
    """As torch says it; whatever runs in the same process afterwards fails as well."""
    os.environ["LOST"] = "yes"
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
    yield


def needs_a_context() -> Iterator[FiguresRow]:
    assert "LOST" not in os.environ
    yield from say("whole")


def say_and_hang() -> Iterator[FiguresRow]:
    yield FiguresRow("hung", {"pid": float(os.getpid())})
    time.sleep(600)


def four(_: DayPlan, found: Findings) -> Iterator[Together]:
    """A stage of four tasks; until it is mended, one fails and one hangs."""
    work = {name: partial(say, name) for name in ("done", "failed", "hung", "last")}
    if not (found.report.path.parent / "mended").exists():
        work |= {"failed": partial(say_and, "failed", partial(fail, "no")), "hung": say_and_hang}
    yield Together(1, (Job("tied", tuple(RowGroup(name, run) for name, run in work.items())),))
