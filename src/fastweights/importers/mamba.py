"""Mamba as transformers names its weights (state-spaces/mamba-*-hf), and Falcon-Mamba."""

from __future__ import annotations

from typing import Any

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
    return _plan(source, {})


def falcon_mamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Falcon-Mamba checkpoint, which normalises B, C and Δ without weights."""
    return _plan(source, {"norm_eps": source.settings["mixer_rms_eps"]})


def _plan(source: CheckpointSource, norms: dict[str, float]) -> ImportPlan:
    settings = source.settings
    settings.require("use_bias", False)
    settings.require("hidden_act", "silu")
    mixer = {
        "name": "mamba",
        "state": settings["state_size"],
        "expand": settings["expand"],
        "conv": settings["conv_kernel"],
        "rank": settings["time_step_rank"],
        **norms,
    }
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=[mixer],
        norm_eps=settings["layer_norm_epsilon"],
        mlp=None,
        embedding_scale=1.0,
    )
    layer = {
        "mixer_norm.weight": "norm.weight",
        **mamba_weights(
            mixer, settings["hidden_size"], "mixer", conv_bias=settings["use_conv_bias"]
        ),
    }
    return ImportPlan(config, {**OUTER, **stack_layers(config, "backbone.layers", [layer])})


def mamba_weights(mixer: dict[str, Any], d: int, theirs: str, *, conv_bias: bool) -> Table:
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
        "mixer.conv.weight": TensorSource(f"{theirs}.conv1d.weight", taps),
        "mixer.conv_bias": f"{theirs}.conv1d.bias" if conv_bias else ConstantTensor(0.0),
        "mixer.W_Delta_1.weight": TensorSource(x, rows(0, rank)),
        "mixer.W_B.weight": TensorSource(x, rows(rank, rank + state)),
        "mixer.W_C.weight": TensorSource(x, rows(rank + state, rank + 2 * state)),
        **linear("mixer.W_Delta_2", f"{theirs}.dt_proj", bias=True),
        "mixer.log_A": f"{theirs}.A_log",
        "mixer.D": f"{theirs}.D",
        **(norms if mixer.get("affine", False) else {}),
        "mixer.W_o.weight": f"{theirs}.out_proj.weight",
    }
