"""Claims about tasks: models trained on a protocol, over learning rates and seeds, by the sweep
engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fastweights.lab.reproduce.claim import Recipe, Site, Trial
from fastweights.lab.reproduce.measures import At, Measure, Measures
from fastweights.lab.sweep import Contender, Folder, Here, Local, Plan, Row, best, sweep
from fastweights.lab.tasks import FILES, Protocol

FIVE = (0, 1, 2, 3, 4)
UPDATES = "updates until solved"


@dataclass(frozen=True)
class Effort:
    """How a protocol is trained where that differs from its own; empty means as it says.

    Attributes:
        training: fields of `Training`, such as fewer steps
        every: updates between evaluations where there are no epochs
    """

    seeds: tuple[int, ...] = FIVE
    rates: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    every: int = 100


@dataclass(frozen=True)
class Stored:
    """The protocol called `name` in `tasks.FILES`, on `file` of the user's data."""

    name: str
    file: str

    def read(self, site: Site) -> Protocol:
        return FILES[self.name](site.file(self.file))


@dataclass(frozen=True)
class Training(Trial):
    """One model on one protocol: accuracies in per cent at the best learning rate, and updates
    until it was solved (all that were made where it never was).

    Attributes:
        contender: one of the protocol's, or a mixer's name, with `fields` of the configuration
            in place of its own
        macro: whether classes count alike, instead of labels
    """

    series: str
    x: At
    protocol: Protocol | Stored
    contender: str
    fields: Mapping[str, Any]
    effort: Effort
    macro: bool = False

    @property
    def name(self) -> str:
        return self.series + ("" if self.x is None else f" at {self.x}")

    def run(self, site: Site) -> list[Measure]:
        plan, pool = self._plan(site), Here() if site.workers == 1 else Local(site.workers)
        rows = sweep(plan, site.shared / "sweep", pool, device=str(site.device))
        if len(rows) < len(list(plan.runs())):
            raise RuntimeError(
                f"runs of {self.name} failed; {site.shared / 'sweep' / 'failed'} says why"
            )
        return list(self._measures(rows))

    def minutes(self, site: Site) -> float:
        folder = Folder(site.shared / "sweep")
        rows = [folder.row(run) for run in self._plan(site).runs()]
        return (
            sum(row.seconds for row in rows if row is not None)
            / 60
            / (site.workers or os.cpu_count() or 1)
        )

    def _plan(self, site: Site) -> Plan:
        effort, protocol = self.effort, self.protocol
        return Plan(
            tasks={self.name: protocol.read(site) if isinstance(protocol, Stored) else protocol},
            mixers=(Contender(self.series, self.contender, self.fields),),
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
class Trainings(Recipe):
    """Trials on tasks; a series that was measured in several `columns` also has their mean, per
    seed.
    """

    cells: tuple[Training, ...]
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
