"""A conversion as one HTML page and its PNG files: attention maps, losses per layer, perplexity by
position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from fastweights.analysis.figures import ReportFigure
from fastweights.analysis.profile import spread_evenly
from fastweights.analysis.report import Row, figure, section, table, write_page
from fastweights.linearize.convert.modes import AttentionCall, Mode
from fastweights.linearize.distill.adapt import unwrap_adapters, without_adapters
from fastweights.linearize.distill.fit import read_curve
from fastweights.linearize.distill.transfer import attend_all, teacher_map
from fastweights.recurrence import WindowedLinear
from fastweights.render.plots import HEAT, PALETTE, canvas, label, legend
from fastweights.runs.evaluation import evaluation_mode
from fastweights.shapes import Map, Output
from fastweights.train.perplexity import PositionLoss, draw

SHOWN = 96
"""Tokens of an attention map, at most."""
LAYERS, HEADS = 4, 2


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """Of one layer, ``[h t t]`` each: softmax's, the trained branch's, and those of the same branch
    untrained.
    """

    softmax: Map
    trained: Map
    untrained: Map


class MapRecorder(Mode):
    """Softmax, and meanwhile every layer's maps of the first sequence, in `maps` by layer."""

    constant = False

    def __init__(self) -> None:
        self.maps: dict[int, LayerMaps] = {}

    def attend(self, call: AttentionCall) -> Output:
        fresh = deepcopy(call.branch)
        fresh.reset_parameters()
        record, before = call.record(), fresh.record(call.q, call.k, call.v, call.keep)
        if isinstance(record, WindowedLinear):
            found = teacher_map(record), record.attention_map(), before.attention_map()
            self.maps[call.layer] = LayerMaps(*(phi[0] for phi in found))
        return call.softmax()


def maps_of(model: Any, inputs: Mapping[str, Tensor]) -> dict[int, LayerMaps]:
    """The maps of all converted layers on one text, as it stands before stage two: without
    adapters.
    """
    mode = MapRecorder()
    cut = {name: x[:1, :SHOWN].to(model.device) for name, x in inputs.items() if name != "labels"}
    with evaluation_mode(model), without_adapters(model):
        attend_all(unwrap_adapters(model), cut, mode)
    return mode.maps


def write_report(model: Any, inputs: Mapping[str, Tensor], run: Path, out: Path) -> Path:
    """``report.html`` and its PNG files in the folder `out`, from the numbers in the folder `run`;
    the page's path.
    """
    found = {path.stem: json.loads(path.read_text()) for path in sorted(run.glob("*.json"))}
    parts = [
        _costs(found, run, out),
        _plan(found["plan"]),
        _maps(maps_of(model, inputs), out),
        _losses(run, out),
        _ranking(found.get("ranking"), out),
    ]
    title = f"{found['run']['model']}, linearized"
    intro = (
        "A softmax model beside what became of it; perplexities are of held-out text, per token."
    )
    return write_page(title, intro, [part for part in parts if part], out)


def _costs(found: Mapping[str, Any], run: Path, out: Path) -> str:
    stages = {"swapped": found["convert"]["linear"]}
    stages |= {"after transfer": found["transfer"]["linear"]} if "transfer" in found else {}
    judged = found["evaluation"]
    named: list[Row] = [{"model": name, **row} for name, row in [*stages.items(), *judged.items()]]
    losses = {name: PositionLoss.load(run / "positions" / f"{name}.json") for name in judged}
    caption = (
        "Nats per token against the tokens read before, pooled in eighths of octaves. Where the"
        " curve without the linear side lies on the whole model's, the linear side does nothing."
    )
    picture = ReportFigure(
        "positions", "Loss by position", caption, draw(losses, reference="softmax")
    )
    intro = (
        "“linear” is the finished model; “window only” and “linear only” are it with one side taken"
        " away, which shows whether its linear attention is used or bypassed. kl is KL(softmax ‖"
        " model) in nats per token, agreement how often both choose the same token."
    )
    return section("What it costs", intro, table(named) + figure(picture, "", out))


