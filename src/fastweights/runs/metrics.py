"""The curve of a run in a file: one JSON object per line, only ever appended to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastweights.runs.json_lines import append_row, read_rows, write_rows

Row = Mapping[str, float]
"""step, loss [nats/token], lr, tokens_per_second, seconds; val_loss [nats/token] where it was
evaluated.
"""


class Metrics:
    """The metrics file at `path`, of which rows up to and including `step` are valid."""

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self.rows: list[Row] = [row for row in read_rows(path) if row["step"] <= step]

    def cut(self) -> None:
        """Remove later rows, and an incomplete last one, from the file."""
        write_rows(self._path, self.rows)

    def append(self, row: Row) -> None:
        """Append a row and sync the file to disk."""
        self.rows.append(row)
        append_row(self._path, row)
