"""Kimi Linear and Ling 3.0: Kimi Delta Attention, with latent attention between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.importers.attention import rope
from fastweights.importers.experts import LIKE_MIXTRAL, experts, mlps_of_layers
from fastweights.importers.plan import (
    NORMS,
    ConstantTensor,
    Convert,
    ImportPlan,
    LayerPlan,
    Table,
    TensorSource,
    convolutions,
    glu_mlp,
    plan_layers,
    rows,
)
from fastweights.importers.source import CheckpointSource, Settings

PUBLISHED_KIMI = {r"\.forget_gate\.": ".", **LIKE_MIXTRAL}
PUBLISHED_LING = {
    r"\.embed_tokens\.": ".word_embeddings.",
    r"\.forget_gate\.": ".",
    r"\.self_attn\.o_proj\.": ".attention.dense.",
    r"\.self_attn\.": ".attention.",
    r"\.e_score_correction_bias$": ".expert_bias",
}
"""Parts of the names that transformers gives in memory → those of the published files."""


def kimi_linear(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Kimi Linear checkpoint."""
    settings = source.settings
    table = {
        **_low_rank("alpha", "forget_gate.f"),
        **_low_rank("g", "g"),
        "mixer.W_g.1.bias": ConstantTensor(0.0),
    }
    latent = {"query_rank": settings["q_lora_rank"], "rope": {"fraction": 0.0}}
    kinds = {
        "linear_attention": _delta(source, {}, table),
        "full_attention": _latent(settings, latent, _queries(settings)),
    }
    return _plan(source, kinds, PUBLISHED_KIMI)


