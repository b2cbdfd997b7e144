"""What a run's page says of its judgement: shares, recall, samples, memory and speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastweights.linearize.evaluate.comparison import LINEAR, MODES, SINKS, SOFTMAX
from fastweights.linearize.evaluate.generation import GenerationRow
from fastweights.render.html import (
    ReportFigure,
    Row,
    figure,
    paragraph,
    section,
    table,
    text_table,
)
from fastweights.render.plots import PALETTE, canvas, label, legend
from fastweights.render.units import bytes_in_words

Rows = Sequence[Mapping[str, Any]]
LOWEST, HIGHEST = -0.5, 1.5
"""Of the shares in the picture."""


def share_section(evaluation: Mapping[str, Any], out: Path) -> str:
    """The share of a conversion, by position and by distance.

    Args:
        evaluation: What ``evaluation.json`` holds.
        out: The page's folder, for the picture.
    """
    intro = (
        "(window only − linear) / (window only − softmax), in nats per token: the share of what the"
        " window alone leaves open that the linear side closes. At 0 it does nothing, at 1 the"
        " model is as good as its softmax. Intervals are 95 %, by a bootstrap over sequences."
    )
    positions, recall = evaluation["share_by_position"], evaluation["recall"]
    caption = (
        "Left: by position, one octave of the tokens read before each. Middle: on passages of the"
        " validation text that are repeated so many tokens later, the second copy after its first"
        " tokens. Right: how many of these tokens have the highest probability. Points that lie"
        " outside of −0.5 … 1.5 are drawn at the edge; where the window alone loses too little to"
        " divide by there is no point. Distances behind the dotted line take sequences longer than"
        " those of the training."
    )
    picture = ReportFigure("share", "Share closed", caption, _draw_shares(positions, recall))
    body = (
        paragraph(share_in_words(evaluation))
        + figure(picture, "", out, titled=False)
        + table([_position_row(row) for row in positions])
    )
    return section("What the linear side does", intro, body)


def share_in_words(evaluation: Mapping[str, Any]) -> str:
    """Say the share with its interval, or why there is none, and that of an equal state."""
    return " ".join((_window_in_words(evaluation), *_equal_state_in_words(evaluation)))


def _window_in_words(evaluation: Mapping[str, Any]) -> str:
    if evaluation["share"] is None:
        return f"The share is undefined: {evaluation['share_details']['undefined']}."
    return f"The linear side closes {percent_with_interval(evaluation['share_details'])}."


def _equal_state_in_words(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Beside a window with sinks of as many bytes, if the model's own weights have stayed."""
    share = evaluation.get("share_of_equal_state")
    if share is None:
        return
    if share["share"] is None:
        yield f"Beside a window of equal state: {share['undefined']}."
        return
    better = "better" if share["share"] > 0 else "worse"
    yield (
        f"The model is {better} than a window with {SINKS} sinks that takes as many bytes"
        f" (StreamingLLM, nothing trained): it closes {percent_with_interval(share)} of what that"
        " leaves open."
    )


def recall_section(evaluation: Mapping[str, Any]) -> str:
    """Recall by distance."""
    intro = (
        "Passages of the validation text, repeated so many tokens later: the second copy after its"
        " first tokens. Accuracy is the fraction of them that have the highest probability."
    )
    left_out = "".join(
        paragraph(f"Distance {distance}: not measured, {why}.")
        for distance, why in evaluation["recall_left_out"].items()
    )
    recall = evaluation["recall"]
    tables = [table([part(row) for row in recall]) for part in (_accuracy_row, _nats_row)]
    return section("Recall", intro, ("".join(tables) if recall else "") + left_out)


def samples_section(evaluation: Mapping[str, Any]) -> str:
    """Continuations side by side."""
    intro = (
        "The same prompts from the validation text, continued by the likeliest token at every step,"
        " and by tokens drawn from the same seed."
    )
    rows = [
        {
            "": "drawn" if sample["drawn"] else "likeliest",
            **{name: sample[name] for name in ("prompt", SOFTMAX, LINEAR)},
        }
        for sample in evaluation["samples"]
    ]
    return section("Samples", intro, text_table(rows))


def memory_section(evaluation: Mapping[str, Any], speed: Sequence[GenerationRow]) -> str:
    """What caches take, and the tokens that were decoded per second.

    Args:
        evaluation: What ``evaluation.json`` holds.
        speed: What `short_bench` has measured; empty if it was not.
    """
    intro = (
        "The caches of one sequence, from their shapes. From"
        f" {evaluation['break_even']:,} tokens on the linear layers take less than they did. Speed"
        " is that of one sequence on the machine that wrote this page, over a few tokens:"
        " fastweights linearize bench measures it well."
    )
    sizes: list[Row] = [
        {
            "tokens": row["tokens"],
            **{f"{name} cache": bytes_in_words(row[name]) for name in (SOFTMAX, LINEAR)},
        }
        for row in evaluation["memory"]
    ]
    return section("Memory and speed", intro, table(sizes) + table(_speed_rows(speed)))


