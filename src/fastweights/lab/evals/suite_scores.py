"""The scores of a model on a paper's suite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastweights.lab.evals.suites import Suite
from fastweights.render.plots import PALETTE, canvas, label, legend, legend_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AS_THEY_ARE = ("perplexity", "bleu", "chrf", "ter", "brier_score", "likelihood")
"""Metrics that are no fractions."""


@dataclass(frozen=True)
class ColumnScore:
    """The score of a model in one column of a table, with one number of solved examples.

    Attributes:
        column: What the paper calls the column.
        task: What lm-evaluation-harness calls its task.
        metric: What it calls the metric.
        shots: Number of solved examples before an item.
        values: The score for each random choice of these, fractions as fractions.
        rows: Each item's own score in every one, where it has one.
        prompt: What the model read of the first item, and how it went on.
    """

    column: str
    task: str
    metric: str
    shots: int
    values: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...]
    prompt: tuple[str, str]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def spread(self) -> float | None:
        """The standard deviation over several choices of examples (MesaNet, Table 15), of one the
        standard error of the mean over items; None where neither is known."""
        if len(self.values) > 1:
            return float(np.std(self.values))
        rows = self.rows[0]
        if len(rows) < 2 or not np.isclose(np.mean(rows), self.mean):
            return None
        return float(np.std(rows, ddof=1) / len(rows) ** 0.5)

    @property
    def unit(self) -> float:
        """What a printed score is a multiple of: papers print fractions in percent."""
        return 1 if self.metric in _AS_THEY_ARE else 0.01

    @property
    def shown(self) -> str:
        """The score and its spread as papers print them."""
        spread = "" if self.spread is None else f" ± {self.spread / self.unit:.2f}"
        return f"{self.mean / self.unit:.2f}{spread}"


@dataclass(frozen=True)
class SuiteScores:
    """The scores of a model on a suite.

    Attributes:
        suite: The suite, as far as it was scored.
        scores: Its columns' scores.
    """

    suite: Suite
    scores: tuple[ColumnScore, ...]

    @property
    def averages(self) -> dict[str, float]:
        """The paper's averages, for each number of solved examples if columns have several; where
        columns are missing, their names say so."""
        if any(len(column.shots) > 1 for column in self.suite.columns):
            numbers = sorted({one.shots for one in self.scores})
            return {
                f"{name}, {shots} shots": mean
                for shots in numbers
                for name, mean in self._means([s for s in self.scores if s.shots == shots])
            }
        return dict(self._means(self.scores))

    def _means(self, scores: Sequence[ColumnScore]) -> Iterator[tuple[str, float]]:
        for name, columns in self.suite.averages.items():
            means = [one.mean for one in scores if one.column in columns]
            count = "" if len(means) == len(columns) else f" ({len(means)} of {len(columns)})"
            if means:
                yield name + count, float(np.mean(means))

    def record(self) -> dict[str, Any]:
        """Return all numbers, for a JSON file."""
        return {
            "source": self.suite.source,
            "scores": [
                {**asdict(one), "mean": one.mean, "spread": one.spread} for one in self.scores
            ],
            "averages": self.averages,
            "absent": dict(self.suite.absent),
            "notes": list(self.suite.notes),
        }


def draw(scores: Mapping[str, SuiteScores]) -> Figure:
    """Draw the models' scores: over the number of solved examples where there are several, else
    side by side.

    Args:
        scores: The models' scores on one suite, by name.
    """
    first = next(iter(scores.values())).scores
    if len({one.shots for one in first}) > 1:
        columns = list(dict.fromkeys(one.column for one in first))
        figure, axes = canvas(1, len(columns))
        for place, column in zip(axes[0], columns, strict=True):
            _draw_shots(place, column, scores)
        legend(axes[0, 0])
        return figure
    figure, axes = canvas(width=6.5, height=1.2 + 0.28 * len(first))
    for number, (name, one) in enumerate(scores.items()):
        _draw_columns(axes[0, 0], name, one.scores, PALETTE[number % len(PALETTE)])
    label(axes[0, 0], next(iter(scores.values())).suite.source, "score", "")
    legend_beside(axes[0, 0])
    return figure


def _draw_shots(axes: Axes, column: str, scores: Mapping[str, SuiteScores]) -> None:
    for name, one in scores.items():
        here = [each for each in one.scores if each.column == column]
        spreads = [(each.spread or 0) / each.unit for each in here]
        means = [each.mean / each.unit for each in here]
        places = range(len(here))
        axes.errorbar(places, means, spreads, marker="o", markersize=3, capsize=2, label=name)
        axes.set_xticks(places, [f"{each.shots}" for each in here])
        label(axes, column, "solved examples", here[0].metric)


def _draw_columns(axes: Axes, name: str, scores: Sequence[ColumnScore], color: str) -> None:
    shown = [one for one in scores if one.unit < 1] or list(scores)
    places = range(len(shown), 0, -1)
    means = [one.mean / one.unit for one in shown]
    spreads = [(one.spread or 0) / one.unit for one in shown]
    axes.errorbar(means, places, xerr=spreads, fmt="o", markersize=4, color=color, label=name)
    axes.set_yticks(places, [f"{one.column} ({one.metric})" for one in shown])
