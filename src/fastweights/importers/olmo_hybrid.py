"""OLMo Hybrid: gated delta layers with negative eigenvalues, and softmax attention of OLMo 2."""

from __future__ import annotations

from typing import Any

from fastweights.importers.attention import HEAD_NORMS, projections, rope
from fastweights.importers.plan import (
    ImportPlan,
    Table,
    TensorSource,
    convolutions,
    glu_mlp,
    rename_missing,
    shortest_period,
    stack_layers,
)
from fastweights.importers.qwen3_next import convolved_widths, gated_delta
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

OUTER = {
    "model.embed_tokens.weight": TensorSource("model.embed_tokens.weight"),
    "model.norm.weight": TensorSource("model.norm.weight"),
    "lm_head.weight": TensorSource("lm_head.weight"),
}
PUBLISHED = {
    r"\.input_layernorm\.": ".attention_layer_norm.",
    r"\.post_attention_layernorm\.": ".feedforward_layer_norm.",
}
"""Parts of the names that transformers gives in memory → those of the published files."""


def olmo_hybrid(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an OLMo Hybrid checkpoint, with or without rotary positions.

    Norms stand before gated delta layers, and behind attention and its MLP.
    """
    settings = source.settings
    settings.require("attention_bias", False)
    settings.require("hidden_act", "silu")
    softmax = [kind == "full_attention" for kind in settings["layer_types"]]
    negative = {"negative": settings["linear_allow_neg_eigval"], "eps": 1e-5}
    delta = {**gated_delta(settings), **negative}
    plans = {False: (delta, _delta_weights(source)), True: _softmax(settings)}
    layers = [plans[attends] for attends in softmax]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=len(layers),
        mixers=shortest_period([mixer for mixer, _ in layers]),
        post_norm=shortest_period(softmax),
        norm_eps=settings["rms_norm_eps"],
        intermediate_size=settings["intermediate_size"],
        embedding_scale=1.0,
    )
    tables = [{**glu_mlp(), **table} for _, table in layers]
    tensors = {**OUTER, **stack_layers(config, "model.layers", tables)}
    return ImportPlan(config, rename_missing(tensors, source.names, PUBLISHED))


def _delta_weights(source: CheckpointSource) -> Table:
    return {
        "mixer_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        **{f"mixer.W_{name}.weight": f"linear_attn.{name}_proj.weight" for name in "qkvgo"},
        **convolutions(source.names, "linear_attn", convolved_widths(source.settings)),
        "mixer.W_alpha.weight": "linear_attn.a_proj.weight",
        "mixer.W_beta.weight": "linear_attn.b_proj.weight",
        "mixer.log_a": "linear_attn.A_log",
        "mixer.b_alpha": "linear_attn.dt_bias",
        "mixer.norm.weight": "linear_attn.o_norm.weight",
    }


def _softmax(settings: Settings) -> tuple[dict[str, Any], Table]:
    turned = (settings["rope_parameters"] or {}).get("rope_theta") is not None
    mixer = {
        "name": "olmo2",
        "heads": settings["num_attention_heads"],
        "kv_heads": settings["num_key_value_heads"],
        "eps": settings["rms_norm_eps"],
        "rope": rope(settings) if turned else {"fraction": 0.0},
    }
    return mixer, {
        "mixer_norm.weight": "post_attention_layernorm.weight",
        "mlp_norm.weight": "post_feedforward_layernorm.weight",
        **projections(""),
        **HEAD_NORMS,
    }
