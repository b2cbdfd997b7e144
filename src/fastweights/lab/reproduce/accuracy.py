"""Claims about tasks: models trained by a protocol, over learning rates and seeds, by the sweep
engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any

from fastweights.lab.reproduce.claim import (
    FIVE,
    FLOOR,
    Experiment,
    OtherSettings,
    Scale,
    Trial,
    TrialContext,
    require_apart,
)
from fastweights.lab.reproduce.measures import At, Measure, Measures
from fastweights.lab.sweep import (
    AllProcesses,
    InProcess,
    Local,
    Pool,
    Row,
    SweepFolder,
    SweepModel,
    SweepPlan,
    best,
    sweep,
)
from fastweights.lab.tasks import FILES, Protocol

UPDATES = "updates until solved"
MARGIN, SOLVED = 5.0, 99.0
"""Points above its floor from which on a task is being learnt, and where it is solved."""


@dataclass(frozen=True)
class TrainingBudget:
    """The settings in which the training of a claim differs from its protocol; empty ones mean the
    protocol's.

    Attributes:
        seeds: Seeds of the runs.
        rates: Learning rates.
        decays: Weight decays.
        tuning: Seeds of the runs by which rate and decay are chosen; none for `seeds` themselves,
            which flatters a model with a large spread.
        training: Fields of `TrainingSettings`, such as fewer steps.
        every: Updates between evaluations where there are no epochs.

    Raises:
        ValueError: If a seed both chooses and is judged.
    """

    seeds: tuple[int, ...] = FIVE
    rates: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    tuning: tuple[int, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    every: int = 100

    def __post_init__(self) -> None:
        require_apart(self.tuning, self.seeds)


@dataclass(frozen=True)
class ProtocolOnFile:
    """A protocol that reads the user's data.

    Attributes:
        name: Name of the protocol in `tasks.FILES`.
        file: Name of the file or folder in the user's data.
    """

    name: str
    file: str

    def read(self, context: TrialContext) -> Protocol:
        """Return the protocol on the user's file."""
        return FILES[self.name](context.file(self.file))


