"""Tables in Markdown."""

from __future__ import annotations

from fastweights.render.markdown import table


def test_a_table_has_a_head_and_escaped_cells() -> None:
    assert table(("a", "b"), [("1", "|x|"), ("2", "")]) == "\n".join(
        ["| a | b |", "| --- | --- |", r"| 1 | \|x\| |", "| 2 |  |"]
    )
