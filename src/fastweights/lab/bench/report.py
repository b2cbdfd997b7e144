"""Results of a benchmark as one JSON file, written atomically, to which rows are added."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastweights.training.loop.files import write_json

FORMAT = 1


@dataclass(frozen=True)
class Header:
    """What all rows of a file have in common; rows under another header belong into another
    file."""

    target: str
    commit: str | None
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]


@dataclass
class Report:
    """The rows measured so far, in groups that are measured together.

    Attributes:
        listener: Called with every row that is added.
    """

    path: Path
    header: Header
    ceilings: dict[str, float | None]
    listener: Callable[[dict[str, Any]], None] = lambda row: None
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        path: Path,
        header: Header,
        ceilings: Callable[[], dict[str, float | None]],
        listener: Callable[[dict[str, Any]], None] = lambda row: None,
    ) -> Report:
        """Open a new report, or the one at `path` if it has the same header, to resume it.

        Raises:
            ValueError: If the file at `path` holds other results.
        """
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            return cls(path, header, ceilings(), listener)
        found = _content(path)
        if found.get("format") != FORMAT or found.get("header") != json.loads(
            json.dumps(asdict(header))
        ):
            raise ValueError(
                f"{path} holds other results, or none; choose another --out, or move that file away"
            )
        return cls(path, header, found["ceilings"], listener, found["rows"])

    def has(self, group: str) -> bool:
        """Whether this group has been measured."""
        return any(row["group"] == group for row in self.rows)

    def add(self, group: str, rows: Sequence[Any]) -> None:
        """Add the rows (dataclasses) of one group, and write the file."""
        new = [{"group": group, "type": type(row).__name__, **asdict(row)} for row in rows]
        self.rows.extend(new)
        self._write()
        for row in new:
            self.listener(row)

    def _write(self) -> None:
        content = {
            "format": FORMAT,
            "header": asdict(self.header),
            "ceilings": self.ceilings,
            "rows": self.rows,
        }
        write_json(self.path, content)


def _content(path: Path) -> dict[str, Any]:
    """What is in the file, or nothing if that is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
