"""Mamba-2 as transformers (Codestral Mamba, mamba2-*-hf) and flash-linear-attention name its
weights."""

from __future__ import annotations

import math
from typing import Any

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
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

UNLIMITED = ([0.0, math.inf], (0.0, math.inf))
"""Limits of Δ that are none."""


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
    mixer = {
        "name": "mamba2",
        "heads": settings["num_heads"],
        "state": settings["state_size"],
        "expand": settings["expand"],
        "conv": settings["conv_kernel"],
        "groups": settings["n_groups"],
        "eps": eps,
    }
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=[mixer],
        norm_eps=eps,
        mlp=None,
        embedding_scale=1.0,
    )
    layer = {
        "mixer_norm.weight": "norm.weight",
        **mamba2_weights(
            mixer, settings["hidden_size"], "mixer", conv_bias=settings["use_conv_bias"]
        ),
    }
    return ImportPlan(config, {**OUTER, **stack_layers(config, "backbone.layers", [layer])})


def hybrid_mamba2(settings: Settings) -> dict[str, Any]:
    """Return the entry of `mixers` for the Mamba-2 layers of Bamba and its descendants."""
    settings.require("mamba_proj_bias", False)
    settings.require("time_step_limit", *UNLIMITED)
    return {
        "name": "mamba2",
        "heads": settings["mamba_n_heads"],
        "state": settings["mamba_d_state"],
        "expand": settings["mamba_expand"],
        "conv": settings["mamba_d_conv"],
        "groups": settings["mamba_n_groups"],
        "eps": settings["rms_norm_eps"],
    }


def mamba2_weights(mixer: dict[str, Any], d: int, theirs: str, *, conv_bias: bool) -> Table:
    """Map the weights of a Mamba-2 layer.

    Args:
        mixer: Its entry of `mixers`.
        d: Channels of the model.
        theirs: Name of their module.
        conv_bias: Whether the convolution has one.
    """
    width, heads = round(mixer["expand"] * d), mixer["heads"]
    convolved = 2 * width + 2 * mixer["groups"] * mixer["state"]
    parts = {
        "z": (0, width),
        "xBC": (width, convolved),
        "Delta": (convolved, convolved + heads),
    }
    return {
        **{
            f"mixer.W_{name}.weight": TensorSource(f"{theirs}.in_proj.weight", rows(*part))
            for name, part in parts.items()
        },
        "mixer.W_Delta.bias": f"{theirs}.dt_bias",
        "mixer.conv.weight": TensorSource(f"{theirs}.conv1d.weight", taps),
        "mixer.conv_bias": f"{theirs}.conv1d.bias" if conv_bias else ConstantTensor(0.0),
        "mixer.log_a": f"{theirs}.A_log",
        "mixer.D": f"{theirs}.D",
        **({} if mixer["eps"] is None else {"mixer.w_norm": f"{theirs}.norm.weight"}),
        "mixer.W_o.weight": f"{theirs}.out_proj.weight",
    }
