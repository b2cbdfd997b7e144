"""A linearized model against its own softmax: time and memory of generation (LoLCATs, figure 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fastweights.linearize.evaluate.generation import CONTENDERS, GenerationRow
from fastweights.render.plots import PALETTE, canvas, label, legend, logarithmic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def memory_ratio(rows: Iterable[GenerationRow], contender: str = "linear") -> float:
    """Divide the state bytes after the most tokens by those after the fewest; the largest of all
    batches."""
    own = sorted((r for r in rows if r.contender == contender), key=lambda row: row.tokens)
    sizes = [[row.state_bytes for row in own if row.batch == b] for b in {r.batch for r in own}]
    return max(found[-1] / found[0] for found in sizes)


def crossover(rows: Iterable[GenerationRow], batch: int) -> int | None:
    """Return the number of generated tokens from which on the linear model has taken less time, or
    None."""
    seconds = {(row.contender, row.tokens): row.seconds for row in rows if row.batch == batch}
    counts = sorted({count for _, count in seconds}, reverse=True)
    found = None
    for count in counts:
        if seconds["linear", count] > seconds["softmax", count]:
            break
        found = count
    return found


def plot_generation(rows: Sequence[GenerationRow]) -> Figure:
    """Draw throughput against batch, and seconds and state bytes against generated tokens."""
    figure, axes = canvas(1, 3)
    first, least = min(row.tokens for row in rows), min(row.batch for row in rows)
    for color, contender in zip(PALETTE, CONTENDERS, strict=False):
        own = [row for row in rows if row.contender == contender]
        short = [row for row in own if row.tokens == first]
        single = [row for row in own if row.batch == least]
        line = {"color": color, "marker": "o", "markersize": 3, "label": contender}
        axes[0, 0].plot([row.batch for row in short], [row.throughput for row in short], **line)
        axes[0, 1].plot([row.tokens for row in single], [row.seconds for row in single], **line)
        axes[0, 2].plot(
            [row.tokens for row in single], [row.state_bytes / 2**20 for row in single], **line
        )
    label(axes[0, 0], f"{first} tokens after the prompt", "sequences", "tokens per second")
    label(axes[0, 1], f"{least} sequence{'s' * (least > 1)}", "generated tokens", "seconds")
    label(axes[0, 2], f"{least} sequence{'s' * (least > 1)}", "generated tokens", "state, MiB")
    for one in axes.flat:
        one.set_xscale("log", base=2)
        logarithmic(one)
        legend(one)
    return figure
