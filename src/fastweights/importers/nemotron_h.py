"""Nemotron-H and Nemotron 3: Mamba-2, softmax attention, MLPs and experts, each a layer."""

from __future__ import annotations

from typing import Any

from fastweights.importers.attention import attention, projections
from fastweights.importers.experts import GROUPED, experts
from fastweights.importers.mamba import mamba2_weights
from fastweights.importers.plan import (
    ConstantTensor,
    ImportPlan,
    LayerPlan,
    Table,
    TensorSource,
    linear,
    outer,
    prefix_names,
    shortest_period,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

CHANNELS = ("mlp", "moe")
"""Their layers that are MLPs of ours."""
MAMBA2 = {
    "heads": "mamba_num_heads",
    "state": "ssm_state_size",
    "conv": "conv_kernel",
    "groups": "n_groups",
}
"""Arguments of our mixer → what they call these."""


def nemotron_h(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Nemotron-H or Nemotron 3 checkpoint.

    A layer of theirs that mixes time and one behind it that does not are one layer of ours.
    """
    settings = source.settings
    for name in ("use_bias", "mlp_bias", "attention_bias"):
        settings.require(name, False)
    settings.require("mamba_hidden_act", "silu")
    settings.require("sliding_window", None)
    settings.require("n_shared_experts", 1)
    kinds = _kinds(source)
    pairs = _pair(settings["layers_block_type"])
    mixers = [kinds[settings["layers_block_type"][mixer]][0] for mixer, _ in pairs]
    mlps = [
        None if mlp is None else kinds[settings["layers_block_type"][mlp]][0] for _, mlp in pairs
    ]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=len(pairs),
        mixers=shortest_period(mixers),
        norm_eps=settings["layer_norm_epsilon"],
        hidden_act=settings["mlp_hidden_act"],
        mlps=shortest_period(mlps),
        embedding_scale=1.0,
    )
    root = "backbone" if any(name.startswith("backbone.") for name in source.names) else "model"
    tensors: dict[str, TensorSource | ConstantTensor] = dict(
        outer(f"{root}.embeddings", f"{root}.norm_f")
    )
    for layer, pair in enumerate(pairs):
        for norm, place in zip(("mixer_norm", "mlp_norm"), pair, strict=True):
            if place is not None:
                table = kinds[settings["layers_block_type"][place]][1]
                tensors |= prefix_names(
                    f"model.layers.{layer}",
                    f"{root}.layers.{place}",
                    {f"{norm}.weight": "norm.weight", **table},
                )
    return ImportPlan(config, tensors, ignored=("mtp.*",))


def _pair(kinds: list[str]) -> list[tuple[int, int | None]]:
    """Their layers that make one of ours: the number of a mixer, and of an MLP behind it."""
    pairs: list[tuple[int, int | None]] = []
    for place, kind in enumerate(kinds):
        if kind not in CHANNELS:
            pairs.append((place, None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], place)
        else:
            raise ValueError(
                f"layer {place} of this nemotron_h checkpoint is a {kind!r} without a mixer in"
                " front of it, which cannot be imported; a layer of ours begins with a mixer"
            )
    return pairs


def _kinds(source: CheckpointSource) -> dict[str, LayerPlan]:
    """A layer's entry of `mixers` or `mlps`, and its weights."""
    settings, d = source.settings, source.settings["hidden_size"]
    mamba = _mamba2(settings)
    plain = {**linear("mlp.W_1", "mixer.up_proj"), **linear("mlp.W_2", "mixer.down_proj")}
    return {
        "linear_attention": (
            mamba,
            mamba2_weights(mamba, d, "mixer", conv_bias=settings["use_conv_bias"]),
        ),
        "full_attention": (attention(settings, rotary=False), projections("", "mixer")),
        "mlp": ({"name": "plain", "width": settings["intermediate_size"]}, plain),
        "moe": _experts(source),
    }


def _mamba2(settings: Settings) -> dict[str, Any]:
    width = settings["mamba_num_heads"] * settings["mamba_head_dim"]
    return {
        "name": "mamba2",
        **settings.pick(MAMBA2),
        "expand": width / settings["hidden_size"],
        "eps": settings["layer_norm_epsilon"],
    }


def _experts(source: CheckpointSource) -> LayerPlan:
    settings = source.settings
    count, width = settings["n_routed_experts"], settings["moe_intermediate_size"]
    routing = {"count": count, "sigmoid": True, "corrected": True, **settings.pick(GROUPED)}
    mlp = {
        "name": "experts",
        "width": width,
        "routing": {**routing, "scale": float(routing["scale"])},
        "gated": False,
        "shared": settings["moe_shared_expert_intermediate_size"],
        "latent": settings["moe_latent_size"],
    }
    latent: Table = {
        "mlp.W_in.weight": "mixer.fc1_latent_proj.weight",
        "mlp.W_out.weight": "mixer.fc2_latent_proj.weight",
    }
    return mlp, {
        "mlp.router.W.weight": "mixer.gate.weight",
        "mlp.router.bias": "mixer.gate.e_score_correction_bias",
        **experts(source, "mixer.experts", count, width, gated=False),
        **linear("mlp.shared.W_1", "mixer.shared_experts.up_proj"),
        **linear("mlp.shared.W_2", "mixer.shared_experts.down_proj"),
        **({} if mlp["latent"] is None else latent),
    }