def _speed_rows(speed: Sequence[GenerationRow]) -> list[Row]:
    rows: dict[int, Row] = {}
    for found in speed:
        row = rows.setdefault(found.prompt, {"tokens read before": found.prompt})
        row[f"{found.contender}, tokens per second"] = 1 / found.last
    return list(rows.values())


def _position_row(row: Mapping[str, Any]) -> Row:
    span = str(row["from"]) if row["from"] == row["to"] else f"{row['from']} … {row['to']}"
    return {"tokens read before": span, **_share_cells(row)}


def _accuracy_row(row: Mapping[str, Any]) -> Row:
    accuracy = {name: f"{row[name]['accuracy']:.1%}" for name in MODES if name in row}
    beyond = "longer than training" if row["beyond_training"] else ""
    sizes = {"distance": row["distance"], "": beyond, "accuracy of tokens": row["tokens"]}
    return {**sizes, **accuracy}


def _nats_row(row: Mapping[str, Any]) -> Row:
    nats = {name: row[name]["nats_per_token"] for name in MODES if name in row}
    return {"distance": row["distance"], "nats per token": "", **nats, **_share_cells(row)}


def _share_cells(row: Mapping[str, Any]) -> Row:
    closed = "undefined" if row["share"] is None else percent_with_interval(row)
    return {
        "share": closed,
        "the window loses, nats": row["window_loses"],
        "± standard error": row["standard_error"],
    }


def percent_with_interval(row: Mapping[str, Any]) -> str:
    """Say a share, which is there, with its interval."""
    closed = f"{row['share']:.1%}"
    if row["interval"] is None:
        return closed
    low, high = row["interval"]
    least = "−∞" if low is None else f"{low:.1%}"
    return f"{closed} ({least} … {'∞' if high is None else f'{high:.1%}'})"


def _draw_shares(positions: Rows, recall: Rows) -> Figure:
    drawing, axes = canvas(1, 3, 3.7, 3.2)
    by_position = [((row["from"] * row["to"]) ** 0.5, row) for row in positions]
    _draw_share(axes[0, 0], by_position, "Share by position", "position (tokens read before)")
    by_distance = [(row["distance"], row) for row in recall]
    _draw_share(axes[0, 1], by_distance, "Share by distance", "distance (tokens)")
    _draw_recall(axes[0, 2], recall)
    beyond = [row["distance"] for row in recall if row["beyond_training"]]
    for panel in axes[0, 1:]:
        if beyond:
            panel.axvline(min(beyond) / 2**0.5, color="#767676", linestyle=":", linewidth=1)
    return drawing


def _draw_share(
    axes: Axes, points: Sequence[tuple[float, Mapping[str, Any]]], title: str, x: str
) -> None:
    """Points with their intervals, as far as there is a share."""
    label(axes, title, x, "share closed")
    for place, row in points:
        if row["share"] is not None:
            low, high = row["interval"] or (row["share"], row["share"])
            low, high = LOWEST if low is None else low, HIGHEST if high is None else high
            axes.plot([place] * 2, [_clip(low), _clip(high)], color=PALETTE[0], linewidth=1.2)
            axes.plot([place], [_clip(row["share"])], color=PALETTE[0], marker="o", markersize=4)
    for height in (0, 1):
        axes.axhline(height, color="#767676", linewidth=0.8)
    axes.set_ylim(LOWEST - 0.05, HIGHEST + 0.05)
    _octaves(axes, [place for place, _ in points])


def _clip(share: float) -> float:
    return min(max(share, LOWEST), HIGHEST)


def _draw_recall(axes: Axes, recall: Rows) -> None:
    label(axes, "Recall", "distance (tokens)", "accuracy")
    places = [row["distance"] for row in recall]
    for color, name in zip(PALETTE, MODES, strict=False):
        if recall and name in recall[0]:
            heights = [row[name]["accuracy"] for row in recall]
            axes.plot(places, heights, color=color, marker="o", markersize=3, label=name)
    axes.set_ylim(-0.03, 1.03)
    _octaves(axes, places)
    if recall:
        legend(axes)


def _octaves(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    if places:
        axes.set_xlim(min(places) / 1.4, max(places) * 1.4)
