"""Mamba-2 as transformers (Codestral Mamba, mamba2-*-hf) and flash-linear-attention name its
weights."""

from __future__ import annotations

import math

from fastweights.importers.mamba import OUTER
from fastweights.importers.plan import (
    ConstantTensor,
    ImportPlan,
    Table,
    TensorSource,
    rows,
    stack_layers,
    taps,
)
from fastweights.importers.source import CheckpointSource
from fastweights.models import FastWeightsConfig


def mamba2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Mamba-2 checkpoint: a stack of Mamba-2 layers without MLPs."""
    settings = source.settings
    settings.require("use_bias", False)
    settings.require("hidden_act", "silu")
    for name in ("time_step_limit", "dt_limit"):
        settings.require(name, [0.0, math.inf], (0.0, math.inf))
    settings.require("rmsnorm", True)
    for name in ("D_has_hdim", "norm_before_gate"):
        settings.require(name, False)
    # flash-linear-attention calls it otherwise
    eps = settings.get("norm_eps", settings["layer_norm_epsilon"])
    heads, groups, state = settings["num_heads"], settings["n_groups"], settings["state_size"]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=[
            {
                "name": "mamba2",
                "heads": heads,
                "state": state,
                "expand": settings["expand"],
                "conv": settings["conv_kernel"],
                "groups": groups,
                "eps": eps,
            }
        ],
        norm_eps=eps,
        mlp=None,
        embedding_scale=1.0,
    )
    width = settings["expand"] * settings["hidden_size"]
    convolved = 2 * width + 2 * groups * state
    layer: Table = {
        "mixer_norm.weight": "norm.weight",
        "mixer.W_z.weight": TensorSource("mixer.in_proj.weight", rows(0, width)),
        "mixer.W_xBC.weight": TensorSource("mixer.in_proj.weight", rows(width, convolved)),
        "mixer.W_Delta.weight": TensorSource(
            "mixer.in_proj.weight", rows(convolved, convolved + heads)
        ),
        "mixer.W_Delta.bias": "mixer.dt_bias",
        "mixer.conv.weight": TensorSource("mixer.conv1d.weight", taps),
        "mixer.conv_bias": "mixer.conv1d.bias"
        if settings["use_conv_bias"]
        else ConstantTensor(0.0),
        "mixer.log_a": "mixer.A_log",
        "mixer.D": "mixer.D",
        "mixer.w_norm": "mixer.norm.weight",
        "mixer.W_o.weight": "mixer.out_proj.weight",
    }
    return ImportPlan(config, {**OUTER, **stack_layers(config, "backbone.layers", [layer])})
