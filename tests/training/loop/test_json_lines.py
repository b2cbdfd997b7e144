"""JSON lines: what was written whole is read, what was torn never was written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fastweights.errors import CheckpointError
from fastweights.training.loop.json_lines import append_row, finite, read_rows, write_rows

ROWS = [{"step": 1, "text": "a\nb\u2028c"}, {"step": 2, "loss": 0.1}]


def test_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == []
    for row in ROWS:
        append_row(path, row)
    assert read_rows(path) == ROWS
    write_rows(path, ROWS[:1])
    assert read_rows(path) == ROWS[:1]


@pytest.mark.parametrize("line", ['{"step": ', "[1]", "3", "\x00"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(CheckpointError, match=r"rows.jsonl, line 2, is"):
        read_rows(path)


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    row = {"step": 1, "loss": math.nan, "rate": -math.inf, "name": "x"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_row(tmp_path / "rows.jsonl", row)
    assert read_rows(tmp_path / "rows.jsonl") == []
    append_row(tmp_path / "rows.jsonl", finite(row))
    assert read_rows(tmp_path / "rows.jsonl") == [{**row, "loss": None, "rate": None}]
