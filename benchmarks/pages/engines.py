"""docs/onnx.md and docs/aot.md: every mixer in ONNX Runtime, and compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pages.page import Page, Row, origin, results, rows_of, table_of

Columns = Mapping[str, Callable[[Row], str]]


def onnx() -> str:
    """Which graphs are loops, too."""
    settings = results("onnx")["header"]["settings"]
    loops = [row["mixer"] for row in rows_of("onnx") if row.get("nodes", {}).get("Scan")]
    columns: Columns = {
        "difference": lambda row: f"{row['error']:.0e}",
        "tokens/s": lambda row: f"{row['tokens_per_second']['onnxruntime']:,.0f}",
        "×": lambda row: _times(*map(row["tokens_per_second"].get, ("onnxruntime", OURS))),
    }
    sizes = f" Width {settings['width']}, operators of `{settings['domain']}`."
    said = f"With a loop: {', '.join(f'`{mixer}`' for mixer in loops)}."
    return "\n\n".join([f"{origin('onnx')}.{sizes}", *_mixers("onnx", columns), said])


def aot() -> str:
    """Compiled programs beside our own decoder."""
    columns: Columns = {
        "difference": lambda row: f"{row['errors']['compiled']:.0e}",
        **{f"{act}, ×": partial(_compiled, act) for act in ("prefill", "decode")},
        "seconds to compile": lambda row: f"{row['seconds']:.0f}",
    }
    return "\n\n".join([f"{origin('aoti')}.", *_mixers("aoti", columns)])


OURS = "fastweights"


def _mixers(name: str, columns: Columns) -> list[str]:
    """A line per mixer, and why others are not written."""
    rows = rows_of(name)
    written = [row for row in rows if "reason" not in row]
    refused = [f"- `{row['mixer']}`: {row['reason']}" for row in rows if "reason" in row]
    shown = table_of(written, {"mixer": lambda row: f"`{row['mixer']}`", **columns})
    return [shown, "\n".join(refused)] if refused else [shown]


def _compiled(act: str, row: Row) -> str:
    return _times(*(row["tokens_per_second"][engine][act] for engine in ("compiled", OURS)))


def _times(theirs: float, ours: float) -> str:
    return f"{theirs / ours:.1f}"


ONNX, AOT = Page("onnx", (onnx,)), Page("aot", (aot,))
