"""Claims about tasks: models trained on a protocol, over learning rates and seeds, by the sweep
engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fastweights.lab.reproduce.claim import Experiment, Trial, TrialContext
from fastweights.lab.reproduce.measures import At, Measure, Measures
from fastweights.lab.sweep import (
    InProcess,
    Local,
    Row,
    SweepFolder,
    SweepModel,
    SweepPlan,
    best,
    sweep,
)
from fastweights.lab.tasks import FILES, Protocol

FIVE = (0, 1, 2, 3, 4)
UPDATES = "updates until solved"


@dataclass(frozen=True)
class TrainingBudget:
    """How a protocol is trained where that differs from its own; empty means as it says.

    Attributes:
        training: fields of `TrainingSettings`, such as fewer steps
        every: updates between evaluations where there are no epochs
    """

    seeds: tuple[int, ...] = FIVE
    rates: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    every: int = 100


@dataclass(frozen=True)
class ProtocolOnFile:
    """The protocol called `name` in `tasks.FILES`, on `file` of the user's data."""

    name: str
    file: str

    def read(self, context: TrialContext) -> Protocol:
        return FILES[self.name](context.file(self.file))


@dataclass(frozen=True)
class TaskTrial(Trial):
    """One model on one protocol: accuracies in per cent at the best learning rate, and updates
    until it was solved (all that were made where it never was).

    Attributes:
        contender: one of the protocol's, or a mixer's name, with `fields` of the configuration
            in place of its own
        macro: whether classes count alike, instead of labels
    """

    series: str
    x: At
    protocol: Protocol | ProtocolOnFile
    contender: str
    fields: Mapping[str, Any]
    effort: TrainingBudget
    macro: bool = False

    @property
    def name(self) -> str:
        return self.series + ("" if self.x is None else f" at {self.x}")

    def run(self, context: TrialContext) -> list[Measure]:
        plan, pool = (
            self._plan(context),
            InProcess() if context.workers == 1 else Local(context.workers),
        )
        rows = sweep(plan, context.shared / "sweep", pool, device=str(context.device))
        if len(rows) < len(list(plan.runs())):
            raise RuntimeError(
                f"runs of {self.name} failed; {context.shared / 'sweep' / 'failed'} says why"
            )
        return list(self._measures(rows))

    def minutes(self, context: TrialContext) -> float:
        folder = SweepFolder(context.shared / "sweep")
        rows = [folder.row(run) for run in self._plan(context).runs()]
        return (
            sum(row.seconds for row in rows if row is not None)
            / 60
            / (context.workers or os.cpu_count() or 1)
        )

    def _plan(self, context: TrialContext) -> SweepPlan:
        effort, protocol = self.effort, self.protocol
        return SweepPlan(
            tasks={
                self.name: protocol.read(context)
                if isinstance(protocol, ProtocolOnFile)
                else protocol
            },
            mixers=(SweepModel(self.series, self.contender, self.fields),),
            rates=effort.rates,
            decays=effort.decays,
            seeds=effort.seeds,
            training=effort.training,
            every=effort.every,
        )

    def _measures(self, rows: Sequence[Row]) -> Iterable[Measure]:
        chosen = best(rows)[0]
        for row in rows:
            if (row.rate, row.decay) == (chosen.rate, chosen.decay):
                yield Measure(
                    self.series,
                    100 * (row.macro if self.macro else row.accuracy),
                    self.x,
                    seed=row.seed,
                )
                yield Measure(
                    self.series,
                    row.steps if row.solved is None else row.solved,
                    self.x,
                    UPDATES,
                    row.seed,
                )


@dataclass(frozen=True)
class TaskExperiment(Experiment):
    """Trials on tasks; a series that was measured in several `columns` also has their mean, per
    seed.
    """

    cells: tuple[TaskTrial, ...]
    columns: tuple[str, ...] = ()

    def trials(self) -> Sequence[Trial]:
        return self.cells

    def summary(self, measures: Measures) -> Measures:
        if not self.columns:
            return measures
        rows = measures.of("")
        found = [m for series in rows.series for m in self._mean(rows, series)]
        return Measures([*measures, *found])

    def _mean(self, rows: Measures, series: str) -> list[Measure]:
        samples = [sample for column in self.columns if (sample := rows.sample(series, column))]
        if len(samples) < len(self.columns):
            return []
        seeds = zip(*(sample.values for sample in samples), strict=True)
        return [
            Measure(series, fmean(values), "average", seed=seed)
            for seed, values in enumerate(seeds)
        ]