def _plan(plan: Mapping[str, Any]) -> str:
    rows: list[Row] = [
        {"": "parameters", "number": plan["parameters"]},
        {"": "trained in stage one", "number": plan["branch"]},
        {"": "trained in stage two", "number": plan["adapter"]},
        {"": "state, bytes per sequence", "number": plan["state"]},
        {"": "cache before, bytes per token", "number": plan["cache_per_token"]},
        {"": "break-even length, tokens", "number": plan["break_even"]},
    ]
    sites: list[Row] = [
        {
            "layer": s["layer"],
            "heads": s["heads"],
            "kv heads": s["kv_heads"],
            "width": s["head_dim"],
            "linear": True,
        }
        for s in plan["converted"]
    ]
    sites += [{"layer": layer, "linear": False, "why": why} for layer, why in plan["left"]]
    intro = (
        "Below the break-even length the linear model takes more memory than the softmax model's"
        " cache."
    )
    return section("What was converted", intro, table(rows) + table(sites))


def _maps(maps: Mapping[int, LayerMaps], out: Path) -> str:
    if not maps:
        return ""
    layers = [sorted(maps)[i] for i in spread_evenly(len(maps), LAYERS)]
    drawing, axes = canvas(len(layers), 3 * HEADS, 2.1, 2.2)
    for row, layer in enumerate(layers):
        heads = spread_evenly(maps[layer].softmax.shape[0], HEADS)
        for column, head in enumerate(heads):
            trio = (maps[layer].softmax, maps[layer].trained, maps[layer].untrained)
            for place, (phi, name) in enumerate(
                zip(trio, ("softmax", "trained", "untrained"), strict=True)
            ):
                _map(
                    axes[row, 3 * column + place], phi[head], f"layer {layer}, head {head}\n{name}"
                )
        for one in axes[row, 3 * len(heads) :]:
            one.set_visible(False)
    caption = (
        "Attention weights, queries downwards and keys to the right, every row divided by its"
        " largest. TRUE and PRED of LoLCATs' Figures 3-6: softmax, the branch after attention"
        " transfer, and the branch before it."
    )
    picture = ReportFigure("maps", "Attention maps", caption, drawing)
    return section("Attention", "", figure(picture, "", out, titled=False))


def _map(axes: Axes, phi: Tensor, title: str) -> None:
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_yticks([])
    size = phi.abs().float().cpu()
    top = size.amax(-1, keepdim=True)
    axes.imshow(
        torch.where(top > 0, size / top, 0).numpy(),
        cmap=HEAT,
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axes.set_title(title, fontsize=7, loc="left")


def _losses(run: Path, out: Path) -> str:
    transfer, finetune = _transfer_rows(run / "transfer"), read_curve(run / "finetune")
    if not transfer and not finetune:
        return ""
    drawing, axes = canvas(1, 2, 4.6, 3.2)
    layers = sorted(
        {name for row in transfer for name in row if name.startswith("loss/")}, key=_number
    )
    for number, name in enumerate(layers):
        color = matplotlib.colormaps["viridis"](0.88 * number / max(1, len(layers) - 1))
        shown = (
            name
            if _number(name) in [_number(layers[i]) for i in spread_evenly(len(layers), 8)]
            else "_"
        )
        axes[0, 0].semilogy(
            *_curve(transfer, name),
            color=color,
            linewidth=1.1,
            label=shown.replace("loss/", "layer "),
        )
    for place, name in enumerate(("loss", "val_loss")):
        text = "training" if name == "loss" else "validation"
        axes[0, 1].plot(
            *_curve(finetune, name),
            color=PALETTE[place],
            linewidth=1.2,
            marker="." * place,
            label=text,
        )
    label(axes[0, 0], "Attention transfer", "step", "loss of a layer")
    label(axes[0, 1], "Adaptation", "step", "nats / token")
    for one, curve in zip(axes[0], (transfer, finetune), strict=True):
        if curve:
            legend(one)
    caption = (
        "Left: each layer's loss, relative squared error of its output unless chosen otherwise."
        " Right: stage two."
    )
    figures: list[Row] = [
        {"layer": _number(n), "last loss": _curve(transfer, n)[1][-1].item()} for n in layers
    ]
    body = figure(
        ReportFigure("losses", "Training", caption, drawing), "", out, titled=False
    ) + table(figures)
    return section("Training", "", body)


def _transfer_rows(folder: Path) -> list[Mapping[str, float]]:
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
    axes[0, 0].set_xticks(layers)
    label(axes[0, 0], "Damage of a layer", "layer", "KL(softmax ‖ only this layer linear)")
    caption = (
        "Nats per token, after transfer. Red: kept as softmax. The layers to keep first are the"
        " highest bars."
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
