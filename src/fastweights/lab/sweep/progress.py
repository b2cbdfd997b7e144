"""What a sweep tells while it runs."""

from __future__ import annotations

import sys

from fastweights.lab.sweep.pool import RunFailure
from fastweights.lab.sweep.trainer import Row


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
