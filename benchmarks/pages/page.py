"""What a page of measurements is: a page of docs/ that has stretches written from results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastweights.render.markdown import table

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PICTURES = DOCS / "measured"
Row = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """docs/`name`.md.

    Attributes:
        stretches: functions that write what stands between ``<!-- NAME -->`` and ``<!-- end -->``,
            where NAME is the function's; the prose around them is typed by hand
        pictures: how to draw the pictures on it, as PNG, by their names in docs/measured
    """

    name: str
    stretches: tuple[Callable[[], str], ...]
    pictures: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return DOCS / f"{self.name}.md"

    def render(self, page: str) -> str:
        """The page as it should be, from the page as it is.

        Raises:
            ValueError: If the page has no place for a stretch.
        """
        for write in self.stretches:
            name = write.__name__
            place = re.compile(rf"<!-- {name} -->\n.*?<!-- end -->", re.DOTALL)
            if not place.search(page):
                raise ValueError(f"the page has no <!-- {name} --> … <!-- end --> to write into")
            text = f"<!-- {name} -->\n\n{write()}\n\n<!-- end -->"
            page = place.sub(lambda _, text=text: text, page)
        return page


def results(name: str) -> dict[str, Any]:
    """benchmarks/results/`name`.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(name: str, **where: object) -> list[Row]:
    """The rows of a file of results that have these fields."""
    rows = results(name)["rows"]
    return [row for row in rows if all(row.get(key) == value for key, value in where.items())]


def table_of(rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """A table with a line for each row: what the columns show of it, by their heads."""
    return table(columns, ([show(row) for show in columns.values()] for row in rows))


def origin(name: str) -> str:
    """What a file of results was measured with."""
    header = results(name)["header"]
    commit, machine, threads = header["commit"], header["machine"], header["machine"].get("threads")
    shown = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    on = machine["cpu"] + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")
    return f"Commit {commit[:9]}; {on}; {shown}"
