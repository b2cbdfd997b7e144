"""docs/batch-invariance.md: what it costs, and what differs without it."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Page, Row, origin, rows_of, table_of


def machine() -> str:
    return f"{origin('batch_invariance')}."


def costs() -> str:
    """Milliseconds outside and inside, and their ratio."""
    rows = rows_of("batch_invariance")
    acts = [name for name in rows[0] if name not in ("group", "differences")]
    lines = ((row["group"], *(_cost(row[act]) for act in acts)) for row in rows)
    return table(("model", *(f"{act}, ms" for act in acts)), lines)


def _cost(times: Row) -> str:
    return f"{times['outside']:,.0f} → {times['inside']:,.0f} ({times['ratio']:.0f}×)"


def differences() -> str:
    columns = {
        "model": lambda row: row["group"],
        "batch against single": lambda row: f"{row['differences']['batch']:.0e}",
        "at once against decoded": lambda row: f"{row['differences']['decoded']:.0e}",
        "either, inside": lambda row: f"{row['differences']['inside']:.0e}",
    }
    return table_of(rows_of("batch_invariance"), columns)


PAGE = Page("batch-invariance", (machine, costs, differences))
