"""The training curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastweights.render.plots import PALETTE, canvas, label, legend
from fastweights.training.loop.files import write_figure
from fastweights.training.loop.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TRAIN, _VALIDATION = PALETTE[:2]
_RATE = "#767676"


def plot(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Write a PNG of the training loss (smoothed), the validation loss and the learning rate over
    steps.

    Args:
        rows: The run's metrics, one row per logged step.
        path: The file to write.
        title: Title of the picture.
    """
    figure, axes = canvas(2, width=5.2, height=1.8, sharex=True, height_ratios=[4, 1])
    loss, rate = axes[:, 0]
    _losses(loss, rows)
    label(loss, title, "", "loss [nats / token]")
    rate.plot(*_series(rows, "lr"), color=_RATE, linewidth=1.2)
    rate.set_ylim(0, None)
    label(rate, "", "step", "learning rate")
    write_figure(path, figure)


def smooth(values: np.ndarray) -> np.ndarray:
    """Average each value with its neighbours, in a Gaussian window of a fiftieth of the curve."""
    index = np.arange(len(values))
    distance = (index[:, None] - index) / max(1.0, len(values) / 50)
    weight = np.exp(-(distance**2) / 2)
    return weight @ values / weight.sum(1)


def _losses(axes: Axes, rows: Sequence[Row]) -> None:
    steps, loss = _series(rows, "loss")
    axes.plot(steps, loss, color=_TRAIN, alpha=0.25, linewidth=0.6)
    axes.plot(steps, smooth(loss), color=_TRAIN, linewidth=1.2, label="training (smoothed)")
    steps, validation = _series(rows, "val_loss")
    if len(steps):
        said = f"validation, {validation[-1]:.3f} at the end, {validation.min():.3f} at best"
        axes.plot(steps, validation, ".-", color=_VALIDATION, linewidth=1.2, label=said)
    legend(axes)


def _series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(row["step"], row[name]) for row in rows if name in row]
    steps, values = np.array(found, dtype=float).reshape(-1, 2).T
    return steps, values
