"""docs/onnx.md: every mixer in ONNX Runtime."""

from __future__ import annotations

from fastweights.render.markdown import table
from pages.page import Page, Row, Stretches, origin, results, rows_of

KINDS = ("LinearAttention", "CausalConvWithState", "Scan")


def measured() -> str:
    """With what it was measured."""
    settings = results("onnx")["header"]["settings"]
    return f"{origin('onnx')}. Width {settings['width']}, operators of `{settings['domain']}`."


def mixers() -> str:
    """A line per mixer, and why others are not written."""
    rows = rows_of("onnx")
    columns = ("mixer", *KINDS, "difference", "tokens/s", "ours", "×")
    written = table(columns, (_line(row) for row in rows if "nodes" in row))
    refused = [f"- `{row['mixer']}`: {row['reason']}" for row in rows if "reason" in row]
    return "\n\n".join([written, "\n".join(refused)]) if refused else written


def _line(row: Row) -> list[str]:
    nodes = (str(row["nodes"][kind] or "") for kind in KINDS)
    theirs, ours = (row["tokens_per_second"][name] for name in ("onnxruntime", "fastweights"))
    speed = (f"{theirs:,.0f}", f"{ours:,.0f}", f"{theirs / ours:.1f}")
    return [f"`{row['mixer']}`", *nodes, f"{row['error']:.0e}", *speed]


PAGE = Page("onnx", Stretches({"measured": measured, "mixers": mixers}))
