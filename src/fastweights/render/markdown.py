"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """The table, with `columns` as its head; a pipe within a cell is escaped."""
    head = tuple(columns)
    return "\n".join(map(_line, (head, ("---",) * len(head), *rows)))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
