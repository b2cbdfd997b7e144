"""LFM2: gated short convolutions with grouped softmax attention between them."""

from __future__ import annotations

from collections.abc import Sequence

from fastweights.importers.attention import HEAD_NORMS, attention, projections
from fastweights.importers.experts import NUMBERED, experts, mlps_of_layers
from fastweights.importers.plan import (
    ImportPlan,
    LayerPlan,
    Table,
    TensorSource,
    outer,
    plan_layers,
    rows,
    taps,
)
from fastweights.importers.source import CheckpointSource, Settings

MLP: Table = {
    f"mlp.W_{ours}.weight": f"feed_forward.w{theirs}.weight"
    for ours, theirs in {1: 1, 2: 3, 3: 2}.items()
}
FLOOR = 1e-6
"""What it adds to the sum that the weights of experts are divided by."""


def lfm2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an LFM2 checkpoint."""
    settings = source.settings
    layers = settings["num_hidden_layers"]
    mlp = {"name": "gated", "width": _mlp_size(settings)}
    return _plan(source, mlp["width"], [(mlp, MLP)] * layers)


def lfm2_moe(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an LFM2 checkpoint with experts behind its first layers."""
    settings = source.settings
    layers = range(settings["num_hidden_layers"])
    sparse = [layer >= settings["num_dense_layers"] for layer in layers]
    mlps = mlps_of_layers(source, sparse, MLP, _experts)
    return _plan(source, settings["intermediate_size"], mlps)


def _plan(source: CheckpointSource, width: int, mlps: Sequence[LayerPlan]) -> ImportPlan:
    settings = source.settings
    kinds = {"conv": _convolution(settings), "full_attention": _softmax(settings)}
    return plan_layers(
        source,
        [kinds[kind] for kind in settings["layer_types"]],
        {"mixer_norm.weight": "operator_norm.weight", "mlp_norm.weight": "ffn_norm.weight"},
        mlps=mlps,
        around=outer(norm="model.embedding_norm"),
        published=[NUMBERED],
        norm_eps=settings["norm_eps"],
        intermediate_size=width,
    )


def _convolution(settings: Settings) -> LayerPlan:
    d, biased = settings["hidden_size"], settings["conv_bias"]
    parts = ("weight", "bias")[: 1 + biased]
    fused = {"B": rows(0, d), "C": rows(d, 2 * d), "u": rows(2 * d)}
    return {"name": "shortconv", "conv": settings["conv_L_cache"], "bias": biased}, {
        **{
            f"mixer.W_{name}.{part}": TensorSource(f"conv.in_proj.{part}", convert)
            for name, convert in fused.items()
            for part in parts
        },
        **{f"mixer.W_o.{part}": f"conv.out_proj.{part}" for part in parts},
        "mixer.conv.weight": TensorSource("conv.conv.weight", taps),
        **({"mixer.conv_bias": "conv.conv.bias"} if biased else {}),
    }


def _softmax(settings: Settings) -> LayerPlan:
    theirs = {ours: str(name).replace("_norm", "_layernorm") for ours, name in HEAD_NORMS.items()}
    return {**attention(settings), "qk_norm": settings["norm_eps"]}, {
        **projections(""),
        **theirs,
        "mixer.W_o.weight": "self_attn.out_proj.weight",
    }


def _experts(source: CheckpointSource) -> LayerPlan:
    settings = source.settings
    count, width = settings["num_experts"], settings["moe_intermediate_size"]
    routing = {
        "count": count,
        "chosen": settings["num_experts_per_tok"],
        "sigmoid": True,
        "normalized": settings["norm_topk_prob"],
        "floor": FLOOR if settings["norm_topk_prob"] else 0.0,
        "corrected": settings["use_expert_bias"],
        "scale": float(settings["routed_scaling_factor"]),
    }
    bias: Table = {"mlp.router.bias": "feed_forward.expert_bias"}
    return {"name": "experts", "width": width, "routing": routing}, {
        "mlp.router.W.weight": "feed_forward.gate.weight",
        **(bias if settings["use_expert_bias"] else {}),
        **experts(source, "feed_forward.experts", count, width),
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
