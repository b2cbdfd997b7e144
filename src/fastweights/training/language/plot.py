"""The training curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastweights.training.loop.files import atomic_file
from fastweights.training.loop.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN, _VALIDATION, _RATE = "#4c78a8", "#d1495b", "#767676"


def plot(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Write a PNG of the training loss (smoothed), the validation loss and the learning rate over
    steps.

    Args:
        rows: The run's metrics, one row per logged step.
        path: The file to write.
        title: Title of the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    _losses(loss, rows)
    rate.plot(*_series(rows, "lr"), color=_RATE, linewidth=1.5)
    rate.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    for axes in (loss, rate):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    loss.set_title(title, fontsize=10, loc="left")
    with atomic_file(path) as new:
        figure.savefig(new, format="png")


def smooth(values: np.ndarray) -> np.ndarray:
    """Average each value with its neighbours, in a Gaussian window of a fiftieth of the curve."""
    index = np.arange(len(values))
    distance = (index[:, None] - index) / max(1.0, len(values) / 50)
    weight = np.exp(-(distance**2) / 2)
    return weight @ values / weight.sum(1)


def _losses(axes: Axes, rows: Sequence[Row]) -> None:
    steps, loss = _series(rows, "loss")
    axes.plot(steps, loss, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(loss), color=_TRAIN, linewidth=1.6, label="training (smoothed)")
    steps, validation = _series(rows, "val_loss")
    if len(steps):
        label = f"validation, {validation[-1]:.3f} at the end, {validation.min():.3f} at best"
        axes.plot(
            steps,
            validation,
            color=_VALIDATION,
            marker="o",
            markersize=3.5,
            linewidth=1.6,
            label=label,
        )
    axes.set_ylabel("loss [nats / token]")
    axes.legend(frameon=False)


def _series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(row["step"], row[name]) for row in rows if name in row]
    steps, values = np.array(found, dtype=float).reshape(-1, 2).T
    return steps, values
