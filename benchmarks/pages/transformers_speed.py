"""docs/transformers-speed.md: transformers' linear models as they are, patched, and as ours."""

from __future__ import annotations

from statistics import median

import numpy as np

from fastweights.render.markdown import table
from fastweights.render.plots import PALETTE, canvas, label, legend, png
from pages.page import Page, Row, origin, rows_of

PARTS = {"prefill": "prefill", "training": "forward + backward", "decode": "generate"}
CONTROL = "llama"
"""Softmax alone, of which nothing is replaced; not counted in medians."""


def _rows() -> list[Row]:
    return rows_of("transformers_models")


def machine() -> str:
    return f"{origin('transformers_models')}."


def ratio(row: Row, part: str, contender: str) -> float | None:
    """How many times faster than transformers' own; None where there is nothing to compare."""
    theirs, found = row[part]["transformers"], row[part].get(contender)
    if isinstance(theirs, str) or not isinstance(found, float):
        return None
    return theirs / found


def times() -> str:
    columns = ("family", *(f"{title}, ms" for title in PARTS.values()))
    return table(columns, ((row["family"], *(_times(row, p) for p in PARTS)) for row in _rows()))


def _times(row: Row, part: str) -> str:
    """theirs → patched (ratio), as ours (ratio)"""
    text = _milliseconds(row[part]["transformers"])
    for contender, sign in (("patched", "→"), ("ours", "· ours")):
        if contender in row[part]:
            faster = ratio(row, part, contender)
            times = "" if faster is None else f" ({faster:.2f}×)"
            text += f" {sign} {_milliseconds(row[part][contender])}{times}"
    return text


def _milliseconds(found: float | str) -> str:
    return "fails" if isinstance(found, str) else f"{found:,.0f}"


def medians() -> str:
    lines = (
        (title, *(_median(part, contender) for contender in ("patched", "ours")))
        for part, title in PARTS.items()
    )
    return table(("median over families", "patched", "imported as ours"), lines)


def _median(part: str, contender: str) -> str:
    found = [ratio(row, part, contender) for row in _rows() if row["family"] != CONTROL]
    known = [faster for faster in found if faster is not None]
    return f"{median(known):.2f}× ({min(known):.2f} to {max(known):.1f}; {len(known)} families)"


def packing() -> str:
    columns = ("family", "packed row", "packed / one by one, ms", "memory, MB")
    return table(columns, map(_packing, _rows()))


def _packing(row: Row) -> tuple[str, ...]:
    found = row["packing"]
    sizes = (row["memory"].get(name) for name in ("transformers", "patched", "ours"))
    times = " / ".join(_milliseconds(found[way]) for way in ("packed", "alone"))
    memory = " / ".join(f"{size / 1e6:,.0f}" for size in sizes if size is not None)
    return row["family"], found["before"], times, memory


def ratios() -> bytes:
    """Bars of how many times faster patched models are, by family."""
    rows = [row for row in _rows() if row["family"] != CONTROL]
    figure, axes = canvas(1, 1, 9.0, 3.6)
    one, places = axes[0, 0], np.arange(len(rows))
    for number, (part, title) in enumerate(PARTS.items()):
        heights = [ratio(row, part, "patched") or np.nan for row in rows]
        one.bar(places + 0.27 * (number - 1), heights, 0.25, color=PALETTE[number], label=title)
    one.axhline(1, color="black", linewidth=0.8)
    one.set_yscale("log")
    one.set_xticks(places, [row["family"] for row in rows], rotation=50, ha="right")
    label(one, "Patched models", "", "times as fast as transformers' own")
    legend(one)
    return png(figure)


PAGE = Page(
    "transformers-speed", (machine, medians, times, packing), {"transformers_models.png": ratios}
)
