"""Jamba: Mamba layers with normalised B, C and Δ, softmax attention and experts between them."""

from __future__ import annotations

from typing import Any

from fastweights.importers.attention import attention, projections
from fastweights.importers.bamba import NORMS, OUTER
from fastweights.importers.experts import experts
from fastweights.importers.mamba import mamba_weights
from fastweights.importers.plan import ImportPlan, Table, glu_mlp, shortest_period, stack_layers
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig


def jamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Jamba checkpoint."""
    settings = source.settings
    settings.require("mamba_proj_bias", False)
    settings.require("hidden_act", "silu")
    mamba = _mamba(settings)
    recurrent = mamba_weights(
        mamba, settings["hidden_size"], "mamba", conv_bias=settings["mamba_conv_bias"]
    )
    kinds = {False: (mamba, recurrent), True: (attention(settings, rotary=False), projections(""))}
    layers = range(settings["num_hidden_layers"])
    attending = [_recurs(settings, "attn_layer", layer) for layer in layers]
    sparse = [
        settings["num_experts"] > 1 and _recurs(settings, "expert_layer", layer) for layer in layers
    ]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=len(layers),
        mixers=shortest_period([kinds[one][0] for one in attending]),
        norm_eps=settings["rms_norm_eps"],
        intermediate_size=settings["intermediate_size"],
        mlps=shortest_period([_mlp(settings, one) for one in sparse]) if any(sparse) else None,
        embedding_scale=1.0,
    )
    mlps = {False: glu_mlp("feed_forward"), True: _experts(source) if any(sparse) else {}}
    tables = [
        {**NORMS, **mlps[experts], **kinds[attends][1]}
        for experts, attends in zip(sparse, attending, strict=True)
    ]
    return ImportPlan(config, {**OUTER, **stack_layers(config, "model.layers", tables)})


def _recurs(settings: Settings, what: str, layer: int) -> bool:
    """Whether a layer is one of those that come back after a period."""
    return layer % settings[f"{what}_period"] == settings[f"{what}_offset"]


def _mamba(settings: Settings) -> dict[str, Any]:
    return {
        "name": "mamba",
        "state": settings["mamba_d_state"],
        "expand": settings["mamba_expand"],
        "conv": settings["mamba_d_conv"],
        "rank": settings["mamba_dt_rank"],
        "norm_eps": settings["rms_norm_eps"],
        "affine": True,
    }


def _mlp(settings: Settings, sparse: bool) -> dict[str, Any]:
    if not sparse:
        return {"name": "gated", "width": settings["intermediate_size"]}
    routing = {
        "count": settings["num_experts"],
        "chosen": settings["num_experts_per_tok"],
        "normalized": False,
    }
    return {"name": "experts", "width": settings["intermediate_size"], "routing": routing}


def _experts(source: CheckpointSource) -> Table:
    settings = source.settings
    return {
        "mlp.router.W.weight": "feed_forward.router.weight",
        **experts(
            source, "feed_forward.experts", settings["num_experts"], settings["intermediate_size"]
        ),
    }
