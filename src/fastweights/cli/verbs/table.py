"""fastweights table"""

from __future__ import annotations

import json
from argparse import Namespace

from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from fastweights.analysis.tables import TABLES, Table, page


def table(chosen: Namespace, console: Console) -> None:
    """Print the papers' tables."""
    if chosen.markdown and chosen.json:
        raise ValueError("--markdown and --json are two forms of the same; give one of them")
    unknown = [name for name in chosen.tables if name not in TABLES]
    if unknown:
        raise ValueError(f"unknown tables: {', '.join(unknown)}; there are {', '.join(TABLES)}")
    tables = [TABLES[name]() for name in chosen.tables or TABLES]
    if chosen.json:
        console.out(json.dumps([one.records() for one in tables], indent=1, ensure_ascii=False))
    elif chosen.markdown:
        console.out(page(tables))
    else:
        for one in tables:
            _print(one, console)


def _print(one: Table, console: Console) -> None:
    shown = rich_table.Table(
        *one.columns, title=one.title, box=box.SIMPLE_HEAD, title_justify="left"
    )
    for cells in one.rows:
        shown.add_row(*cells)
    console.print(shown)
    for note in one.notes:
        console.print(Text(note.replace("**", "").replace("`", ""), "dim"))
    console.print()
