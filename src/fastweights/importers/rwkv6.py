"""RWKV-6 as flash-linear-attention names its weights."""

from __future__ import annotations

from torch import Tensor

from fastweights.importers.plan import ImportPlan, Table, TensorSource, linear, plan_layers
from fastweights.importers.rwkv import outer_with_norm
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.layers import upcast

FLA = ("model.embeddings", "model.layers.0.pre_norm", "model.norm", "lm_head")
"""What stands around the layers of flash-linear-attention's RWKV."""


def rwkv6(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an RWKV-6 checkpoint.

    Time and channel mixing alternate: two layers of ours for each of theirs. The norm of the
    embeddings is applied to their table.
    """
    settings = source.settings
    settings.require("attn", None)
    settings.require("hidden_act", "sqrelu")
    settings.require("tie_word_embeddings", False)
    settings.require("norm_first", True)
    settings.require("norm_bias", True)
    settings.require("expand_v", 1.0)
    time = {
        "name": "rwkv6",
        "heads": settings["num_heads"],
        "expand_k": settings["expand_k"],
        "rank": settings["proj_low_rank_dim"],
        "decay_rank": settings["gate_low_rank_dim"],
        "eps": settings["norm_eps"],
    }
    channel = {"name": "rwkv4_channel", "width": _channel_width(settings)}
    layers = [(time, _time(settings)), (channel, CHANNEL)] * settings["num_hidden_layers"]
    return plan_layers(
        source,
        layers,
        {},
        around=outer_with_norm(*FLA, settings["norm_eps"]),
        parts=2,
        norm="layer",
        norm_eps=settings["norm_eps"],
        mlp=None,
    )


def _channel_width(settings: Settings) -> int:
    """hidden_ratio · d, the next multiple of 32, unless stated."""
    ratio = settings["hidden_ratio"] or 3.5
    return settings["intermediate_size"] or -(-int(ratio * settings["hidden_size"]) // 32) * 32


def _time(settings: Settings) -> Table:
    rank = settings["proj_low_rank_dim"]
    whole = {name: f"attn.{name}_proj.linear.weight" for name in "rkvg"}
    return {
        **linear("mixer_norm", "attn_norm", bias=True),
        "mixer.mu_z": "attn.x_proj.0.mu",
        "mixer.mu": "attn.x_bias",
        "mixer.M_1.weight": "attn.x_proj.0.linear.weight",
        "mixer.M_2": TensorSource(
            "attn.x_proj.2.weight", lambda weight: weight.unflatten(1, (5, rank)).permute(1, 2, 0)
        ),
        **{f"mixer.W_{name}.weight": theirs for name, theirs in whole.items()},
        "mixer.W_alpha_1.weight": "attn.w_proj.linear.lora.0.weight",
        **linear("mixer.W_alpha_2", "attn.w_proj.linear.lora.2", bias=True),
        "mixer.u": "attn.bonus",
        "mixer.w_norm": "attn.g_norm.weight",
        "mixer.b_norm": "attn.g_norm.bias",
        "mixer.W_o.weight": "attn.o_proj.weight",
    }


def _rest(mu: Tensor) -> Tensor:
    """Theirs is the part of the token before, ours that of the token."""
    return 1 - upcast(mu)


CHANNEL: Table = {
    **linear("mixer_norm", "ffn_norm", bias=True),
    "mixer.shift_k.mu": TensorSource("ffn.key.mu", _rest),
    "mixer.shift_r.mu": TensorSource("ffn.receptance.mu", _rest),
    "mixer.W_k.weight": "ffn.key.linear.weight",
    "mixer.W_r.weight": "ffn.receptance.linear.weight",
    "mixer.W_o.weight": "ffn.value.weight",
}
