"""Mamba as transformers names its weights (state-spaces/mamba-*-hf)."""

from __future__ import annotations

from fastweights.importers.plan import (
    ConstantTensor,
    ImportPlan,
    Table,
    TensorSource,
    linear,
    rows,
    stack_layers,
    taps,
)
from fastweights.importers.source import CheckpointSource
from fastweights.models import FastWeightsConfig

OUTER = {
    "model.embed_tokens.weight": TensorSource("backbone.embeddings.weight"),
    "model.norm.weight": TensorSource("backbone.norm_f.weight"),
    "lm_head.weight": TensorSource("lm_head.weight"),
}


def mamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Mamba checkpoint: a stack of Mamba layers without MLPs, with tied
    embeddings."""
    settings = source.settings
    settings.require("use_bias", False)
    settings.require("hidden_act", "silu")
    state, rank = settings["state_size"], settings["time_step_rank"]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=[
            {
                "name": "mamba",
                "state": state,
                "expand": settings["expand"],
                "conv": settings["conv_kernel"],
                "rank": rank,
            }
        ],
        norm_eps=settings["layer_norm_epsilon"],
        mlp=None,
        embedding_scale=1.0,
    )
    width = settings["expand"] * settings["hidden_size"]
    layer: Table = {
        "mixer_norm.weight": "norm.weight",
        "mixer.W_u.weight": TensorSource("mixer.in_proj.weight", rows(0, width)),
        "mixer.W_z.weight": TensorSource("mixer.in_proj.weight", rows(width, 2 * width)),
        "mixer.conv.weight": TensorSource("mixer.conv1d.weight", taps),
        "mixer.conv_bias": "mixer.conv1d.bias"
        if settings["use_conv_bias"]
        else ConstantTensor(0.0),
        "mixer.W_Delta_1.weight": TensorSource("mixer.x_proj.weight", rows(0, rank)),
        "mixer.W_B.weight": TensorSource("mixer.x_proj.weight", rows(rank, rank + state)),
        "mixer.W_C.weight": TensorSource(
            "mixer.x_proj.weight", rows(rank + state, rank + 2 * state)
        ),
        **linear("mixer.W_Delta_2", "mixer.dt_proj", bias=True),
        "mixer.log_A": "mixer.A_log",
        "mixer.D": "mixer.D",
        "mixer.W_o.weight": "mixer.out_proj.weight",
    }
    return ImportPlan(config, {**OUTER, **stack_layers(config, "backbone.layers", [layer])})
