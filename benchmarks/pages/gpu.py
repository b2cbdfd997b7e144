"""docs/gpu.md: what has been measured on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from fastweights.lab.bench.peers import FLA
from fastweights.render.markdown import table
from pages.page import Page, Row, rows_of

OURS = "fastweights"
NOW, BEFORE = "gpu/times", "gpu/first_times"


def measured() -> str:
    """Milliseconds of all kernels of a call."""
    columns = ("operation", "", "fastweights, ms", "flash-linear-attention, ms", "times as fast")
    return table(columns, _lines())


def _lines() -> Iterator[tuple[str, ...]]:
    for row in rows_of(NOW, type="TimeRow", library=OURS, round=0):
        theirs = _kernels(_peer(row))
        ours = _kernels(row)
        ratio = f"{theirs / ours:.2f}" if theirs else "–"
        yield row["op"], row["phase"], f"{ours:.2f}", f"{theirs:.2f}" if theirs else "–", ratio


def _peer(row: Row) -> Row | None:
    """That of the same call, of this run or of the first."""
    same = {key: row[key] for key in ("type", "op", "phase", "sizes", "dtype", "round")}
    found = (*rows_of(NOW, library=FLA, **same), *rows_of(BEFORE, library=FLA, **same))
    return next((one for one in found if one["seconds"]), None)


def _kernels(row: Row | None) -> float:
    return sum(row["kernels"].values()) if row else 0.0


PAGE = Page("gpu", (measured,))
