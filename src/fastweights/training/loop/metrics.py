"""The curve of a run in a file: one JSON object per line, only ever appended to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastweights.training.loop.json_lines import append_row, damaged_line, read_rows, write_rows

Row = Mapping[str, float]
"""step, loss [nats/token], lr, tokens_per_second, seconds; val_loss [nats/token] where it was
evaluated, and what else is minimised under names of its own, such as z_loss.
"""
ALWAYS = ("step", "loss")
"""What every row has."""


class Metrics:
    """The metrics file at `path`, of which rows up to and including `step` are valid.

    Args:
        path: The file.
        step: Updates made.
        copy: The copy of the rows up to there that a checkpoint has; None if there is none.

    Raises:
        CheckpointError: If a line is damaged; the message names it.
    """

    def __init__(self, path: Path, step: int, copy: Path | None = None) -> None:
        self._path, read = path, path if copy is None else copy
        rows = read_rows(read) if step else []
        for number, row in enumerate(rows, 1):
            _require_row(read, number, row)
        self.rows: list[Row] = [row for row in rows if row["step"] <= step]

    def cut(self) -> None:
        """Remove later rows, and an incomplete last one, from the file."""
        write_rows(self._path, self.rows)

    def copy(self, folder: Path) -> None:
        """Write all rows into a folder."""
        write_rows(folder / self._path.name, self.rows)

    def append(self, row: Row) -> None:
        """Append a row and sync the file to disk."""
        self.rows.append(row)
        append_row(self._path, row)


def _require_row(path: Path, number: int, row: Mapping[str, Any]) -> None:
    lacking = [name for name in ALWAYS if name not in row]
    if lacking:
        raise damaged_line(path, number, f"it has no {lacking[0]}")
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise damaged_line(path, number, f"{name} is {value!r}, and not a number")
