"""JSON lines: one object per line, only ever appended to; an incomplete last line counts as not
written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fastweights.errors import CheckpointError
from fastweights.training.loop.files import atomic_file, is_full, no_space

Row = Mapping[str, Any]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file, except for an incomplete last one; none if there is no file.

    Raises:
        CheckpointError: If a line is not a JSON object; the message names the line.
    """
    return [_parse(path, number, line) for number, line in enumerate(_whole_lines(path), 1)]


def append_row(path: Path, row: Row) -> None:
    """Append a row and sync the file to disk.

    Raises:
        ValueError: If a number is infinite or NaN, which JSON cannot express.
        NoSpaceError: If there is no space for it.
    """
    line = _line(row)
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if is_full(error):
            raise no_space(path, len(line.encode(errors="backslashreplace"))) from error
        raise


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file by one of these rows, atomically."""
    with atomic_file(path) as new:
        new.write_text("".join(map(_line, rows)), encoding="utf-8", errors="backslashreplace")


def cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next row begins a line of its own."""
    if path.exists():
        whole = sum(len(line) for line in _whole_lines(path))
        if whole < path.stat().st_size:
            os.truncate(path, whole)


def damaged_line(path: Path, number: int, why: str) -> CheckpointError:
    """Make the error of a damaged line of a file; lines are counted from 1."""
    return CheckpointError(f"{path}, line {number}, is damaged: {why}; remove that line")


def finite(row: Row) -> dict[str, Any]:
    """Return a row with None in place of numbers that are not finite, which JSON cannot express."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise damaged_line(path, number, str(error)) from error
    if not isinstance(row, dict):
        raise CheckpointError(f"{path}, line {number}, is not a JSON object; remove that line")
    return row


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
