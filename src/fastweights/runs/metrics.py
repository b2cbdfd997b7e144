"""The curve of a run: one JSON object per line, only ever appended to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fastweights.runs.files import append_line, atomic_file, complete_lines

Row = Mapping[str, float]
"""step, loss [nats/token], lr, tokens_per_second, seconds; val_loss [nats/token] where it was
evaluated.
"""


class Metrics:
    """The metrics file at `path`, up to and with those of `step`."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self.rows = [row for row in rows(path) if row["step"] <= step]

    def cut(self) -> None:
        """Remove later lines, and a torn last one, from the file."""
        with atomic_file(self._path) as new:
            new.write_text("".join(_line(row) + "\n" for row in self.rows))

    def append(self, row: Row) -> None:
        """Write the row down for good."""
        self.rows.append(row)
        append_line(self._path, _line(row))


def rows(path: Path) -> list[Row]:
    """The whole lines of a metrics file; none if there is no file."""
    return [json.loads(line) for line in complete_lines(path)]


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False)
