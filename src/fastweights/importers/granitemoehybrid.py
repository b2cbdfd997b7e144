"""Granite 4.0: Mamba-2 and softmax attention, with experts or without."""

from __future__ import annotations

from typing import Any

from fastweights.importers.attention import attention, projections
from fastweights.importers.experts import stacked_experts
from fastweights.importers.llama import OUTER
from fastweights.importers.mamba2 import hybrid_mamba2, mamba2_weights
from fastweights.importers.plan import (
    ImportPlan,
    Table,
    TensorSource,
    rows,
    scaled,
    shortest_period,
    stack_layers,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig


def granitemoehybrid(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Granite 4.0 checkpoint, its multipliers taken into the weights."""
    settings = source.settings
    d, biased = settings["hidden_size"], "qkvo" if settings["attention_bias"] else ""
    mamba = hybrid_mamba2(settings)
    softmax = attention(settings, rotary=settings["position_embedding_type"] == "rope")
    recurrent = mamba2_weights(mamba, d, "mamba", conv_bias=settings["mamba_conv_bias"])
    scores = settings["attention_multiplier"] * softmax["width"] ** 0.5
    attending = scaled(projections(biased), {"mixer.W_q.*": scores})
    kinds = {
        "linear_attention": (mamba, recurrent),
        "full_attention": ({**softmax, "bias": bool(biased)}, attending),
    }
    layers = [kinds[kind] for kind in settings["layer_types"]]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=d,
        num_hidden_layers=len(layers),
        mixers=shortest_period([mixer for mixer, _ in layers]),
        norm_eps=settings["rms_norm_eps"],
        hidden_act=settings["hidden_act"],
        intermediate_size=settings["shared_intermediate_size"],
        mlps=[_experts(settings)] if settings["num_local_experts"] else None,
        embedding_scale=settings["embedding_multiplier"],
    )
    block: Table = {
        "mixer_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        **_mlp_weights(source),
    }
    written = settings["residual_multiplier"]
    factors = {"mixer.W_o.*": written, "mlp.*W_3.weight": written}
    tables = [scaled({**block, **table}, factors) for _, table in layers]
    outer = scaled(OUTER, {"model.norm.weight": 1 / settings["logits_scaling"]})
    return ImportPlan(config, {**outer, **stack_layers(config, "model.layers", tables)})


def _experts(settings: Settings) -> dict[str, Any]:
    return {
        "name": "experts",
        "width": settings["intermediate_size"],
        "routing": {
            "count": settings["num_local_experts"],
            "chosen": settings["num_experts_per_tok"],
        },
        "shared": settings["shared_intermediate_size"],
    }


def _mlp_weights(source: CheckpointSource) -> Table:
    """Files have other names of the experts than models."""
    settings, sparse = source.settings, "block_sparse_moe"
    if not settings["num_local_experts"]:
        return _fused_mlp("mlp", settings["shared_intermediate_size"])
    files = any(name.endswith("router.layer.weight") for name in source.names)
    names = ("input_linear.weight", "output_linear.weight", "router.layer.weight")
    first, last, router = (
        names if files else ("experts.gate_up_proj", "experts.down_proj", "router.weight")
    )
    return {
        "mlp.router.W.weight": f"{sparse}.{router}",
        **stacked_experts(
            f"{sparse}.{first}",
            f"{sparse}.{last}",
            settings["num_local_experts"],
            settings["intermediate_size"],
        ),
        **_fused_mlp("mlp.shared", settings["shared_intermediate_size"]),
    }


def _fused_mlp(ours: str, width: int) -> Table:
    fused = "shared_mlp.input_linear.weight"
    return {
        f"{ours}.W_1.weight": TensorSource(fused, rows(0, width)),
        f"{ours}.W_2.weight": TensorSource(fused, rows(width, 2 * width)),
        f"{ours}.W_3.weight": "shared_mlp.output_linear.weight",
    }
