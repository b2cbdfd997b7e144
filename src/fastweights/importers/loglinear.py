"""Log-linear Mamba-2 as flash-linear-attention names its weights."""

from __future__ import annotations

import math

from fastweights.importers.fla import swiglu_width
from fastweights.importers.mamba import OUTER
from fastweights.importers.plan import (
    ConstantTensor,
    ImportPlan,
    Table,
    TensorSource,
    glu_mlp,
    rows,
    stack_layers,
    taps,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig


def log_linear_mamba2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a log-linear Mamba-2 checkpoint, whose layers have a SwiGLU."""
    settings = source.settings
    for name in ("use_bias", "D_has_hdim", "norm_before_gate"):
        settings.require(name, False)
    settings.require("rmsnorm", True)
    settings.require("hidden_act", "silu", "swish")
    settings.require("dt_limit", [0.0, math.inf], (0.0, math.inf))
    settings.require("attnres_block_size", None)
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=[
            {
                "name": "loglinear_mamba2",
                "heads": settings["num_heads"],
                "state": settings["state_size"],
                "expand": settings["expand"],
                "conv": settings["conv_kernel"],
                "groups": settings["n_groups"],
                "levels": LEVELS,
                "eps": settings["norm_eps"],
            }
        ],
        norm_eps=settings["norm_eps"],
        intermediate_size=swiglu_width(settings["hidden_size"], 4),
        embedding_scale=1.0,
    )
    return ImportPlan(
        config, {**OUTER, **stack_layers(config, "backbone.layers", [_layer(settings)])}
    )


LEVELS = 15
"""Its models have as many, for 2^14 tokens."""


def _layer(settings: Settings) -> Table:
    """Z, (x, B, C), Δ and λ of all heads are rows of one matrix, in this order."""
    heads, width = settings["num_heads"], settings["expand"] * settings["hidden_size"]
    gated = 2 * width + 2 * settings["n_groups"] * settings["state_size"]
    bounds = [0, width, gated, gated + heads, gated + heads * (1 + LEVELS)]
    ours = ("W_z", "W_xBC", "W_Delta", "level_weights.W")
    parts = zip(ours, bounds[:-1], bounds[1:], strict=True)
    return {
        "mixer_norm.weight": "mixer_norm.weight",
        "mlp_norm.weight": "mlp_norm.weight",
        **glu_mlp(),
        **{
            f"mixer.{name}.weight": TensorSource("mixer.in_proj.weight", rows(start, stop))
            for name, start, stop in parts
        },
        "mixer.W_Delta.bias": "mixer.dt_bias",
        "mixer.level_weights.scale": "mixer.L",
        "mixer.conv.weight": TensorSource("mixer.conv1d.weight", taps),
        "mixer.conv_bias": "mixer.conv1d.bias"
        if settings["use_conv_bias"]
        else ConstantTensor(0.0),
        "mixer.log_a": "mixer.A_log",
        "mixer.D": "mixer.D",
        "mixer.w_norm": "mixer.norm.weight",
        "mixer.W_o.weight": "mixer.out_proj.weight",
    }
