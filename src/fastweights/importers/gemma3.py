"""Gemma 3, as transformers names its weights: sliding and full attention, norms on both sides."""

from __future__ import annotations

from typing import Any

from fastweights.importers.attention import HEAD_NORMS, attention, projections, rope
from fastweights.importers.plan import (
    ImportPlan,
    Table,
    TensorSource,
    glu_mlp,
    one_plus,
    outer,
    plan_layers,
    scaled,
)
from fastweights.importers.source import CheckpointSource, Settings

NORMS: Table = {
    "mixer_norm.weight": "input_layernorm.weight",
    "mixer_norm_behind.weight": "post_attention_layernorm.weight",
    "mlp_norm.weight": "pre_feedforward_layernorm.weight",
    "mlp_norm_behind.weight": "post_feedforward_layernorm.weight",
    **HEAD_NORMS,
}
IN_MEMORY, PUBLISHED = {r"^model\.": "model.language_model."}, {r"^": "language_model."}
"""Names in models of text → those in models of text and images, as transformers has them in memory
and as they are published."""


def gemma3_text(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Gemma 3 checkpoint, without eyes where it has any.

    The scale of its scores is in the norm of queries.
    """
    settings = source.settings
    settings.require("attn_logit_softcapping", None)
    settings.require("use_bidirectional_attention", None, False)
    weights = projections("qkvo" if settings["attention_bias"] else "")
    norms = {ours: TensorSource(str(theirs), one_plus) for ours, theirs in NORMS.items()}
    scale = (settings["head_dim"] / settings["query_pre_attn_scalar"]) ** 0.5
    return plan_layers(
        source,
        [(_attention(settings, kind), weights) for kind in settings["layer_types"]],
        {**scaled(norms, {"mixer.norm_q.weight": scale}), **glu_mlp()},
        around=outer(convert=one_plus),
        published=(IN_MEMORY, PUBLISHED),
        ignored=("*vision_tower.*", "*multi_modal_projector.*"),
        norm_eps=settings["rms_norm_eps"],
        sandwich_norms=True,
        hidden_act=settings["hidden_activation"],
        intermediate_size=settings["intermediate_size"],
        embedding_scale=settings["hidden_size"] ** 0.5,
        logit_cap=settings["final_logit_softcapping"],
    )


def _attention(settings: Settings, kind: str) -> dict[str, Any]:
    window = settings["sliding_window"] if kind == "sliding_attention" else None
    return {
        **attention(settings, window, rotary=False),
        "rope": rope(settings, kind),
        "bias": settings["attention_bias"],
        "qk_norm": settings["rms_norm_eps"],
    }
