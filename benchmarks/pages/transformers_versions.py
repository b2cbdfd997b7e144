"""docs/transformers.md: what is replaced in which version of transformers."""

from __future__ import annotations

from collections.abc import Iterator

from fastweights.render.markdown import table
from pages.page import Page, Row, Stretches, rows_of


def _rows() -> list[Row]:
    return rows_of("transformers_versions")


def versions() -> str:
    """A line per family: how many functions are replaced in each version."""
    rows = _rows()
    columns = ("family", *(row["transformers"] for row in rows))
    families = sorted({name for row in rows for name in row["replaced"]})
    lines = (
        (f"`{name}`", *(_count(row["replaced"].get(name)) for row in rows)) for name in families
    )
    return table(columns, lines)


def _count(functions: list[str] | None) -> str:
    return "" if functions is None else f"{len(functions)}"


def functions() -> str:
    """What is replaced in the newest version, by the families that have it."""
    replaced = _rows()[-1]["replaced"]
    names = sorted({name for found in replaced.values() for name in found})
    lines = (
        (f"`{name}`", ", ".join(f"`{family}`" for family in replaced if name in replaced[family]))
        for name in names
    )
    return table(("function", "in the modelling files of"), lines)


def left() -> str:
    """What stays in one of the versions, or that nothing does."""
    return "\n".join(_left()) or "In these versions nothing that was compared stays as it was."


def _left() -> Iterator[str]:
    for row in _rows():
        for name, reason in row["left"].items():
            yield f"- {row['transformers']}: `{name}`: {reason}"


PAGE = Page(
    "transformers",
    Stretches({"versions": versions, "functions": functions, "left": left}),
)
