"""docs/transformers.md: what is replaced in which version of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fastweights.render.markdown import table
from pages.page import Page, Row, rows_of


def _rows() -> list[Row]:
    return rows_of("transformers_versions")


def versions() -> str:
    """A line per families with equal counts: how many functions are replaced in each version."""
    rows = _rows()
    found: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for row in rows for name in row["replaced"]}):
        counts = tuple(_count(row["replaced"].get(name)) for row in rows)
        found.setdefault(counts, []).append(f"`{name}`")
    columns = ("family", *(row["transformers"] for row in rows))
    return table(columns, ((", ".join(names), *counts) for counts, names in found.items()))


def _count(functions: list[str] | None) -> str:
    return "" if functions is None else f"{len(functions)}"


def functions() -> str:
    """What is replaced in the newest version beside the forwards of models and norms, by the
    families that have it.
    """
    replaced = _rows()[-1]["replaced"]
    found: dict[str, list[str]] = {}
    for name in sorted({name for names in replaced.values() for name in names}):
        if not EVERYWHERE.search(name):
            families = ", ".join(f"`{family}`" for family in replaced if name in replaced[family])
            found.setdefault(families, []).append(f"`{name}`")
    lines = ((", ".join(names), families) for families, names in found.items())
    return table(("function", "in the modelling files of"), lines)


EVERYWHERE = re.compile(r"(For\w+|Model)\.forward$|RMSNorm\w*\.|^create_")
"""What takes packed documents apart, and norms: of nearly every family."""


def left() -> str:
    """What stays in one of the versions, or that nothing does."""
    return "\n".join(_left()) or "In these versions nothing that was compared stays as it was."


def _left() -> Iterator[str]:
    found: dict[str, dict[str, None]] = {}
    for row in _rows():
        for name, reason in row["left"].items():
            found.setdefault(f"`{name}`: {reason}", {})[row["transformers"]] = None
    for said, where in found.items():
        yield f"- {said} ({', '.join(where)})"


PAGE = Page("transformers", (versions, functions, left))
