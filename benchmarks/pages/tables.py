"""docs/tables.md, computed from the code alone."""

from __future__ import annotations

from collections.abc import Iterator

from fastweights.analysis.tables import FUNCTIONS, TABLES, Table, functions
from pages.page import Page

IN_PLACE = ("metala-2", "mesanet-3", "mesanet-4", "costs")
DERIVED = ("in d²", "state in n_a²", "operations in n_a²")
"""Columns that repeat another in a different unit."""


def tables() -> str:
    return "\n\n".join(_shown(table).markdown() for table in _tables())


def _tables() -> Iterator[Table]:
    """MetaLA's tables of functions as one: they share most of their rows."""
    names = (name for _, listed in FUNCTIONS.values() for name in listed.split())
    yield functions("MetaLA, Tables 1 and A1 to A3: linear models", tuple(dict.fromkeys(names)))
    for name in IN_PLACE:
        yield TABLES[name]()


def _shown(table: Table) -> Table:
    """Without derived columns, and with one row for all models that have the same cells."""
    kept = [i for i, column in enumerate(table.columns) if column not in DERIVED]
    same: dict[tuple[str, ...], list[str]] = {}
    for row in table.rows:
        name, *cells = (row[i] for i in kept)
        same.setdefault(tuple(cell.replace(" × ", "×") for cell in cells), []).append(name)
    rows = [(", ".join(names), *cells) for cells, names in same.items()]
    return table._replace(columns=tuple(table.columns[i] for i in kept), rows=rows)


PAGE = Page("tables", (tables,))
