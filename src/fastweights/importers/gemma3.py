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
    rename_missing,
    scaled,
    shortest_period,
    stack_layers,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

OUTER = {
    "model.embed_tokens.weight": TensorSource("model.embed_tokens.weight"),
    "model.norm.weight": TensorSource("model.norm.weight", one_plus),
    "lm_head.weight": TensorSource("lm_head.weight"),
}
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
    biased = "qkvo" if settings["attention_bias"] else ""
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=shortest_period([_attention(settings, kind) for kind in settings["layer_types"]]),
        norm_eps=settings["rms_norm_eps"],
        sandwich_norms=True,
        hidden_act=settings["hidden_activation"],
        intermediate_size=settings["intermediate_size"],
        embedding_scale=settings["hidden_size"] ** 0.5,
        logit_cap=settings["final_logit_softcapping"],
    )
    norms = {ours: TensorSource(str(theirs), one_plus) for ours, theirs in NORMS.items()}
    scale = (settings["head_dim"] / settings["query_pre_attn_scalar"]) ** 0.5
    layer = {
        **scaled(norms, {"mixer.norm_q.weight": scale}),
        **projections(biased),
        **glu_mlp(),
    }
    tensors = {**OUTER, **stack_layers(config, "model.layers", [layer])}
    for names in (IN_MEMORY, PUBLISHED):
        tensors = rename_missing(tensors, source.names, names)
    return ImportPlan(config, tensors, ignored=("*vision_tower.*", "*multi_modal_projector.*"))


def _attention(settings: Settings, kind: str) -> dict[str, Any]:
    window = settings["sliding_window"] if kind == "sliding_attention" else None
    return {
        **attention(settings, window, rotary=False),
        "rope": rope(settings, kind),
        "bias": settings["attention_bias"],
        "qk_norm": settings["rms_norm_eps"],
    }
