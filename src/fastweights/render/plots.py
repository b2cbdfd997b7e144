"""The look of all figures, and their bytes. matplotlib is imported when something is drawn."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (
    *("#4c78a8", "#d1495b", "#2e8b57", "#e09f3e", "#7b5ea7", "#4f9da6", "#a05a2c", "#767676"),
    *("#e58bc4", "#a3b018", "#1f2a56", "#79c7f2"),
)
HEAT = "magma_r"


def canvas(
    rows: int = 1, columns: int = 1, width: float = 3.6, height: float = 2.9, **shared: Any
) -> tuple[Figure, np.ndarray]:
    """(a figure, its axes ``[rows columns]``), each of them `width` × `height` inches, but as
    matplotlib's `subplots` divides the figure by what is `shared`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for one in axes.flat:
        tidy(one)
    return figure, axes


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.tick_params(which="both", labelsize=8)


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis that has numbers on it even where it spans less than a decade."""
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)


def legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=7)


def legend_beside(axes: Axes) -> None:
    """Where bars would lie under it."""
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
