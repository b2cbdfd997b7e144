"""Hybrids of Mamba-2 and softmax attention: Bamba, Granite 4.0 with experts or without, and
Falcon-H1, which has both in every layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fastweights.importers import plan
from fastweights.importers.attention import attention, projections
from fastweights.importers.experts import stacked_experts
from fastweights.importers.mamba import hybrid_mamba2, mamba2_weights
from fastweights.importers.plan import (
    ImportPlan,
    LayerPlan,
    Table,
    TensorSource,
    glu_mlp,
    outer,
    plan_layers,
    rows,
    scaled,
)
from fastweights.importers.source import CheckpointSource, Settings

OUTER = outer(norm="model.final_layernorm")
NORMS: Table = {
    "mixer_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "pre_ff_layernorm.weight",
}


def bamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Bamba checkpoint."""
    settings = source.settings
    settings.require("mlp_bias", False)
    biased = "qkvo" if settings["attention_bias"] else ""
    softmax = ({**attention(settings), "bias": bool(biased)}, projections(biased))
    recurrent, attending = _recurrent(settings), settings["attn_layer_indices"] or []
    return plan_layers(
        source,
        [
            softmax if layer in attending else recurrent
            for layer in range(settings["num_hidden_layers"])
        ],
        {**NORMS, **glu_mlp("feed_forward")},
        around=OUTER,
        **settings.decoder,
    )


def _recurrent(settings: Settings, **fields: Any) -> LayerPlan:
    mixer, biased = {**hybrid_mamba2(settings), **fields}, settings["mamba_conv_bias"]
    return mixer, mamba2_weights(mixer, settings["hidden_size"], "mamba", conv_bias=biased)


# Granite 4.0


def granitemoehybrid(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Granite 4.0 checkpoint, its multipliers taken into the weights."""
    settings = source.settings
    biased = "qkvo" if settings["attention_bias"] else ""
    width = settings["shared_intermediate_size"]
    softmax = attention(settings, rotary=settings["position_embedding_type"] == "rope")
    scores = settings["attention_multiplier"] * softmax["width"] ** 0.5
    kinds = {
        "linear_attention": _recurrent(settings),
        "full_attention": (
            {**softmax, "bias": bool(biased)},
            scaled(projections(biased), {"mixer.W_q.*": scores}),
        ),
    }
    written = settings["residual_multiplier"]
    factors = {"mixer.W_o.*": written, "mlp.*W_3.weight": written}
    layers = [kinds[kind] for kind in settings["layer_types"]]
    sparse = [_granite_experts(source)] * len(layers) if settings["num_local_experts"] else []
    return plan_layers(
        source,
        [(mixer, scaled(table, factors)) for mixer, table in layers],
        {**plan.NORMS, **({} if sparse else scaled(_fused_mlp("mlp", width), factors))},
        mlps=[(mlp, scaled(table, factors)) for mlp, table in sparse],
        around=scaled(outer(), {"model.norm.weight": 1 / settings["logits_scaling"]}),
        **{**settings.decoder, "intermediate_size": width},
        embedding_scale=settings["embedding_multiplier"],
    )


def _granite_experts(source: CheckpointSource) -> LayerPlan:
    """Files have other names of the experts than models."""
    settings, sparse = source.settings, "block_sparse_moe"
    count, width = settings["num_local_experts"], settings["intermediate_size"]
    shared = settings["shared_intermediate_size"]
    files = any(name.endswith("router.layer.weight") for name in source.names)
    names = ("input_linear.weight", "output_linear.weight", "router.layer.weight")
    first, last, router = (
        names if files else ("experts.gate_up_proj", "experts.down_proj", "router.weight")
    )
    routing = {"count": count, "chosen": settings["num_experts_per_tok"]}
    return {"name": "experts", "width": width, "routing": routing, "shared": shared}, {
        "mlp.router.W.weight": f"{sparse}.{router}",
        **stacked_experts(f"{sparse}.{first}", f"{sparse}.{last}", count, width),
        **_fused_mlp("mlp.shared", shared),
    }


def _fused_mlp(ours: str, width: int) -> Table:
    fused = "shared_mlp.input_linear.weight"
    return {
        f"{ours}.W_1.weight": TensorSource(fused, rows(0, width)),
        f"{ours}.W_2.weight": TensorSource(fused, rows(width, 2 * width)),
        f"{ours}.W_3.weight": "shared_mlp.output_linear.weight",
    }


# Falcon-H1


def falcon_h1(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Falcon-H1 checkpoint, its multipliers taken into the weights."""
    settings = source.settings
    for name in ("mlp_bias", "attention_bias", "projectors_bias"):
        settings.require(name, False)
    if settings["mamba_rms_norm"]:
        settings.require("mamba_norm_before_gate", False)
    d = settings["hidden_size"]
    width = settings["mamba_d_ssm"] or settings["mamba_expand"] * d
    eps = settings["rms_norm_eps"] if settings["mamba_rms_norm"] else None
    mamba, recurrent = _recurrent(settings, expand=width / d, eps=eps)
    layer = {
        **_as_part(0, scaled(recurrent, _mamba_factors(settings, width))),
        **_as_part(1, scaled(projections(""), _attention_factors(settings))),
    }
    return plan_layers(
        source,
        [({**mamba, "beside": [attention(settings)]}, layer)] * settings["num_hidden_layers"],
        {**NORMS, **scaled(glu_mlp("feed_forward"), _mlp_factors(settings))},
        around=scaled(OUTER, {"model.norm.weight": settings["lm_head_multiplier"]}),
        **settings.decoder,
        embedding_scale=settings["embedding_multiplier"],
    )


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
