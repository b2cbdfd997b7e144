"""docs/onnx.md: every mixer in ONNX Runtime."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Page, Row, origin, results, rows_of


def measured() -> str:
    """With what it was measured."""
    settings = results("onnx")["header"]["settings"]
    return f"{origin('onnx')}. Width {settings['width']}, operators of `{settings['domain']}`."


def mixers() -> str:
    """A line per mixer, which are loops, and why others are not written."""
    rows = rows_of("onnx")
    written = [row for row in rows if "nodes" in row]
    loops = ", ".join(f"`{row['mixer']}`" for row in written if row["nodes"]["Scan"])
    shown = table(("mixer", "difference", "tokens/s", "×"), map(_line, written))
    refused = [f"- `{row['mixer']}`: {row['reason']}" for row in rows if "reason" in row]
    return "\n\n".join([shown, f"With a loop: {loops}.", *refused])


def _line(row: Row) -> list[str]:
    theirs, ours = (row["tokens_per_second"][name] for name in ("onnxruntime", "fastweights"))
    return [f"`{row['mixer']}`", f"{row['error']:.0e}", f"{theirs:,.0f}", f"{theirs / ours:.1f}"]


PAGE = Page("onnx", (measured, mixers))
