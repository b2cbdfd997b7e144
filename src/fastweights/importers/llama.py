"""Llama and its descendants Mistral, Qwen2 and Qwen3, as transformers names their weights."""

from __future__ import annotations

from collections.abc import Sequence

from fastweights.importers.attention import HEAD_NORMS, attention, projections
from fastweights.importers.plan import (
    ImportPlan,
    TensorSource,
    glu_mlp,
    shortest_period,
    stack_layers,
)
from fastweights.importers.source import CheckpointSource
from fastweights.models import FastWeightsConfig

OUTER = {
    "model.embed_tokens.weight": TensorSource("model.embed_tokens.weight"),
    "model.norm.weight": TensorSource("model.norm.weight"),
    "lm_head.weight": TensorSource("lm_head.weight"),
}


def llama(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Llama 1 to 3 checkpoint, or of any other whose type is "llama"."""
    return _plan(source, biased="qkvo" if source.settings["attention_bias"] else "")


def mistral(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Mistral checkpoint: every layer has the same sliding window, or none
    has."""
    return _plan(source, windows=[source.settings["sliding_window"]])


def qwen2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Qwen1.5, Qwen2 or Qwen2.5 checkpoint, which has biases on q, k and v."""
    return _plan(source, biased="qkv", windows=_windows(source))


def qwen3(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a dense Qwen3 checkpoint, which normalises every head of q and k."""
    settings = source.settings
    biased = "qkvo" if settings["attention_bias"] else ""
    return _plan(source, biased=biased, windows=_windows(source), qk_norm=settings["rms_norm_eps"])


def _windows(source: CheckpointSource) -> list[int | None]:
    window = source.settings["sliding_window"]
    return [
        window if kind == "sliding_attention" else None for kind in source.settings["layer_types"]
    ]


def _plan(
    source: CheckpointSource,
    biased: str = "",
    windows: Sequence[int | None] = (None,),
    qk_norm: float | None = None,
) -> ImportPlan:
    settings = source.settings
    mlp_bias = settings.get("mlp_bias", False)
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=[
            {**attention(settings, w), "bias": bool(biased), "qk_norm": qk_norm}
            for w in shortest_period(windows)
        ],
        norm_eps=settings["rms_norm_eps"],
        hidden_act=settings["hidden_act"],
        intermediate_size=settings["intermediate_size"],
        mlp_bias=mlp_bias,
        embedding_scale=1.0,
    )
    layer = {
        "mixer_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        **projections(biased),
        **(HEAD_NORMS if qk_norm else {}),
        **glu_mlp(bias=mlp_bias),
    }
    return ImportPlan(
        config,
        {**OUTER, **stack_layers(config, "model.layers", [layer])},
        ignored=("*.rotary_emb.inv_freq",),
    )
