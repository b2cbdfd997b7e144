"""Llama and its descendants Mistral, Qwen2 and Qwen3, as transformers names their weights."""

from __future__ import annotations

from collections.abc import Sequence

from fastweights.importers.attention import HEAD_NORMS, attention, projections
from fastweights.importers.plan import NORMS, ImportPlan, glu_mlp, plan_layers
from fastweights.importers.source import CheckpointSource


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
    fields, weights = {"bias": bool(biased), "qk_norm": qk_norm}, projections(biased)
    softmax = [({**attention(settings, window), **fields}, weights) for window in windows]
    return plan_layers(
        source,
        [softmax[i % len(softmax)] for i in range(settings["num_hidden_layers"])],
        {**NORMS, **(HEAD_NORMS if qk_norm else {}), **glu_mlp(bias=mlp_bias)},
        ignored=("*.rotary_emb.inv_freq",),
        **settings.decoder,
        mlp_bias=mlp_bias,
    )
