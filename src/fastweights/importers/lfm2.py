"""LFM2: gated short convolutions with grouped softmax attention between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastweights.importers.attention import HEAD_NORMS, attention, projections
from fastweights.importers.experts import experts
from fastweights.importers.llama import OUTER
from fastweights.importers.plan import (
    ImportPlan,
    Table,
    TensorSource,
    rename_missing,
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
PUBLISHED = {"gate": 1, "up": 3, "down": 2}
"""Parts of an expert → their numbers in files."""
FLOOR = 1e-6
"""What it adds to the sum that the weights of experts are divided by."""


def lfm2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an LFM2 checkpoint."""
    return _plan(source, _mlp_size(source.settings))


def lfm2_moe(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an LFM2 checkpoint with experts behind its first layers."""
    settings = source.settings
    width, dense = settings["intermediate_size"], settings["num_dense_layers"]
    kinds = [
        ({"name": "gated", "width": width}, MLP),
        (_experts(settings), _expert_weights(source)),
    ]
    mlps = [kinds[layer >= dense] for layer in range(settings["num_hidden_layers"])]
    plan = _plan(source, width, mlps)
    published = {rf"(\.experts\.\d+)\.{ours}_proj\.": rf"\1.w{n}." for ours, n in PUBLISHED.items()}
    return replace(plan, tensors=rename_missing(plan.tensors, source.names, published))


def _plan(
    source: CheckpointSource, width: int, mlps: Sequence[tuple[dict[str, Any], Table]] = ()
) -> ImportPlan:
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
        intermediate_size=width,
        mlps=shortest_period([mlp for mlp, _ in mlps]) if mlps else None,
        embedding_scale=1.0,
    )
    block: Table = {
        "mixer_norm.weight": "operator_norm.weight",
        "mlp_norm.weight": "ffn_norm.weight",
    }
    outer = {**OUTER, "model.norm.weight": TensorSource("model.embedding_norm.weight")}
    channels = [table for _, table in mlps] or [MLP] * len(layers)
    tables = [
        {**block, **table, **weights} for (_, weights), table in zip(layers, channels, strict=True)
    ]
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


def _experts(settings: Settings) -> dict[str, Any]:
    routing = {
        "count": settings["num_experts"],
        "chosen": settings["num_experts_per_tok"],
        "sigmoid": True,
        "normalized": settings["norm_topk_prob"],
        "floor": FLOOR if settings["norm_topk_prob"] else 0.0,
        "corrected": settings["use_expert_bias"],
        "scale": float(settings["routed_scaling_factor"]),
    }
    return {"name": "experts", "width": settings["moe_intermediate_size"], "routing": routing}


def _expert_weights(source: CheckpointSource) -> Table:
    settings = source.settings
    bias: Table = {"mlp.router.bias": "feed_forward.expert_bias"}
    return {
        "mlp.router.W.weight": "feed_forward.gate.weight",
        **(bias if settings["use_expert_bias"] else {}),
        **experts(
            source,
            "feed_forward.experts",
            settings["num_experts"],
            settings["moe_intermediate_size"],
        ),
    }


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
