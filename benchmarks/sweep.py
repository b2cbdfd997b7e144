"""A sweep of 60 small runs: one by one, and by processes of which the first sitting is ended
half-way.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fastweights.lab.bench.machine import commit
from fastweights.lab.sweep import (
    InProcess,
    Local,
    Pool,
    Row,
    RunFailure,
    SweepModel,
    SweepPlan,
    SweepRun,
    sweep,
)
from fastweights.lab.tasks import TASKS

MIXERS = ("linear", "metala", "gated_deltanet", "softmax")


class EndedError(Exception):
    """The first sitting is over."""


@dataclass(frozen=True)
class Half(Pool):
    """A pool that is ended after so many results."""

    pool: Pool
    left: int

    def results(
        self, runs: Sequence[SweepRun], logs: Path, device: str
    ) -> Iterator[Row | RunFailure]:
        for number, result in enumerate(self.pool.results(runs, logs, device), 1):
            yield result
            if number == self.left:
                raise EndedError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=60, help="updates of a run (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/sweep.json"))
    chosen = parser.parse_args()
    name = "mqar-small-32x4"
    mixers = tuple(map(SweepModel.of, MIXERS))
    training = {"steps": chosen.steps, "stop": None}
    plan = SweepPlan(
        {name: TASKS[name]},
        mixers,
        rates=(1e-3, 3e-3, 1e-2),
        seeds=tuple(range(5)),
        training=training,
    )
    with TemporaryDirectory() as folder:
        alone, rows = _timed(plan, Path(folder) / "alone", InProcess())
        first = _first_sitting(plan, Path(folder) / "pool", Local(chosen.workers))
        second, again = _timed(plan, Path(folder) / "pool", Local(chosen.workers))
    found = {
        "commit": commit(),
        "runs": len(rows),
        "steps": chosen.steps,
        "workers": chosen.workers,
        "seconds one by one": alone,
        "seconds in processes, ended half-way": first,
        "seconds in processes, the rest": second,
        "speed-up": alone / (first + second),
        "equal accuracies": [row.accuracy for row in rows] == [row.accuracy for row in again],
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


def _timed(plan: SweepPlan, folder: Path, pool: Pool) -> tuple[float, list[Row]]:
    began = time.perf_counter()
    rows = sweep(plan, folder, pool)
    return time.perf_counter() - began, rows


def _first_sitting(plan: SweepPlan, folder: Path, pool: Pool) -> float:
    began = time.perf_counter()
    try:
        sweep(plan, folder, Half(pool, 30))
    except EndedError:
        return time.perf_counter() - began
    raise RuntimeError("the first sitting was not ended")


if __name__ == "__main__":
    main()
