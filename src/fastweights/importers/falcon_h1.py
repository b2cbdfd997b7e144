"""Falcon-H1: softmax attention and Mamba-2 side by side in every layer."""

from __future__ import annotations

import math

import torch

from fastweights.importers.attention import attention, projections
from fastweights.importers.bamba import NORMS, OUTER
from fastweights.importers.mamba2 import hybrid_mamba2, mamba2_weights
from fastweights.importers.plan import ImportPlan, Table, glu_mlp, scaled, stack_layers
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig


def falcon_h1(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Falcon-H1 checkpoint, its multipliers taken into the weights."""
    settings = source.settings
    for name in ("mlp_bias", "attention_bias", "projectors_bias"):
        settings.require(name, False)
    if settings["mamba_rms_norm"]:
        settings.require("mamba_norm_before_gate", False)
    d = settings["hidden_size"]
    width = settings["mamba_d_ssm"] or settings["mamba_expand"] * d
    mamba = {**hybrid_mamba2(settings), "expand": width / d}
    mamba["eps"] = settings["rms_norm_eps"] if settings["mamba_rms_norm"] else None
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=d,
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=[{**mamba, "beside": [attention(settings)]}],
        norm_eps=settings["rms_norm_eps"],
        hidden_act=settings["hidden_act"],
        intermediate_size=settings["intermediate_size"],
        embedding_scale=settings["embedding_multiplier"],
    )
    recurrent = mamba2_weights(mamba, d, "mamba", conv_bias=settings["mamba_conv_bias"])
    layer = {
        **NORMS,
        **scaled(glu_mlp("feed_forward"), _mlp_factors(settings)),
        **_as_part(0, scaled(recurrent, _mamba_factors(settings, width))),
        **_as_part(1, scaled(projections(""), _attention_factors(settings))),
    }
    outer = scaled(OUTER, {"model.norm.weight": settings["lm_head_multiplier"]})
    return ImportPlan(config, {**outer, **stack_layers(config, "model.layers", [layer])})


def _as_part(number: int, table: Table) -> Table:
    """Name the weights of one of several mixers that stand side by side."""
    return {name.replace("mixer.", f"mixer.mixers.{number}.", 1): p for name, p in table.items()}


def _mlp_factors(settings: Settings) -> dict[str, float]:
    gate, down = settings["mlp_multipliers"]
    return {"mlp.W_1.weight": gate, "mlp.W_3.weight": down}


def _mamba_factors(settings: Settings, width: int) -> dict[str, float | torch.Tensor]:
    z, x, b, c, delta = (settings["ssm_in_multiplier"] * one for one in settings["ssm_multipliers"])
    keys = settings["mamba_n_groups"] * settings["mamba_d_state"]
    convolved = torch.tensor([[x]] * width + [[b]] * keys + [[c]] * keys, dtype=torch.float64)
    return {
        "mixer.W_z.weight": z,
        "mixer.W_xBC.weight": convolved,
        "mixer.W_Delta.weight": delta,
        "mixer.W_o.weight": settings["ssm_out_multiplier"],
    }


def _attention_factors(settings: Settings) -> dict[str, float]:
    """Theirs multiplies the input of all projections; keys have one of their own."""
    read = settings["attention_in_multiplier"]
    return {
        "mixer.W_q.weight": read,
        "mixer.W_k.weight": math.prod((read, settings["key_multiplier"])),
        "mixer.W_v.weight": read,
        "mixer.W_o.weight": settings["attention_out_multiplier"],
    }
