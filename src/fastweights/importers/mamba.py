"""Mamba, Falcon-Mamba and Mamba-2 (Codestral Mamba, mamba2-*-hf) as transformers and
flash-linear-attention name their weights, and the layers of hybrids with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastweights.importers.plan import (
    ConstantTensor,
    ImportPlan,
    Table,
    TensorSource,
    linear,
    outer,
    plan_layers,
    rows,
    taps,
)
from fastweights.importers.source import CheckpointSource, Settings

OUTER = outer("backbone.embeddings", "backbone.norm_f")
MAMBA = {
    "state": "state_size",
    "expand": "expand",
    "conv": "conv_kernel",
    "rank": "time_step_rank",
}
HYBRID_MAMBA = {
    "state": "mamba_d_state",
    "expand": "mamba_expand",
    "conv": "mamba_d_conv",
    "rank": "mamba_dt_rank",
}
MAMBA2 = {
    "heads": "num_heads",
    "state": "state_size",
    "expand": "expand",
    "conv": "conv_kernel",
    "groups": "n_groups",
}
HYBRID_MAMBA2 = {
    "heads": "mamba_n_heads",
    "state": "mamba_d_state",
    "expand": "mamba_expand",
    "conv": "mamba_d_conv",
    "groups": "mamba_n_groups",
}
"""Arguments of mixers → what models of them alone, and Bamba and its like, call these."""
UNLIMITED = ([0.0, math.inf], (0.0, math.inf))
"""Limits of Δ that are none."""


def mamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Mamba checkpoint: a stack of Mamba layers without MLPs, with tied
    embeddings."""
    return _mamba_plan(source, {})


def falcon_mamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Falcon-Mamba checkpoint, which normalises B, C and Δ without weights."""
    return _mamba_plan(source, {"norm_eps": source.settings["mixer_rms_eps"]})


def _mamba_plan(source: CheckpointSource, norms: Mapping[str, float]) -> ImportPlan:
    settings = source.settings
    mixer = {"name": "mamba", **settings.pick(MAMBA), **norms}
    weights = mamba_weights(
        mixer, settings["hidden_size"], "mixer", conv_bias=settings["use_conv_bias"]
    )
    return _plan(source, mixer, weights, settings["layer_norm_epsilon"])


def mamba2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Mamba-2 checkpoint: a stack of Mamba-2 layers without MLPs."""
    settings = source.settings
    for name in ("time_step_limit", "dt_limit"):
        settings.require(name, *UNLIMITED)
    settings.require("rmsnorm", True)
    for name in ("D_has_hdim", "norm_before_gate"):
        settings.require(name, False)
    # flash-linear-attention calls it otherwise
    eps = settings.get("norm_eps", settings["layer_norm_epsilon"])
    mixer = {"name": "mamba2", **settings.pick(MAMBA2), "eps": eps}
    weights = mamba2_weights(
        mixer, settings["hidden_size"], "mixer", conv_bias=settings["use_conv_bias"]
    )
    return _plan(source, mixer, weights, eps)


def _plan(
    source: CheckpointSource, mixer: dict[str, Any], weights: Table, norm_eps: float
) -> ImportPlan:
    settings = source.settings
    settings.require("use_bias", False)
    settings.require("hidden_act", "silu")
    return plan_layers(
        source,
        [(mixer, weights)] * settings["num_hidden_layers"],
        {"mixer_norm.weight": "norm.weight"},
        around=OUTER,
        theirs="backbone.layers",
        norm_eps=norm_eps,
        mlp=None,
    )


def hybrid_mamba2(settings: Settings) -> dict[str, Any]:
    """Return the entry of `mixers` for the Mamba-2 layers of Bamba and its descendants."""
    settings.require("mamba_proj_bias", False)
    settings.require("time_step_limit", *UNLIMITED)
    return {"name": "mamba2", **settings.pick(HYBRID_MAMBA2), "eps": settings["rms_norm_eps"]}


def mamba_weights(mixer: Mapping[str, Any], d: int, theirs: str, *, conv_bias: bool) -> Table:
    """Map the weights of a Mamba layer.

    Args:
        mixer: Its entry of `mixers`.
        d: Channels of the model.
        theirs: Name of their module.
        conv_bias: Whether the convolution has one.
    """
    width, rank, state = mixer["expand"] * d, mixer["rank"], mixer["state"]
    x, read = f"{theirs}.x_proj.weight", f"{theirs}.in_proj.weight"
    norms: Table = {
        f"mixer.norm_{name}.weight": f"{theirs}.{their}_layernorm.weight"
        for name, their in {"Delta": "dt", "B": "b", "C": "c"}.items()
    }
    return {
        "mixer.W_u.weight": TensorSource(read, rows(0, width)),
        "mixer.W_z.weight": TensorSource(read, rows(width, 2 * width)),
        **_convolution(theirs, conv_bias),
        "mixer.W_Delta_1.weight": TensorSource(x, rows(0, rank)),
        "mixer.W_B.weight": TensorSource(x, rows(rank, rank + state)),
        "mixer.W_C.weight": TensorSource(x, rows(rank + state, rank + 2 * state)),
        **linear("mixer.W_Delta_2", f"{theirs}.dt_proj", bias=True),
        "mixer.log_A": f"{theirs}.A_log",
        "mixer.D": f"{theirs}.D",
        **(norms if mixer.get("affine", False) else {}),
        "mixer.W_o.weight": f"{theirs}.out_proj.weight",
    }


def mamba2_weights(mixer: Mapping[str, Any], d: int, theirs: str, *, conv_bias: bool) -> Table:
    """Map the weights of a Mamba-2 layer, as `mamba_weights` those of Mamba."""
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
        **_convolution(theirs, conv_bias),
        "mixer.log_a": f"{theirs}.A_log",
        "mixer.D": f"{theirs}.D",
        **({} if mixer["eps"] is None else {"mixer.w_norm": f"{theirs}.norm.weight"}),
        "mixer.W_o.weight": f"{theirs}.out_proj.weight",
    }


def _convolution(theirs: str, bias: bool) -> Table:
    return {
        "mixer.conv.weight": TensorSource(f"{theirs}.conv1d.weight", taps),
        "mixer.conv_bias": f"{theirs}.conv1d.bias" if bias else ConstantTensor(0.0),
    }
