"""A sweep on the disk: what has been run is never run again."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fastweights.lab.sweep.plan import SweepPlan, SweepRun
from fastweights.lab.sweep.pool import Local, Pool, RunFailure
from fastweights.lab.sweep.trainer import Point, Row
from fastweights.runs.files import atomic_file, complete_lines, remove_partials


@dataclass(frozen=True)
class SweepFolder:
    """``runs/KEY.json`` per run that ended, ``logs/KEY.jsonl`` per run that began,
    ``failed/KEY.txt``; and all rows of a sweep as rows.json and, where pyarrow is installed,
    rows.parquet.
    """

    path: Path

    def __post_init__(self) -> None:
        for folder in (self.path / "runs", self.logs, self.path / "failed"):
            folder.mkdir(parents=True, exist_ok=True)
            remove_partials(folder)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def row(self, run: SweepRun) -> Row | None:
        """What came of the run, if it ended; it bears the names that this sweep gives to task and
        model.
        """
        path = self._of(run.key)
        if not path.exists():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        return Row.of({**content, "task": run.task, "mixer": run.contender.label})

    def keep(self, result: Row | RunFailure) -> None:
        """Put it on the disk, whole or not at all."""
        if isinstance(result, RunFailure):
            (self.path / "failed" / f"{result.run.key}.txt").write_text(
                result.trace, encoding="utf-8"
            )
            return
        (self.path / "failed" / f"{result.key}.txt").unlink(missing_ok=True)
        with atomic_file(self._of(result.key)) as new:
            new.write_text(json.dumps(asdict(result)), encoding="utf-8")

    def points(self, run: SweepRun) -> list[Point]:
        """How far a run has come that may not have ended."""
        return [
            Point(**json.loads(line)) for line in complete_lines(self.logs / f"{run.key}.jsonl")
        ]

    def write(self, rows: Sequence[Row]) -> None:
        """rows.json and rows.parquet, without curves."""
        flat = [row.flat() for row in rows]
        with atomic_file(self.path / "rows.json") as new:
            new.write_text(json.dumps(flat, indent=1), encoding="utf-8")
        if importlib.util.find_spec("pyarrow") is not None:
            _parquet(flat, self.path / "rows.parquet")

    def _of(self, key: str) -> Path:
        return self.path / "runs" / f"{key}.json"


def sweep(
    plan: SweepPlan,
    path: Path,
    pool: Pool = Local(),
    *,
    device: str = "cpu",
    listener: Callable[[Row | RunFailure], None] = lambda result: None,
) -> list[Row]:
    """The rows of all runs of the plan that ended without an error, in its order; those in `path`
    are not run again.

    It can be killed at any moment; the same call goes on with what has not ended.

    Args:
        listener: called with every result of this call
    """
    folder, runs = SweepFolder(path), list(plan.runs())
    due = {run.key: run for run in runs if folder.row(run) is None}
    try:
        for result in pool.results(list(due.values()), folder.logs, device) if due else ():
            folder.keep(result)
            listener(result)
    finally:
        rows = [row for run in runs if (row := folder.row(run)) is not None]
        folder.write(rows)
    return rows


def _parquet(rows: Sequence[dict], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    with atomic_file(path) as new:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), new)
