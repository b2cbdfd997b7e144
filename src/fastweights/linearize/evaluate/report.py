"""The report of a conversion: its costs, attention maps, losses by layer and damage by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fastweights.analysis.figures import tick_layers
from fastweights.analysis.profile import spread_evenly
from fastweights.linearize.convert.attention import attend_all
from fastweights.linearize.convert.modes import AttentionCall, Mode, has_window
from fastweights.linearize.evaluate.comparison import SOFTMAX, modes_in
from fastweights.linearize.evaluate.distances import teacher_map
from fastweights.linearize.evaluate.generation import short_bench
from fastweights.linearize.evaluate.judgement import (
    memory_section,
    recall_section,
    samples_section,
    share_section,
)
from fastweights.linearize.evaluate.logits import inputs_of, unwrap_adapters, without_adapters
from fastweights.models.evaluation import evaluation_mode
from fastweights.render.html import (
    ReportFigure,
    Row,
    figure,
    long_table,
    section,
    table,
    write_page,
)
from fastweights.render.plots import HEAT, PALETTE, canvas, label, legend
from fastweights.render.units import in_ranges
from fastweights.shapes import Map, Output
from fastweights.training.language.perplexity import PositionLoss, draw
from fastweights.training.loop.metrics import Metrics
from fastweights.training.loop.metrics import Row as MetricsRow
from fastweights.training.loop.report import Follow, unfollowed

SHOWN = 96
"""Tokens of an attention map, at most."""
LAYERS, HEADS = 4, 2


Parameters = Mapping[int, Mapping[str, Tensor]]
"""Of branches, by the layer and the name."""


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The attention weights of one layer, ``[h t t]`` each.

    Attributes:
        softmax: Those of softmax attention.
        trained: Those of the branch as it is.
        untrained: Those of the same branch with its initial parameters, or placed landmarks.
    """

    softmax: Map
    trained: Map
    untrained: Map


class MapRecorder(Mode):
    """A mode that passes softmax's output on and records every layer's maps of the first sequence.

    Args:
        placed: What branches had before training that `reset_parameters` does not give them, by
            layer and name.

    Attributes:
        maps: The maps by layer.
    """

    constant = False

    def __init__(self, placed: Parameters) -> None:
        self.placed = placed
        self.maps: dict[int, LayerMaps] = {}

    def attend(self, call: AttentionCall) -> Output:
        fresh = deepcopy(call.branch)
        fresh.reset_parameters()
        fresh.load_state_dict(self.placed.get(call.layer, {}), strict=False)
        record, before = call.record(), fresh.record(call.q, call.k, call.v, call.keep)
        if has_window(record):
            found = teacher_map(record), record.attention_map(), before.attention_map()
            self.maps[call.layer] = LayerMaps(*(phi[0] for phi in found))
        return call.softmax()


def record_maps(
    model: Any, inputs: Mapping[str, Tensor], placed: Mapping[int, Mapping[str, Tensor]] = {}
) -> dict[int, LayerMaps]:
    """Record the maps of all converted layers on one text, without adapters: as before stage
    two."""
    mode = MapRecorder(placed)
    cut = {name: x[:1, :SHOWN] for name, x in inputs_of(inputs, model.device).items()}
    with evaluation_mode(model), without_adapters(model):
        attend_all(unwrap_adapters(model), cut, mode)
    return mode.maps


