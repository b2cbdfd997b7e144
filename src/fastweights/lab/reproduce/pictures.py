"""The forms of the papers' figures: curves over a size, and bars for the rows of a table."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastweights.lab.reproduce.claim import FLOOR, FigureForm
from fastweights.lab.reproduce.measures import At, Measures
from fastweights.render.plots import PALETTE, canvas, label, legend, legend_beside

MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Curves(FigureForm):
    """Curves through the medians, one per series, with the range over seeds behind them.

    There is a panel per quantity that was measured at several places.

    Attributes:
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        log: Axes with a logarithmic scale: "", "x", "y" or "xy".
    """

    x: str
    y: str
    log: str = ""

    def draw(self, measures: Measures, title: str) -> Figure:
        quantities = [
            name
            for name in measures.quantities
            if name != FLOOR and _numbers(measures.of(name).places())
        ]
        figure, axes = canvas(1, len(quantities), width=4.6, height=3.4)
        for panel, quantity in zip(axes[0], quantities, strict=True):
            self._panel(panel, measures.of(quantity), _series(measures, quantities))
            label(panel, quantity or title, self.x, "" if quantity else self.y)
        legend(axes[0][0])
        return figure

    def _panel(self, axes: Axes, measures: Measures, names: list[str]) -> None:
        """Series that it lacks are in its legend, too."""
        for number, series in enumerate(names):
            places = _numbers(measures.places(series))
            samples = [sample for x in places if (sample := measures.sample(series, x))]
            color = PALETTE[number % len(PALETTE)]
            marker = MARKERS[number // len(PALETTE) % len(MARKERS)]
            axes.plot(
                places,
                [s.median for s in samples],
                color=color,
                marker=marker,
                markersize=4,
                label=series,
            )
            axes.fill_between(
                places, [s.low for s in samples], [s.high for s in samples], color=color, alpha=0.15
            )
        if "x" in self.log:
            axes.set_xscale("log", base=2)
        if "y" in self.log:
            axes.set_yscale("log")


def _series(measures: Measures, quantities: Collection[str]) -> list[str]:
    """The series of all panels, whose order decides their colors in each."""
    return Measures(row for row in measures if row.quantity in quantities).series


def _numbers(places: Iterable[At]) -> list[float]:
    return [x for x in places if isinstance(x, int | float)]


@dataclass(frozen=True)
class Bars(FigureForm):
    """Bars at the medians, one per series in a group per column; every seed is a point.

    There is a panel per quantity; the floors of the main one are dotted lines on it.

    Attributes:
        y: Label of the vertical axis.
        log: Whether that axis has a logarithmic scale.
    """

    y: str
    log: bool = False

    def draw(self, measures: Measures, title: str) -> Figure:
        quantities = [name for name in measures.quantities if name != FLOOR]
        columns = max(len(measures.of(quantity).places()) for quantity in quantities)
        figure, axes = canvas(len(quantities), 1, width=max(4.6, 1.2 * columns + 2), height=3.2)
        for panel, quantity in zip(axes[:, 0], quantities, strict=True):
            self._panel(panel, measures.of(quantity), _series(measures, quantities))
            if quantity == "":
                self._floors(panel, measures)
            label(panel, quantity or title, "", "" if quantity else self.y)
        legend_beside(axes[0, 0])
        return figure

    def _panel(self, axes: Axes, measures: Measures, names: list[str]) -> None:
        places, count = measures.places(), len(measures.series)
        for number, series in enumerate(measures.series):
            color = PALETTE[names.index(series) % len(PALETTE)]
            found = [
                (i, sample) for i, x in enumerate(places) if (sample := measures.sample(series, x))
            ]
            at = [i + 0.8 * (number + 0.5) / count - 0.4 for i, _ in found]
            axes.bar(
                at, [s.median for _, s in found], 0.75 / count, color=color, alpha=0.7, label=series
            )
            for x, (_, sample) in zip(at, found, strict=True):
                axes.plot(
                    [x] * len(sample.values), sample.values, ".", color="black", markersize=2.5
                )
        axes.set_xticks(
            range(len(places)), ["" if x is None else str(x) for x in places], fontsize=7
        )
        if self.log:
            axes.set_yscale("log")

    def _floors(self, axes: Axes, measures: Measures) -> None:
        floors, places = measures.of(FLOOR), measures.of("").places()
        for row in floors:
            if row.x in places:
                at = places.index(row.x)
                axes.hlines(row.value, at - 0.45, at + 0.45, "black", "dotted", linewidth=0.8)


@dataclass(frozen=True)
class Marks(FigureForm):
    """A table of marks: a row per series and a column per place, ticked where the number is 1."""

    def draw(self, measures: Measures, title: str) -> Figure:
        rows = measures.of("")
        series, places = rows.series, rows.places()
        figure, axes = canvas(1, 1, width=4.6, height=0.2 * len(series) + 0.8)
        panel = axes[0, 0]
        for row in rows:
            at = places.index(row.x), series.index(row.series)
            mark, color = ("✓", PALETTE[2]) if row.value else ("✗", PALETTE[1])
            panel.text(*at, mark, ha="center", va="center", color=color, fontsize=8)
        panel.set_xticks(range(len(places)), [str(x) for x in places], fontsize=7)
        panel.set_yticks(range(len(series)), series, fontsize=7)
        panel.set_xlim(-0.5, len(places) - 0.5)
        panel.set_ylim(len(series) - 0.5, -0.5)
        label(panel, title, "", "")
        return figure