@dataclass(frozen=True)
class TaskTrial(Trial):
    """A trial of one model on one protocol.

    It measures accuracies in per cent at the best learning rate, and updates until the task was
    solved (all updates where it never was).

    Attributes:
        series: Name of the model in the figure.
        x: Place on the curve, or column of the table; several, one for each segment of the test
            set.
        protocol: The protocol.
        contender: One of the protocol's models, or a mixer's name.
        fields: Fields of the configuration that replace the protocol's.
        effort: The settings in which training differs from the protocol.
        macro: Whether classes count alike, instead of labels.
    """

    series: str
    x: At | tuple[At, ...]
    protocol: Protocol | ProtocolOnFile
    contender: str
    fields: Mapping[str, Any]
    effort: TrainingBudget
    macro: bool = False

    @property
    def name(self) -> str:
        return self.series + ("" if self.x is None else f" at {self.x}")

    @property
    def files(self) -> tuple[str, ...]:
        return (self.protocol.file,) if isinstance(self.protocol, ProtocolOnFile) else ()

    def run(self, context: TrialContext) -> list[Measure]:
        return list(self._measures(self._sweep(self.tuned_plan(context), context)))

    def tuned_plan(self, context: TrialContext) -> SweepPlan:
        """Plan the runs that are judged, at the rate and decay that other seeds have chosen, whose
        runs are made first."""
        if not self.effort.tuning:
            return self._plan(context)
        chosen = best(self._sweep(self._tuning(context), context))[0]
        return replace(self._plan(context), rates=(chosen.rate,), decays=(chosen.decay,))

    def minutes(self, context: TrialContext) -> float:
        folder, plans = SweepFolder(context.shared / "sweep"), [self._plan(context)]
        if self.effort.tuning:
            plans.append(self._tuning(context))
        rows = [folder.row(run) for plan in plans for run in plan.runs()]
        return (
            sum(row.seconds for row in rows if row is not None)
            / 60
            / (context.workers or os.cpu_count() or 1)
        )

    def _sweep(self, plan: SweepPlan, context: TrialContext) -> list[Row]:
        pool: Pool = InProcess() if context.workers == 1 else Local(context.workers)
        pool = AllProcesses(context.processes) if context.processes.count > 1 else pool
        rows = sweep(plan, context.shared / "sweep", pool, device=str(context.device))
        if len(rows) < len(list(plan.runs())):
            raise RuntimeError(
                f"runs of {self.name} failed; {context.shared / 'sweep' / 'failed'} says why"
            )
        return rows

    def _tuning(self, context: TrialContext) -> SweepPlan:
        """Its accuracies are those where checkpoints are chosen, which may not be where models are
        judged: a rate is not to be that of the best luck beyond the trained length."""
        plan = self._plan(context)
        tasks = {
            name: one if one.validation is None else replace(one, test=one.validation)
            for name, one in plan.tasks.items()
        }
        return replace(plan, tasks=tasks, seeds=self.effort.tuning)

    def floors(self, context: TrialContext) -> list[Measure]:
        """Measure the floors of its task, in per cent."""
        whole = self._protocol(context)
        alone = (
            [(x, replace(whole, test=(part,))) for x, part in zip(self.x, whole.test, strict=True)]
            if isinstance(self.x, tuple)
            else [(self.x, whole)]
        )
        return [
            Measure(name, 100 * value, x, FLOOR)
            for x, part in alone
            for name, value in part.floors(self.macro).items()
        ]

    @property
    def rates(self) -> int:
        """The number of learning rates to choose from."""
        if self.effort.rates or isinstance(self.protocol, ProtocolOnFile):
            return max(1, len(self.effort.rates))
        return len(self.protocol.training.rates)

    def _protocol(self, context: TrialContext) -> Protocol:
        one = self.protocol
        return one.read(context) if isinstance(one, ProtocolOnFile) else one

    def _plan(self, context: TrialContext) -> SweepPlan:
        effort = self.effort
        return SweepPlan(
            tasks={self.name: self._protocol(context)},
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
            if (row.rate, row.decay) != (chosen.rate, chosen.decay):
                continue
            updates = row.steps if row.solved is None else row.solved
            for x, accuracy in self._accuracies(row):
                yield Measure(self.series, 100 * accuracy, x, seed=row.seed)
                yield Measure(self.series, updates, x, UPDATES, row.seed)

    def _accuracies(self, row: Row) -> Iterable[tuple[At, float]]:
        if isinstance(self.x, tuple):
            return zip(self.x, row.parts, strict=True)
        return [(self.x, row.macro if self.macro else row.accuracy)]


@dataclass(frozen=True)
class TaskExperiment(Experiment):
    """An experiment of trials on tasks.

    Attributes:
        cells: The trials.
        columns: Places whose mean is added, per seed, for series that were measured at several of
            them.
    """

    trains_together = True
    cells: tuple[TaskTrial, ...]
    columns: tuple[str, ...] = ()

    def trials(self) -> Sequence[Trial]:
        return self.cells

    @property
    def rates(self) -> int:
        return min(cell.rates for cell in self.cells)

    @property
    def scale(self) -> Scale:
        return Scale(margin=MARGIN, ceiling=SOLVED)

    def floors(self, context: TrialContext) -> list[Measure]:
        one_at_each = {cell.x: cell for cell in self.cells}
        found = [row for cell in one_at_each.values() for row in cell.floors(context)]
        if not self.columns:
            return found
        highest = [max(row.value for row in found if row.x == column) for column in self.columns]
        return [*found, Measure("the highest of each task", fmean(highest), "average", FLOOR)]

    def with_settings(self, other: OtherSettings) -> TaskExperiment:
        changes = {name: value for name, value in other.given.items() if name != "steps"}

        def changed(effort: TrainingBudget) -> TrainingBudget:
            training = {name: value for name, value in effort.training.items() if name != "epochs"}
            steps: dict[str, Any] = (
                {} if other.steps is None else {"training": {**training, "steps": other.steps}}
            )
            return replace(effort, **changes, **steps)

        return replace(
            self, cells=tuple(replace(cell, effort=changed(cell.effort)) for cell in self.cells)
        )

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
        values = zip(*(sample.values for sample in samples), strict=True)
        return [
            Measure(series, fmean(some), "average", seed=seed)
            for seed, some in zip(samples[0].seeds, values, strict=True)
        ]


def train_each(
    models: Mapping[str, Mapping[str, Any]],
    columns: Mapping[Any, Protocol | ProtocolOnFile],
    effort: TrainingBudget,
    *,
    contender: str = "",
    macro: bool = False,
    averaged: bool = False,
) -> TaskExperiment:
    """Return the experiment that trains every model at every column.

    Args:
        models: Fields of the models by series.
        columns: The protocols by column, or by place on a curve.
        effort: The settings in which training differs from the protocols.
        contender: The model of the protocols whose fields the others replace; "" for the one with
            the name of the series.
        macro: Whether classes count alike, instead of labels.
        averaged: Whether the mean over the columns is added.
    """
    cells = product(columns.items(), models.items())
    runs = (
        TaskTrial(s, x, protocol, contender or s, own, effort, macro)
        for (x, protocol), (s, own) in cells
    )
    return TaskExperiment(tuple(runs), tuple(columns) if averaged else ())
