"""Figures of a sweep: accuracy against width, state or learning rate, a line per model, seeds as a
band."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastweights.lab.sweep.summary import Best, best
from fastweights.lab.sweep.trainer import Row
from fastweights.render.plots import PALETTE, canvas, label, legend


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a figure of accuracies.

    Attributes:
        title: Label of the axis.
        of: Returns the place of a result on the axis.
        tuned: True to draw each size at its best learning rate only; False to draw every rate.
    """

    title: str
    of: Callable[[Best], float]
    tuned: bool = True

    def points(self, rows: Sequence[Row]) -> list[Best]:
        """Select the results that are drawn."""
        if self.tuned:
            return best(rows)
        rates = sorted({row.rate for row in rows})
        return [one for rate in rates for one in best(row for row in rows if row.rate == rate)]

    def separates(self, rows: Sequence[Row]) -> bool:
        """Whether the results have at least two different places on this axis."""
        return len({self.of(one) for one in self.points(rows)}) > 1


AXES: dict[str, Axis] = {
    "width": Axis("model width d", lambda one: one.width),
    "state": Axis("state [bytes per sequence]", lambda one: one.state or np.nan),
    "rate": Axis("learning rate", lambda one: one.rate, tuned=False),
}


def draw(rows: Iterable[Row], axis: Axis) -> Figure:
    """Draw one panel per task: mean test accuracy over seeds, and a band from the worst to the
    best."""
    rows = list(rows)
    tasks = list(dict.fromkeys(row.task for row in rows))
    figure, panels = canvas(1, len(tasks))
    for panel, task in zip(panels[0], tasks, strict=True):
        _panel(panel, axis.points([row for row in rows if row.task == task]), axis)
        label(panel, task, axis.title, "accuracy")
    legend(panels[0][0])
    return figure


def _panel(panel: Axes, found: Sequence[Best], axis: Axis) -> None:
    for number, mixer in enumerate(dict.fromkeys(one.mixer for one in found)):
        line = sorted((one for one in found if one.mixer == mixer), key=axis.of)
        color, x = PALETTE[number % len(PALETTE)], [axis.of(one) for one in line]
        panel.plot(
            x, [one.mean for one in line], color=color, marker="o", markersize=3.5, label=mixer
        )
        low, high = ([edge(one.accuracies) for one in line] for edge in (min, max))
        panel.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        panel.vlines(x, low, high, color=color, alpha=0.5, linewidth=1)
    panel.set_xscale("log")
    panel.set_ylim(0, 1.03)
