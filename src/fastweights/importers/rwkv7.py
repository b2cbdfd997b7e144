"""RWKV-7 as flash-linear-attention names its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.importers.plan import ImportPlan, Table, TensorSource, linear, plan_layers
from fastweights.importers.rwkv import outer_with_norm
from fastweights.importers.rwkv6 import FLA
from fastweights.importers.source import CheckpointSource, Settings

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
    times = [_time(settings, layer) for layer in range(settings["num_hidden_layers"])]
    channel = (_channel(settings), CHANNEL)
    return plan_layers(
        source,
        [one for time in times for one in ((time, _time_weights(source, time)), channel)],
        {},
        around=outer_with_norm(*FLA, settings["norm_eps"]),
        parts=2,
        norm="layer",
        norm_eps=settings["norm_eps"],
        mlp=None,
    )


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
    ranks = {"alpha": "w", "eta": "a"} | ({"nu": "v"} if mixer["residual"] else {})
    parts = {"0.weight": "0.weight", "1.weight": "2.weight", "1.bias": "2.bias"}
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
            for part, there in parts.items()
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