def write_report(
    model: Any,
    inputs: Mapping[str, Tensor],
    run: Path,
    out: Path,
    landmarks: Mapping[str, Tensor] = {},
    follow: Follow = unfollowed,
) -> Path:
    """Write the report of a conversion as an HTML page, and its pictures as PNG files.

    Args:
        model: The converted model, whose attention maps are drawn.
        inputs: A text for the maps, as inputs of the model.
        run: The run's folder, whose JSON files hold the numbers.
        out: The folder that ``report.html`` is written to.
        landmarks: The landmarks that were placed, by the names of the model's parameters.
        follow: Told of what is timed.

    Returns:
        The page's path.
    """
    found = {path.stem: json.loads(path.read_text()) for path in sorted(run.glob("*.json"))}
    timed = short_bench(model, inputs["input_ids"].shape[1], follow)
    parts = [
        _costs(found, run, out),
        share_section(found["evaluation"], out),
        recall_section(found["evaluation"]),
        samples_section(found["evaluation"]),
        memory_section(found["evaluation"], timed),
        _plan(found["plan"], unwrap_adapters(model).config.linearize["analog"]),
        _maps(record_maps(model, inputs, _by_layer(landmarks, found["plan"])), out),
        _losses(_stages(found), run, out),
        _ranking(found.get("ranking"), out),
    ]
    title = f"{found['run']['model']}, linearized"
    intro = (
        "The softmax model beside its linearized version. Perplexities are per token of held-out"
        " text."
    )
    return write_page(title, intro, [part for part in parts if part], out)


def _by_layer(landmarks: Mapping[str, Tensor], plan: Mapping[str, Any]) -> Parameters:
    """Landmarks by the layer and the name in its branch."""
    prefixes = {site["layer"]: f"{site['path']}.linear_branch." for site in plan["converted"]}
    return {
        layer: {
            name.removeprefix(prefix): x for name, x in landmarks.items() if name.startswith(prefix)
        }
        for layer, prefix in prefixes.items()
    }


def _costs(found: Mapping[str, Any], run: Path, out: Path) -> str:
    stages = {"swapped": found["convert"]["linear"]}
    stages |= {f"after {n}": found[n]["linear"] for n in _stages(found) if n in found}
    evaluation = modes_in(found["evaluation"])
    on_all = {name: _on_all(row, evaluation[SOFTMAX]) for name, row in stages.items()}
    named: list[Row] = [{"model": name, **row} for name, row in (on_all | evaluation).items()]
    losses = {name: PositionLoss.load(run / "positions" / f"{name}.json") for name in evaluation}
    caption = (
        "Nats per token against the tokens read before, pooled in eighths of octaves. Where the"
        " curve without the linear side lies on the whole model's, the linear side does nothing."
    )
    picture = ReportFigure(
        "positions", "Loss by position", caption, draw(losses, reference="softmax")
    )
    intro = (
        "“linear” is the finished model; “window only” and “linear only” are the same model"
        " with one side taken away, which shows whether its linear attention is used or bypassed."
        " “window of equal state” is the softmax model with nothing but a window and its first"
        " tokens, in as many bytes (StreamingLLM): the yardstick of a conversion."
        " kl is KL(softmax ‖ model) in nats per token, agreement how often both choose the same"
        " token. Where a row names tokens, it has read no more, and what it loses on these is added"
        " to softmax's loss on all."
    )
    return section("What it costs", intro, table(named) + figure(picture, "", out))


def _on_all(row: Mapping[str, float], softmax: Mapping[str, float]) -> dict[str, float]:
    """A row of fewer tokens: what it loses on these, added to softmax's loss on all."""
    if "above_softmax" not in row:
        return dict(row)
    loss = softmax["nats_per_token"] + row["above_softmax"]
    kept = {name: row[name] for name in ("kl", "agreement", "tokens")}
    return {"perplexity": math.exp(loss), "nats_per_token": loss, **kept}


def _plan(plan: Mapping[str, Any], analog: Mapping[str, Any]) -> str:
    rows: list[Row] = [
        {"": "parameters", "number": plan["parameters"]},
        {"": "trained in stage one", "number": plan["branch"]},
        {"": "trained in stage two", "number": plan["adapter"]},
        {"": "state, bytes per sequence", "number": plan["state"]},
        {"": "cache before, bytes per token", "number": plan["cache_per_token"]},
        {"": "break-even length, tokens", "number": plan["break_even"]},
    ]
    intro = (
        "Below the break-even length the linear model takes more memory than the softmax model's"
        " cache."
    )
    heads = _heads(plan, analog)
    tables = table(rows) + table(_layers(plan)) + (long_table(heads) if heads else "")
    return section("What was converted", intro, tables)


