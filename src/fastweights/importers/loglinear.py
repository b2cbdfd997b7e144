"""Log-linear Mamba-2 as flash-linear-attention names its weights."""

from __future__ import annotations

from typing import Any

from fastweights.importers.fla import swiglu_width
from fastweights.importers.mamba import MAMBA2, OUTER, UNLIMITED, mamba2_weights
from fastweights.importers.plan import (
    ImportPlan,
    LayerPlan,
    TensorSource,
    glu_mlp,
    plan_layers,
    rows,
)
from fastweights.importers.source import CheckpointSource, Settings

LEVELS = 15
"""Its models have as many, for 2^14 tokens."""


def log_linear_mamba2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a log-linear Mamba-2 checkpoint, whose layers have a SwiGLU."""
    settings = source.settings
    for name in ("use_bias", "D_has_hdim", "norm_before_gate"):
        settings.require(name, False)
    settings.require("rmsnorm", True)
    settings.require("hidden_act", "silu", "swish")
    settings.require("dt_limit", *UNLIMITED)
    settings.require("attnres_block_size", None)
    block = {"mixer_norm.weight": "mixer_norm.weight", "mlp_norm.weight": "mlp_norm.weight"}
    return plan_layers(
        source,
        [_layer(settings)] * settings["num_hidden_layers"],
        {**block, **glu_mlp()},
        around=OUTER,
        theirs="backbone.layers",
        norm_eps=settings["norm_eps"],
        intermediate_size=swiglu_width(settings["hidden_size"], 4),
    )


def _layer(settings: Settings) -> LayerPlan:
    """Behind those of Mamba-2, λ of all heads are rows of the one matrix."""
    d, biased = settings["hidden_size"], settings["use_conv_bias"]
    mixer: dict[str, Any] = {
        "name": "loglinear_mamba2",
        **settings.pick(MAMBA2),
        "eps": settings["norm_eps"],
    }
    levels = rows(-mixer["heads"] * LEVELS)
    return {**mixer, "levels": LEVELS}, {
        **mamba2_weights(mixer, d, "mixer", conv_bias=biased),
        "mixer.level_weights.W.weight": TensorSource("mixer.in_proj.weight", levels),
        "mixer.level_weights.scale": "mixer.L",
    }
