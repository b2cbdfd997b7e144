"""OLMo Hybrid: gated delta layers with negative eigenvalues, and softmax attention of OLMo 2."""

from __future__ import annotations

from fastweights.importers.attention import HEAD_NORMS, projections, rope
from fastweights.importers.plan import (
    NORMS,
    ImportPlan,
    LayerPlan,
    Table,
    convolutions,
    glu_mlp,
    plan_layers,
    shortest_period,
)
from fastweights.importers.qwen3_next import DELTA_REST, convolved_widths, gated_delta
from fastweights.importers.source import CheckpointSource, Settings

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
    return plan_layers(
        source,
        [plans[attends] for attends in softmax],
        glu_mlp(),
        published=[PUBLISHED],
        **settings.decoder,
        post_norm=shortest_period(softmax),
    )


def _delta_weights(source: CheckpointSource) -> Table:
    return {
        **NORMS,
        **DELTA_REST,
        **{f"mixer.W_{name}.weight": f"linear_attn.{name}_proj.weight" for name in "qkvgo"},
        **convolutions(source.names, "linear_attn", convolved_widths(source.settings)),
        "mixer.W_alpha.weight": "linear_attn.a_proj.weight",
        "mixer.W_beta.weight": "linear_attn.b_proj.weight",
        "mixer.norm.weight": "linear_attn.o_norm.weight",
    }


def _softmax(settings: Settings) -> LayerPlan:
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