def _heads(plan: Mapping[str, Any], analog: Mapping[str, Any]) -> list[Row]:
    """The windows and landmarks of key heads that have their own."""
    windows, columns = (analog.get(name, ()) for name in ("head_windows", "head_columns"))
    found = list[Row]()
    for layer in (site["layer"] for site in plan["converted"]) if windows else ():
        row: Row = {"layer": layer, "windows": ", ".join(map(str, windows[layer]))}
        if columns:
            row["landmarks"] = ", ".join(str(2 * count) for count in columns[layer])
        found.append(row)
    return found


def _layers(plan: Mapping[str, Any]) -> list[Row]:
    """The layers that are alike in a row each."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for site in plan["converted"]:
        facts = (site["heads"], site["kv_heads"], site["head_dim"], True, None)
        alike.setdefault(facts, []).append(site["layer"])
    for layer, why in plan["left"]:
        alike.setdefault((None, None, None, False, why), []).append(layer)
    columns = ("heads", "kv heads", "width", "linear", "why")
    return [
        {"layers": in_ranges(layers), **dict(zip(columns, facts, strict=True))}
        for facts, layers in alike.items()
    ]


def _maps(maps: Mapping[int, LayerMaps], out: Path) -> str:
    if not maps:
        return ""
    caption = (
        "Attention weights on one text: queries downwards, keys to the right. All maps have one"
        " scale, which is relative to the largest weight of each query. As TRUE and PRED in"
        " LoLCATs' Figures 3-6: softmax, the branch after attention transfer, and the branch"
        " before it."
    )
    picture = ReportFigure("maps", "Attention maps", caption, plot_maps(maps))
    return section("Attention", "", figure(picture, "", out, titled=False))


def plot_maps(maps: Mapping[int, LayerMaps]) -> Figure:
    """Draw softmax and the branch, trained and untrained, of a few layers and heads.

    Args:
        maps: The maps by layer; at least one.
    """
    layers = [sorted(maps)[i] for i in spread_evenly(len(maps), LAYERS)]
    drawing, axes = canvas(len(layers), 3 * HEADS, 2.1, 2.2)
    for row, layer in zip(axes, layers, strict=True):
        _draw_layer(row, layer, maps[layer])
    scale = ScalarMappable(Normalize(0, 1), HEAT)
    bar = drawing.colorbar(scale, ax=axes, shrink=0.6, aspect=40, pad=0.01)
    bar.set_label("weight / largest weight of the query (all maps)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    return drawing


def _draw_layer(row: Sequence[Axes], layer: int, maps: LayerMaps) -> None:
    """Three maps for each of a few heads, side by side."""
    heads = spread_evenly(maps.softmax.shape[0], HEADS)
    named = {
        "softmax": maps.softmax,
        "linear, trained": maps.trained,
        "linear, untrained": maps.untrained,
    }
    drawn = [(head, name, phi[head]) for head in heads for name, phi in named.items()]
    for axes, (head, name, phi) in zip(row, drawn, strict=False):
        label(axes, f"layer {layer}, head {head}\n{name}", "key (token)", "query (token)")
        _draw_map(axes, phi)
        axes.label_outer()
    for axes in row[len(drawn) :]:
        axes.set_visible(False)


def _draw_map(axes: Axes, phi: Tensor) -> None:
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.imshow(_relative(phi), cmap=HEAT, vmin=0, vmax=1, interpolation="nearest")


def _relative(phi: Tensor) -> np.ndarray:
    """Sizes of weights, every row divided by its largest."""
    size = phi.abs().float().cpu()
    top = size.amax(-1, keepdim=True)
    return torch.where(top > 0, size / top, 0).numpy()


def _stages(found: Mapping[str, Any]) -> list[str]:
    """The names of the recipe's stages."""
    return [stage["name"] for stage in found["run"]["recipe"]["stages"]]


