"""RecurrentGemma, Griffin's open models, as transformers names their weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.importers.attention import attention, projections
from fastweights.importers.plan import (
    ImportPlan,
    Table,
    TensorSource,
    glu_mlp,
    linear,
    one_plus,
    outer,
    plan_layers,
    taps,
)
from fastweights.importers.source import CheckpointSource, Settings

RECURRENT: Table = {
    **linear("mixer.W_u", "temporal_block.linear_x", bias=True),
    **linear("mixer.W_g", "temporal_block.linear_y", bias=True),
    **linear("mixer.W_o", "temporal_block.linear_out", bias=True),
    "mixer.conv.weight": TensorSource("temporal_block.conv_1d.weight", taps),
    "mixer.conv_bias": "temporal_block.conv_1d.bias",
    "mixer.Lambda": TensorSource("temporal_block.rg_lru.recurrent_param", Tensor.neg),
    "mixer.W_a": "temporal_block.rg_lru.recurrent_gate_weight",
    "mixer.b_a": TensorSource("temporal_block.rg_lru.recurrent_gate_bias", Tensor.flatten),
    "mixer.W_x": "temporal_block.rg_lru.input_gate_weight",
    "mixer.b_x": TensorSource("temporal_block.rg_lru.input_gate_bias", Tensor.flatten),
}


def recurrent_gemma(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a RecurrentGemma checkpoint.

    Recurrent blocks and sliding-window attention alternate; MLPs are gated and have biases, and
    logits are capped.
    """
    settings = source.settings
    settings.require("hidden_activation", "gelu_pytorch_tanh")
    biased = "qkvo" if settings["attention_bias"] else "o"
    local = attention(settings, settings["attention_window_size"]) | {"bias": True}
    kinds = {
        "recurrent": (_recurrent(settings), RECURRENT),
        "attention": (local, projections(biased, "temporal_block")),
    }
    layers = settings["num_hidden_layers"]
    pattern = [kinds[kind] for kind in settings["block_types"]][:layers]
    block: Table = {
        "mixer_norm.weight": TensorSource("temporal_pre_norm.weight", one_plus),
        "mlp_norm.weight": TensorSource("channel_pre_norm.weight", one_plus),
        **glu_mlp("mlp_block", bias=True),
    }
    scale = torch.tensor(settings["hidden_size"] ** 0.5, dtype=torch.bfloat16)
    return plan_layers(
        source,
        [pattern[layer % len(pattern)] for layer in range(layers)],
        block,
        around=outer(norm="model.final_norm", convert=one_plus),
        norm_eps=settings["rms_norm_eps"],
        hidden_act=settings["hidden_activation"],
        intermediate_size=settings["intermediate_size"] // 2,
        mlp_bias=True,
        embedding_scale=scale.item(),
        logit_cap=settings["logits_soft_cap"],
    )


def _recurrent(settings: Settings) -> dict[str, Any]:
    return {
        "name": "rglru",
        "heads": settings["num_attention_heads"],
        "expand": settings["lru_width"] / settings["hidden_size"],
        "conv": settings["conv1d_width"],
        "whole_start": True,
    }
