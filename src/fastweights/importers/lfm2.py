"""LFM2: gated short convolutions with grouped softmax attention between them."""

from __future__ import annotations

from typing import Any

from fastweights.importers.attention import HEAD_NORMS, attention, projections
from fastweights.importers.llama import OUTER
from fastweights.importers.plan import (
    ImportPlan,
    Table,
    TensorSource,
    rows,
    shortest_period,
    stack_layers,
    taps,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

MLP: Table = {
    f"mlp.W_{ours}.weight": f"feed_forward.w{theirs}.weight"
    for ours, theirs in {1: 1, 2: 3, 3: 2}.items()
}


def lfm2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an LFM2 checkpoint."""
    settings = source.settings
    kinds = {
        "conv": (_convolution(settings), _convolution_weights(settings)),
        "full_attention": (_softmax(settings), _softmax_weights()),
    }
    layers = [kinds[kind] for kind in settings["layer_types"]]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=len(layers),
        mixers=shortest_period([mixer for mixer, _ in layers]),
        norm_eps=settings["norm_eps"],
        intermediate_size=_mlp_size(settings),
        embedding_scale=1.0,
    )
    block: Table = {
        "mixer_norm.weight": "operator_norm.weight",
        "mlp_norm.weight": "ffn_norm.weight",
        **MLP,
    }
    outer = {**OUTER, "model.norm.weight": TensorSource("model.embedding_norm.weight")}
    tables = [{**block, **weights} for _, weights in layers]
    return ImportPlan(config, {**outer, **stack_layers(config, "model.layers", tables)})


def _convolution(settings: Settings) -> dict[str, Any]:
    return {"name": "shortconv", "conv": settings["conv_L_cache"], "bias": settings["conv_bias"]}


def _convolution_weights(settings: Settings) -> Table:
    d, biased = settings["hidden_size"], settings["conv_bias"]
    parts = ("weight", "bias")[: 1 + biased]
    fused = {"B": rows(0, d), "C": rows(d, 2 * d), "u": rows(2 * d)}
    return {
        **{
            f"mixer.W_{name}.{part}": TensorSource(f"conv.in_proj.{part}", convert)
            for name, convert in fused.items()
            for part in parts
        },
        **{f"mixer.W_o.{part}": f"conv.out_proj.{part}" for part in parts},
        "mixer.conv.weight": TensorSource("conv.conv.weight", taps),
        **({"mixer.conv_bias": "conv.conv.bias"} if biased else {}),
    }


def _softmax(settings: Settings) -> dict[str, Any]:
    return {**attention(settings), "qk_norm": settings["norm_eps"]}


def _softmax_weights() -> Table:
    theirs = {ours: str(name).replace("_norm", "_layernorm") for ours, name in HEAD_NORMS.items()}
    return {**projections(""), **theirs, "mixer.W_o.weight": "self_attn.out_proj.weight"}


def _mlp_size(settings: Settings) -> int:
    """The width as LFM2 adjusts it: two thirds, times a factor, the next multiple of a number."""
    width = settings["intermediate_size"]
    if not settings["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    if settings["block_ffn_dim_multiplier"] is None:
        return width
    multiple = settings["block_multiple_of"]
    return multiple * -(-int(settings["block_ffn_dim_multiplier"] * width) // multiple)