def _losses(stages: Sequence[str], run: Path, out: Path) -> str:
    curves = {name: rows for name in stages if (rows := _rows(run / name))}
    if not curves:
        return ""
    drawing, axes = canvas(1, len(curves), 4.6, 3.2)
    last: list[Row] = []
    for place, (name, rows) in zip(axes[0], curves.items(), strict=True):
        layers = sorted(
            {key for row in rows for key in row if key.startswith("loss/")}, key=_number
        )
        if layers:
            _draw_by_layer(place, name, rows, layers)
        else:
            plot_adaptation(place, name, rows)
        last += [
            {"stage": name, "layer": _number(key), "last loss": _curve(rows, key)[1][-1].item()}
            for key in layers
        ]
    caption = (
        "The stages in their order: each layer's own loss (of transfer, the relative squared error"
        " of its output by default), or the loss of the whole model in training and the nats per"
        " token of held-out text."
    )
    picture = ReportFigure("losses", "Training", caption, drawing)
    return section("Training", "", figure(picture, "", out, titled=False) + long_table(last))


def _draw_by_layer(
    axes: Axes, name: str, rows: Sequence[Mapping[str, float]], layers: Sequence[str]
) -> None:
    """A curve for each layer, eight of them named."""
    named = {layers[i] for i in spread_evenly(len(layers), 8)}
    for number, key in enumerate(layers):
        axes.semilogy(
            *_curve(rows, key),
            color=matplotlib.colormaps["viridis"](0.88 * number / max(1, len(layers) - 1)),
            linewidth=1.1,
            label=key.replace("loss/", "layer ") if key in named else "_",
        )
    label(axes, name, "step", "loss of a layer")
    legend(axes)


def plot_adaptation(axes: Axes, name: str, rows: Sequence[Mapping[str, float]]) -> None:
    """The loss in training, and the cross-entropy of held-out text on an axis of its own: what is
    trained may be a distance from softmax.
    """
    held_out = axes.twinx()
    held_out.spines[["top", "left"]].set_visible(False)
    held_out.tick_params(labelsize=8)
    held_out.grid(visible=False)
    sides = {"loss": (axes, "loss in training"), "val_loss": (held_out, "nats / token, held-out")}
    for color, (key, (side, text)) in zip(PALETTE, sides.items(), strict=False):
        side.plot(*_curve(rows, key), color=color, linewidth=1.2, marker=".")
        label(side, name if side is axes else "", "step", text)
        side.yaxis.label.set_color(color)


def read_curve(out: Path) -> list[MetricsRow]:
    """Read the metrics of a training."""
    return Metrics(out / "metrics.jsonl", step=2**62).rows


def _rows(folder: Path) -> list[Mapping[str, float]]:
    """The curve of all layers together, or those of the blocks."""
    return [
        *read_curve(folder),
        *(row for block in sorted(folder.glob("block-*")) for row in read_curve(block)),
    ]


def _ranking(ranking: Mapping[str, Any] | None, out: Path) -> str:
    if ranking is None:
        return ""
    drawing, axes = canvas(1, 1, 5.2, 3.0)
    layers, damage = [int(layer) for layer in ranking["damage"]], list(ranking["damage"].values())
    colors = [PALETTE[1] if layer in ranking["softmax"] else PALETTE[0] for layer in layers]
    axes[0, 0].bar(layers, damage, color=colors)
    tick_layers(axes[0, 0], layers)
    label(axes[0, 0], f"Layers by {ranking['criterion']}", "layer", ranking["measure"])
    order = ", ".join(map(str, ranking["order"]))
    caption = (
        "What the linear attention of each layer costs, after transfer. Red layers are kept as"
        f" softmax. Order in which they are kept: {order}."
    )
    picture = ReportFigure("ranking", "Ranking", caption, drawing)
    return section("Layers", "", figure(picture, "", out, titled=False))


def _curve(rows: Sequence[Mapping[str, float]], name: str) -> tuple[np.ndarray, np.ndarray]:
    found = np.array(
        [(row["step"], row[name]) for row in rows if name in row], dtype=float
    ).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _number(name: str) -> int:
    return int(name.split("/")[1])
