"""The finished parts of a suite that is being scored, so that a stopped command goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.lab.evals.suite_scores import ColumnScore
from fastweights.lab.evals.suites import TableColumn
from fastweights.training.loop.identity import key_of
from fastweights.training.loop.json_lines import append_row, cut_torn_line, read_rows


@dataclass(frozen=True)
class SuitePart:
    """Everything that decides the scores of one task with one choice of solved examples.

    Attributes:
        columns: The columns that the task scores.
        documents: A hash of the task's data.
        shots, seed: Number of solved examples, and the seed that chooses them.
        shared: Whether all items have the same.
        limit: Most items of a task; None for all.
        length: Tokens of a prompt with its answer, of which the last are read.
    """

    columns: tuple[TableColumn, ...]
    documents: str
    shots: int
    seed: int
    shared: bool
    limit: int | None
    length: int


class SuiteJournal:
    """A file with the scores of finished parts, one line of JSON each.

    Args:
        path: The file, which is made with the first part.
        model: What identifies the model's weights.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model = path, model
        cut_torn_line(path)
        rows = (row for row in read_rows(path) if row["model"] == model)
        self._rows = {row["part"]: row["scores"] for row in rows}

    def find(self, part: SuitePart) -> list[ColumnScore] | None:
        """Return the scores of a part; None if it is not finished."""
        rows = self._rows.get(key_of(part))
        return None if rows is None else list(map(_score, rows))

    def add(self, part: SuitePart, scores: Sequence[ColumnScore]) -> None:
        """Write down a finished part; one whose scores are not finite is scored again."""
        if all(np.isfinite(one.mean) for one in scores):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            row = {"model": self.model, "part": key_of(part), "scores": list(map(asdict, scores))}
            append_row(self.path, row)


def _score(row: Mapping[str, Any]) -> ColumnScore:
    lists = {name: tuple(row[name]) for name in ("values", "prompt")}
    fields: dict[str, Any] = {**row, **lists, "rows": tuple(map(tuple, row["rows"]))}
    return ColumnScore(**fields)
