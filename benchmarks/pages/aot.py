"""docs/aot.md: mixers compiled ahead of time."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Page, Row, origin, rows_of

ACTS = ("prefill", "decode")


def measured() -> str:
    """With what it was measured."""
    return f"{origin('aoti')}."


def mixers() -> str:
    """A line per mixer, and why others are not written."""
    rows = rows_of("aoti")
    columns = (
        "mixer",
        "difference",
        *(f"{act}, ×" for act in ACTS),
        "seconds to compile",
    )
    written = table(columns, (_line(row) for row in rows if "errors" in row))
    refused = [f"- `{row['mixer']}`: {row['reason']}" for row in rows if "reason" in row]
    return "\n\n".join([written, "\n".join(refused)]) if refused else written


def _line(row: Row) -> list[str]:
    speeds = (_speed(row["tokens_per_second"], act) for act in ACTS)
    error = f"{row['errors']['compiled']:.0e}"
    return [f"`{row['mixer']}`", error, *speeds, f"{row['seconds']:.0f}"]


def _speed(found: Row, act: str) -> str:
    """How many times that of our own decoder."""
    return f"{found['compiled'][act] / found['fastweights'][act]:.1f}"


PAGE = Page("aot", (measured, mixers))