def bailing_hybrid(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Ling 3.0 checkpoint.

    Its gates are whole matrices, its decay is bounded, its latent attention gated and turned in
    pairs of neighbours.
    """
    settings = source.settings
    lowest = -settings["kda_lower_bound"] if settings["kda_safe_gate"] else None
    table: Table = {
        "mixer.W_alpha.weight": "self_attn.forget_gate.f_proj.weight",
        "mixer.W_g.weight": "self_attn.g_proj.weight",
        "mixer.W_g.bias": ConstantTensor(0.0),
    }
    heads, turned = settings["num_attention_heads"], settings["qk_rope_head_dim"]
    rank = settings["kv_lora_rank"]
    latent: Table = {
        "mixer.W_q.weight": TensorSource("self_attn.q_proj.weight", _halves(heads, turned)),
        "mixer.W_kr.weight": TensorSource(
            "self_attn.kv_a_proj_with_mqa.weight", lambda w: _halves(1, turned)(w[rank:])
        ),
        "mixer.W_g.weight": "self_attn.g_proj.weight",
    }
    kinds = {
        "linear_attention": _delta(source, {"lowest": lowest, "low_rank": False}, table),
        "full_attention": _latent(settings, {"gated": True, "rope": rope(settings)}, latent),
    }
    return _plan(source, kinds, PUBLISHED_LING)


def _plan(
    source: CheckpointSource, kinds: dict[str, LayerPlan], published: dict[str, str]
) -> ImportPlan:
    settings = source.settings
    settings.require("hidden_act", "silu")
    layers = [kinds[kind] for kind in settings["layer_types"]]
    sparse = [kind == "sparse" for kind in settings["mlp_layer_types"]]
    return plan_layers(
        source,
        layers,
        NORMS,
        mlps=mlps_of_layers(source, sparse, glu_mlp(), _experts),
        published=[published],
        ignored=(f"model.layers.{len(layers)}.*",),
        **settings.decoder,
    )


def _experts(source: CheckpointSource) -> LayerPlan:
    settings = source.settings
    count, width = settings["num_experts"], settings["moe_intermediate_size"]
    routing = {
        "count": count,
        "chosen": settings["num_experts_per_token"],
        "sigmoid": True,
        "normalized": settings["moe_renormalize"],
        "corrected": True,
        "groups": settings["num_expert_group"],
        "chosen_groups": settings["topk_group"],
        "scale": float(settings["routed_scaling_factor"]),
    }
    shared = width * settings["num_shared_experts"]
    return {"name": "experts", "width": width, "routing": routing, "shared": shared}, {
        "mlp.router.W.weight": "mlp.gate.weight",
        "mlp.router.bias": "mlp.gate.e_score_correction_bias",
        **experts(source, "mlp.experts", count, width),
        **glu_mlp("mlp.shared_experts", ours="mlp.shared"),
    }


def _delta(source: CheckpointSource, options: dict[str, Any], gates: Table) -> LayerPlan:
    settings = source.settings
    width = settings["linear_num_heads"] * settings["linear_head_dim"]
    mixer = {
        "name": "kda",
        "heads": settings["linear_num_heads"],
        "width": settings["linear_head_dim"],
        "conv": settings["linear_conv_kernel_dim"],
        "eps": settings["rms_norm_eps"],
        **options,
    }
    return mixer, {
        **{f"mixer.W_{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
        **convolutions(source.names, "self_attn", {"q": width, "k": width, "v": width}),
        **gates,
        "mixer.W_beta.weight": "self_attn.b_proj.weight",
        "mixer.log_a": TensorSource("self_attn.forget_gate.A_log", Tensor.flatten),
        "mixer.b_alpha": "self_attn.forget_gate.dt_bias",
        "mixer.norm.weight": "self_attn.o_norm.weight",
    }


def _low_rank(ours: str, theirs: str) -> Table:
    return {
        f"mixer.W_{ours}.{i}.weight": f"self_attn.{theirs}_{part}_proj.weight"
        for i, part in enumerate("ab")
    }


def _latent(settings: Settings, options: dict[str, Any], table: Table) -> LayerPlan:
    settings.require("attention_bias", False)
    settings.require("num_key_value_heads", settings["num_attention_heads"])
    heads, rank = settings["num_attention_heads"], settings["kv_lora_rank"]
    width, values = settings["qk_nope_head_dim"], settings["v_head_dim"]
    mixer = {
        "name": "mla",
        "heads": heads,
        "rank": rank,
        "width": width,
        "rope_dim": settings["qk_rope_head_dim"],
        "value_width": values,
        **options,
    }

    def of_heads(start: int, stop: int) -> TensorSource:
        return TensorSource(
            "self_attn.kv_b_proj.weight", lambda w: w.unflatten(0, (heads, -1))[:, start:stop]
        )

    return mixer, {
        "mixer.W_c.weight": TensorSource("self_attn.kv_a_proj_with_mqa.weight", rows(0, rank)),
        "mixer.W_kr.weight": TensorSource("self_attn.kv_a_proj_with_mqa.weight", rows(rank)),
        "mixer.norm_c.weight": "self_attn.kv_a_layernorm.weight",
        "mixer.W_uk": of_heads(0, width),
        "mixer.W_uv": of_heads(width, width + values),
        "mixer.W_o.weight": "self_attn.o_proj.weight",
        **table,
    }


def _queries(settings: Settings) -> Table:
    if settings["q_lora_rank"] is None:
        return {"mixer.W_q.weight": "self_attn.q_proj.weight"}
    return {
        "mixer.W_cq.weight": "self_attn.q_a_proj.weight",
        "mixer.norm_q.weight": "self_attn.q_a_layernorm.weight",
        "mixer.W_q.weight": "self_attn.q_b_proj.weight",
    }


def _halves(heads: int, turned: int) -> Convert:
    """Return a function that orders the last channels of heads as `Rope` has its pairs.

    Theirs turn with their neighbours.
    """

    def convert(weight: Tensor) -> Tensor:
        rest, turning = weight.unflatten(0, (heads, -1)).tensor_split([-turned], 1)
        return torch.cat([rest, turning[:, 0::2], turning[:, 1::2]], 1).flatten(0, 1)

    return convert
