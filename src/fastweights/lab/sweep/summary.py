"""The best learning rate of every model, and how its seeds spread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median, stdev

from fastweights.lab.sweep.trainer import Row


@dataclass(frozen=True)
class Best:
    """The results of a model of one size on one task, at its best learning rate and weight decay.

    The best are those with the highest mean test accuracy.

    Attributes:
        task: Name of the protocol.
        mixer: Label of the model.
        width: Hidden size.
        state: Bytes of its state; None for classifiers.
        parameters: Number of its parameters.
        rate: Learning rate.
        decay: Weight decay.
        accuracies: Accuracies of the seeds, ascending.
        solved: Median number of updates until the protocol's threshold, seeds that never passed it
            counted as infinite; None if the median is one of these.
        seconds: Seconds that all its runs took, at every setting.
    """

    task: str
    mixer: str
    width: int
    state: int | None
    parameters: int
    rate: float
    decay: float
    accuracies: tuple[float, ...]
    solved: float | None
    seconds: float

    @property
    def mean(self) -> float:
        return fmean(self.accuracies)

    @property
    def median(self) -> float:
        return median(self.accuracies)

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def best(rows: Iterable[Row]) -> list[Best]:
    """Select the best setting for each task, model and size, in the order of the rows."""
    rows = list(rows)
    groups = list(dict.fromkeys(map(_size, rows)))
    return [_best([row for row in rows if _size(row) == group]) for group in groups]


def _best(rows: list[Row]) -> Best:
    grid = sorted(rows, key=_setting)
    settings = [list(group) for _, group in groupby(grid, key=_setting)]
    chosen = max(settings, key=lambda group: fmean(row.accuracy for row in group))
    first = chosen[0]
    return Best(
        task=first.task,
        mixer=first.mixer,
        width=first.width,
        state=first.state,
        parameters=first.parameters,
        rate=first.rate,
        decay=first.decay,
        accuracies=tuple(sorted(row.accuracy for row in chosen)),
        solved=_median_steps_to_solve(chosen),
        seconds=sum(row.seconds for row in rows),
    )


def _median_steps_to_solve(rows: list[Row]) -> float | None:
    steps = median(float("inf") if row.solved is None else row.solved for row in rows)
    return None if steps == float("inf") else steps


def _size(row: Row) -> tuple[str, str, int, int | None]:
    return row.task, row.mixer, row.width, row.state


def _setting(row: Row) -> tuple[float, float]:
    return row.rate, row.decay
