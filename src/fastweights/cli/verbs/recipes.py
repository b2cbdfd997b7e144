"""fastweights recipes"""

from __future__ import annotations

from argparse import Namespace
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from fastweights.cli.progress import WIDE
from fastweights.recipes import RECIPES, ROWS, TableRow
from fastweights.render.units import significant


def recipes(chosen: Namespace, console: Console) -> None:
    """Print the rows of the papers' tables, and what starts each."""
    wanted = [row for row in ROWS if _is_wanted(row, chosen.names)]
    if not wanted:
        raise ValueError(
            f"no recipe, and no table of a paper, begins with {' or '.join(chosen.names)}; leave"
            " the name out to see all"
        )
    if not console.is_terminal:
        console.width = WIDE
    for table, rows in groupby(wanted, lambda row: row.table):
        _print(table, list(rows), console)
    started, by_recipe = sum(row.starts for row in wanted), sum(bool(row.recipe) for row in wanted)
    console.print(
        f"{started} of {len(wanted)} rows start by one command, {by_recipe} of them by a recipe:"
        " fastweights plan RECIPE prints its command and what it takes",
        soft_wrap=True,
    )


def _is_wanted(row: TableRow, names: tuple[str, ...]) -> bool:
    """Whether one of the names begins the row's table or recipe; all rows, without names."""
    words = row.table.lower(), row.recipe
    return not names or any(word.startswith(name.lower()) for name in names for word in words)


def _print(title: str, rows: list[TableRow], console: Console) -> None:
    """A table of a paper; below it, what differs from the paper, by the numbers in the table."""
    gaps = [gap for row in rows for gap in row.gaps]
    numbers = {gap: str(number) for number, gap in enumerate(dict.fromkeys(gaps), 1)}
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("row", "started by", "tokens", "what differs"):
        table.add_column(column, overflow="fold")
    for cells, alike in groupby(rows, lambda row: _cells(row, numbers)):
        table.add_row("; ".join(row.row for row in alike), *cells)
    console.print(table)
    for gap, number in numbers.items():
        console.print(f"  {number}  {gap}", soft_wrap=True)


def _cells(row: TableRow, numbers: dict[str, str]) -> tuple[str, str, str]:
    """What starts the row, its tokens, and the numbers of the differences or the reason."""
    if not row.starts:
        return "nothing", "", row.otherwise
    differs = ", ".join(numbers[gap] for gap in row.gaps)
    if not row.recipe:
        return row.otherwise, "", differs
    tokens = RECIPES[row.recipe].tokens.value
    return row.recipe, f"{significant(tokens / 1e9, 4)}B", differs
