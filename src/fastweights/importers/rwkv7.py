"""RWKV-7 as flash-linear-attention names its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.importers.plan import (
    Convert,
    ImportPlan,
    Table,
    TensorSource,
    linear,
    prefix_names,
    shortest_period,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.layers import upcast
from fastweights.models import FastWeightsConfig

SHIFTED = "rwkvag"
CHANNEL: Table = {
    **linear("mixer_norm", "ffn_norm", bias=True),
    "mixer.shift.mu": TensorSource("ffn.x_k", lambda mu: mu.view(1, -1)),
    "mixer.W_k.weight": "ffn.key.weight",
    "mixer.W_o.weight": "ffn.value.weight",
}


def rwkv7(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an RWKV-7 checkpoint.

    Time and channel mixing alternate: two layers of ours for each of theirs. The norm of the
    embeddings is applied to their table.
    """
    settings = source.settings
    _require(settings)
    mixers = [
        mixer
        for layer in range(settings["num_hidden_layers"])
        for mixer in (_time(settings, layer), _channel(settings))
    ]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=len(mixers),
        mixers=shortest_period(mixers),
        norm="layer",
        norm_eps=settings["norm_eps"],
        mlp=None,
        embedding_scale=1.0,
    )
    pre_norm = tuple(f"model.layers.0.pre_norm.{part}" for part in ("weight", "bias"))
    tensors = {
        "model.embed_tokens.weight": TensorSource(
            "model.embeddings.weight", _normalize(settings["norm_eps"]), pre_norm
        ),
        **prefix_names("model.norm", "model.norm", {"weight": "weight", "bias": "bias"}),
        "lm_head.weight": TensorSource("lm_head.weight"),
    }
    for layer, mixer in enumerate(mixers):
        theirs = f"model.layers.{layer // 2}"
        table = CHANNEL if layer % 2 else _time_weights(source, mixer)
        tensors |= prefix_names(f"model.layers.{layer}", theirs, table)
    return ImportPlan(config, tensors)


def _require(settings: Settings) -> None:
    d = settings["hidden_size"]
    settings.require("hidden_act", "sqrelu")
    settings.require("attn", None)
    settings.require("value_dim", None, d, [d] * settings["num_hidden_layers"])
    settings.require("tie_word_embeddings", False)
    for name in ("norm_first", "norm_bias"):
        settings.require(name, True)


def _time(settings: Settings, layer: int) -> dict[str, Any]:
    ranks = {"decay": "decay", "rate": "a", "gate": "gate", "value": "v"}
    return {
        "name": "rwkv7",
        "heads": settings["hidden_size"] // settings["head_dim"],
        **{f"{ours}_rank": settings[f"{theirs}_low_rank_dim"] for ours, theirs in ranks.items()},
        "residual": layer > 0,
        "eps": settings["norm_eps"],
        "floor": 1e-6 if settings.get("fuse_norm", True) else 0.0,
    }


def _channel(settings: Settings) -> dict[str, Any]:
    width = int(settings["hidden_size"] * (settings["hidden_ratio"] or 4))
    given = settings.get("intermediate_size", None)
    return {"name": "rwkv7_channel", "width": given or -(-width // 32) * 32}


def _time_weights(source: CheckpointSource, mixer: dict[str, Any]) -> Table:
    ranks = (
        {"alpha": "w", "eta": "a", "nu": "v"} if mixer["residual"] else {"alpha": "w", "eta": "a"}
    )
    heads = mixer["heads"]

    def by_heads(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (heads, -1))

    return {
        **linear("mixer_norm", "attn_norm", bias=True),
        "mixer.shift.mu": _shifts(source),
        **{f"mixer.W_{name}.weight": f"attn.{name}_proj.weight" for name in "rkvo"},
        **{
            f"mixer.W_{ours}.{part}": f"attn.{theirs}_lora.lora.{there}"
            for ours, theirs in ranks.items()
            for part, there in (
                ("0.weight", "0.weight"),
                ("1.weight", "2.weight"),
                ("1.bias", "2.bias"),
            )
        },
        "mixer.W_g.0.weight": "attn.g_lora.lora.0.weight",
        "mixer.W_g.1.weight": "attn.g_lora.lora.2.weight",
        "mixer.kappa": "attn.k_k",
        "mixer.kappa_eta": "attn.k_a",
        "mixer.rho": "attn.r_k",
        "mixer.norm.weight": TensorSource("attn.g_norm.weight", by_heads),
        "mixer.norm.bias": TensorSource("attn.g_norm.bias", by_heads),
    }


def _shifts(source: CheckpointSource) -> TensorSource:
    """All μ: in one tensor in checkpoints of before 2025-04, in one each since."""
    if "model.layers.0.attn.x_x" in source.names:
        return TensorSource("attn.x_x", lambda mu: mu.reshape(len(SHIFTED), -1))
    first, *others = (f"attn.x_{name}" for name in SHIFTED)
    return TensorSource(
        first, lambda *mu: torch.stack([one.flatten() for one in mu]), tuple(others)
    )


def _normalize(eps: float) -> Convert:
    def convert(embeddings: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(upcast(embeddings), weight.shape, upcast(weight), upcast(bias), eps)

    return convert
