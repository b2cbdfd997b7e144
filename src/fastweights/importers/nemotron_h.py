"""Nemotron-H and Nemotron 3: Mamba-2, softmax attention, MLPs and experts, each a layer."""

from __future__ import annotations

from typing import Any

from fastweights.importers.attention import attention, projections
from fastweights.importers.experts import experts
from fastweights.importers.mamba2 import mamba2_weights
from fastweights.importers.plan import (
    ConstantTensor,
    ImportPlan,
    Table,
    TensorSource,
    linear,
    prefix_names,
    shortest_period,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

CHANNELS = ("mlp", "moe")
"""Their layers that are MLPs of ours."""


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
    tensors: dict[str, TensorSource | ConstantTensor] = {
        "model.embed_tokens.weight": TensorSource(f"{root}.embeddings.weight"),
        "model.norm.weight": TensorSource(f"{root}.norm_f.weight"),
        "lm_head.weight": TensorSource("lm_head.weight"),
    }
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


def _kinds(source: CheckpointSource) -> dict[str, tuple[dict[str, Any], Table]]:
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
        "moe": (_experts(settings), _expert_weights(source)),
    }


def _mamba2(settings: Settings) -> dict[str, Any]:
    heads = settings["mamba_num_heads"]
    return {
        "name": "mamba2",
        "heads": heads,
        "state": settings["ssm_state_size"],
        "expand": heads * settings["mamba_head_dim"] / settings["hidden_size"],
        "conv": settings["conv_kernel"],
        "groups": settings["n_groups"],
        "eps": settings["layer_norm_epsilon"],
    }


def _experts(settings: Settings) -> dict[str, Any]:
    routing = {
        "count": settings["n_routed_experts"],
        "chosen": settings["num_experts_per_tok"],
        "sigmoid": True,
        "normalized": settings["norm_topk_prob"],
        "corrected": True,
        "groups": settings["n_group"],
        "chosen_groups": settings["topk_group"],
        "scale": float(settings["routed_scaling_factor"]),
    }
    return {
        "name": "experts",
        "width": settings["moe_intermediate_size"],
        "routing": routing,
        "gated": False,
        "shared": settings["moe_shared_expert_intermediate_size"],
        "latent": settings["moe_latent_size"],
    }


def _expert_weights(source: CheckpointSource) -> Table:
    settings = source.settings
    latent: Table = {
        "mlp.W_in.weight": "mixer.fc1_latent_proj.weight",
        "mlp.W_out.weight": "mixer.fc2_latent_proj.weight",
    }
    return {
        "mlp.router.W.weight": "mixer.gate.weight",
        "mlp.router.bias": "mixer.gate.e_score_correction_bias",
        **experts(
            source,
            "mixer.experts",
            settings["n_routed_experts"],
            settings["moe_intermediate_size"],
            gated=False,
        ),
        **linear("mlp.shared.W_1", "mixer.shared_experts.up_proj"),
        **linear("mlp.shared.W_2", "mixer.shared_experts.down_proj"),
        **({} if settings["moe_latent_size"] is None else latent),
    }
