"""Results of a measurement as one JSON file, written atomically, to which rows are added."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastweights.lab.bench.machine import Machine, commit, versions
from fastweights.training.loop.files import write_json

FORMAT = 1
Row = dict[str, Any]
Listener = Callable[[Row], object]


@dataclass(frozen=True)
class Header:
    """What all rows of a file have in common; rows under another header belong into another
    file."""

    target: str
    commit: str | None
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]


def print_row(row: Row) -> None:
    """Print a row as a line of JSON."""
    print(json.dumps(row, ensure_ascii=False), flush=True)


def open_report(
    target: str,
    path: Path,
    settings: dict[str, Any] | None = None,
    device: torch.device = torch.device("cpu"),
    listener: Listener = print_row,
    ceilings: Callable[[], Row] = dict,
) -> Report:
    """Open the report of what is measured here and now at `path`, a new one or one to resume.

    `ceilings` are those of the machine, measured when a report is new.
    """
    machine = asdict(Machine.here(device))
    header = Header(target, commit(), machine, versions(), settings or {})
    return Report.open(path, header, ceilings, listener)


@dataclass
class Report:
    """The rows measured so far, in groups that are measured together.

    Attributes:
        listener: Called with every row that is added.
    """

    path: Path
    header: Header
    ceilings: Row
    listener: Listener = lambda row: None
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        path: Path,
        header: Header,
        ceilings: Callable[[], Row],
        listener: Listener = lambda row: None,
    ) -> Report:
        """Open a new report, or the one at `path` if it has the same header, to resume it.

        Raises:
            ValueError: If the file at `path` holds other results.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, header, ceilings(), listener)
        found = _content(path)
        same = json.loads(json.dumps(asdict(header)))
        if found.get("format") != FORMAT or found.get("header") != same:
            raise ValueError(
                f"{path} holds other results, or none; choose another --out, or move that file away"
            )
        return cls(path, header, found["ceilings"], listener, found["rows"])

    def has(self, group: str) -> bool:
        """Whether this group has been measured."""
        return any(row["group"] == group for row in self.rows)

    def add(self, group: str, rows: Sequence[Any]) -> None:
        """Add the rows (dataclasses, or the JSON of some) of one group, and write the file."""
        new = [{"group": group, **_record(row)} for row in rows]
        self.rows.extend(new)
        write_json(
            self.path,
            {
                "format": FORMAT,
                "header": asdict(self.header),
                "ceilings": self.ceilings,
                "rows": self.rows,
            },
        )
        for row in new:
            self.listener(row)


def _record(row: Any) -> Row:
    if isinstance(row, dict):
        return row
    return {"type": type(row).__name__, **asdict(row)}


def _content(path: Path) -> Row:
    """What is in the file, or nothing if that is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
