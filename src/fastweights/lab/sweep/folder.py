"""The folder of a sweep: results on disk, so that no run is computed twice."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastweights.lab.sweep.plan import SweepPlan, SweepRun
from fastweights.lab.sweep.pool import Local, Pool, RunFailure
from fastweights.lab.sweep.trainer import Point, Row
from fastweights.training.loop.files import atomic_file, read_json, remove_partials, write_json
from fastweights.training.loop.identity import differences, to_record
from fastweights.training.loop.json_lines import read_rows


@dataclass(frozen=True)
class SweepFolder:
    """The folder that keeps a sweep's results.

    ``runs/KEY.json`` holds each run that ended, ``logs/KEY.jsonl`` each run that began,
    ``unfinished/KEY.safetensors`` the state of long ones, ``failed/KEY.txt`` each traceback;
    rows.json and, where pyarrow is installed, rows.parquet hold all rows.

    Attributes:
        path: The folder.
    """

    path: Path

    def __post_init__(self) -> None:
        for name in ("runs", "logs", "unfinished", "failed"):
            folder = self.path / name
            folder.mkdir(parents=True, exist_ok=True)
            remove_partials(folder)

    def row(self, run: SweepRun) -> Row | None:
        """Read the result of a run, with the names that this sweep gives to task and model; None if
        it has not ended."""
        path = self._of(run.key)
        if not path.exists():
            return None
        content = read_json(path)
        if changed := "; ".join(differences(content.pop("run"), run.decisive)):
            raise ValueError(
                f"{path} is of another run ({changed}); choose another folder, or remove the file"
            )
        return Row.of({**content, "key": run.key, "task": run.task, "mixer": run.contender.label})

    def keep(self, run: SweepRun, result: Row | RunFailure) -> None:
        """Write the result of a run to disk, atomically."""
        failure = self.path / "failed" / f"{run.key}.txt"
        if isinstance(result, RunFailure):
            with atomic_file(failure) as new:
                new.write_text(result.trace, encoding="utf-8")
            return
        failure.unlink(missing_ok=True)
        write_json(self._of(run.key), {**asdict(result), "run": to_record(run.decisive)})

    def points(self, run: SweepRun) -> list[Point]:
        """Read the evaluations of a run that may not have ended."""
        rows = read_rows(self.path / "logs" / f"{run.key}.jsonl")
        return [Point(**{name: _or_nan(x) for name, x in row.items()}) for row in rows]

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows.json and rows.parquet, without curves."""
        flat = [row.flat() for row in rows]
        write_json(self.path / "rows.json", flat)
        if importlib.util.find_spec("pyarrow") is not None:
            _parquet(flat, self.path / "rows.parquet")

    def _of(self, key: str) -> Path:
        return self.path / "runs" / f"{key}.json"


class ProgressLines:
    """Writes a line to standard error for every run that has ended.

    Attributes:
        total: How many runs there are.
        ended: How many of them have ended.
    """

    def __init__(self, total: int) -> None:
        self.total, self.ended = total, 0

    def __call__(self, result: Row | RunFailure) -> None:
        self.ended += 1
        told = _failure(result) if isinstance(result, RunFailure) else _row(result)
        sys.stderr.write(f"{self.ended}/{self.total}  {told}\n")


def sweep(
    plan: SweepPlan,
    path: Path,
    pool: Pool = Local(),
    *,
    device: str = "cpu",
    listener: Callable[[Row | RunFailure], None] | None = None,
) -> list[Row]:
    """Run the plan, except for runs whose results are in `path` already, and return the rows in its
    order.

    Runs that ended with an error have no row. The sweep can be killed at any moment; the same call
    resumes it.

    Args:
        plan: What to train.
        path: The folder of the results.
        pool: Where the runs are computed.
        device: The device to train on, as PyTorch names it.
        listener: Called with every result of this call; None for a line about each on standard
            error.
    """
    runs = list(plan.runs())
    folder = SweepFolder(path)
    due = {run.key: run for run in runs if folder.row(run) is None}
    listener = listener or ProgressLines(len(due))
    try:
        for result in pool.results(list(due.values()), path, device) if due else ():
            run = result.run if isinstance(result, RunFailure) else due[result.key]
            folder.keep(run, result)
            listener(result)
    finally:
        rows = [row for run in runs if (row := folder.row(run)) is not None]
        folder.write(rows)
    return rows


def _row(row: Row) -> str:
    return (
        f"{row.mixer}, {row.task}, lr {row.rate:.2g}, seed {row.seed}: accuracy {row.accuracy:.3f}"
        f" after {row.step} updates, {row.seconds:.1f} s"
    )


def _failure(failure: RunFailure) -> str:
    run, reason = failure.run, failure.trace.strip().splitlines()[-1]
    return (
        f"{run.contender.label}, {run.task}, lr {run.rate:.2g}, seed {run.seed}: failed: {reason}"
    )


def _or_nan(number: Any) -> Any:
    """What `finite` wrote as None."""
    return math.nan if number is None else number


def _parquet(rows: Sequence[dict], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    with atomic_file(path) as new:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), new)
