"""Zamba and Zamba2: Mamba or Mamba-2 with transformer blocks that layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastweights.importers.attention import rope
from fastweights.importers.bamba import OUTER
from fastweights.importers.mamba import HYBRID_MAMBA, mamba2_weights
from fastweights.importers.plan import (
    ConstantTensor,
    Convert,
    ImportPlan,
    Table,
    TensorSource,
    glu_mlp,
    prefix_names,
    rows,
    scaled,
    taps,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

SHARPER = 2**0.5
"""Their scores are divided by √(d_k / 2)."""
PROJECTIONS: Table = {
    "norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "pre_ff_layernorm.weight",
    **{f"W_{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkvo"},
}
EPS = 1e-5
"""Of the norm inside Zamba2's Mamba-2."""
MAMBA2 = {
    "heads": "n_mamba_heads",
    "state": "mamba_d_state",
    "expand": "mamba_expand",
    "conv": "mamba_d_conv",
    "groups": "mamba_ngroups",
}
"""Arguments of our mixer → what Zamba2 calls these."""


def zamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Zamba checkpoint, whose attention layers share all weights; a Mamba of
    several heads is as many side by side.
    """
    settings = source.settings
    settings.require("mamba_proj_bias", False)
    settings.require("hidden_mamba_act", "silu")
    settings.require("attention_hidden_size", 2 * settings["hidden_size"])
    shared = {**_attention(settings), "rope": {"fraction": 0.0}}
    mixer, *beside = _mamba_heads(settings)
    return _plan(
        source,
        mixer={**mixer, "beside": beside} if beside else mixer,
        mixer_weights=_mamba_weights(settings, mixer, len(beside) + 1),
        blocks=[{"layers": _hybrids(settings), **shared}],
        block_weights={**_sharpened(PROJECTIONS), **glu_mlp("feed_forward")},
        theirs="shared_transf",
    )


def zamba2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Zamba2 checkpoint, whose layers share blocks in turn and adapt them."""
    settings = source.settings
    for name in ("add_bias_linear", "use_long_context"):
        settings.require(name, False)
    rank, count = settings["adapter_rank"], settings["num_mem_blocks"]
    shared = {
        **_attention(settings),
        "rope": rope(settings) if settings["use_mem_rope"] else {"fraction": 0.0},
        "rank": rank,
        "attention_rank": rank if settings["use_shared_attention_adapter"] else None,
    }
    places = [_hybrids(settings)[block::count] for block in range(count)]
    mixer = {"name": "mamba2", **settings.pick(MAMBA2), "eps": EPS}
    return _plan(
        source,
        mixer=mixer,
        mixer_weights=mamba2_weights(mixer, settings["hidden_size"], "mamba", conv_bias=True),
        blocks=[{"layers": layers, **shared} for layers in places if layers],
        block_weights={**_sharpened(PROJECTIONS), **_fused_mlp(settings["intermediate_size"])},
        theirs="shared_transformer",
    )


def _plan(
    source: CheckpointSource,
    *,
    mixer: dict[str, Any],
    mixer_weights: Table,
    blocks: Sequence[Mapping[str, Any]],
    block_weights: Table,
    theirs: str,
) -> ImportPlan:
    settings, hybrids = source.settings, _hybrids(source.settings)
    # without it, transformers ties no blocks either
    settings.require("tie_word_embeddings", True)
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        mixers=[mixer],
        norm_eps=settings["rms_norm_eps"],
        hidden_act=settings["hidden_act"],
        mlp=None,
        shared_blocks=[dict(block) for block in blocks] if hybrids else None,
        embedding_scale=1.0,
    )
    layer: Table = {"mixer_norm.weight": "input_layernorm.weight", **mixer_weights}
    tensors = dict(OUTER)
    for place in range(config.num_hidden_layers):
        below = ".mamba_decoder" if place in hybrids else ""
        tensors |= prefix_names(f"model.layers.{place}", f"model.layers.{place}{below}", layer)
    for number, block in enumerate(blocks if hybrids else ()):
        home = f"model.layers.{block['layers'][0]}.{theirs}"
        tensors |= prefix_names(f"model.shared.{number}", home, block_weights)
        for place in block["layers"]:
            ours = f"model.layers.{place}.shared"
            adapters = _adapters(block, hybrids.index(place))
            tensors |= prefix_names(f"{ours}.adapters", home, adapters)
            tensors[f"{ours}.W_o.weight"] = TensorSource(f"model.layers.{place}.linear.weight")
    homes = {block["layers"][0] for block in blocks} if hybrids else set()
    copies = (f"model.layers.{place}.{theirs}.*" for place in hybrids if place not in homes)
    return ImportPlan(config, tensors, ignored=tuple(copies))


def _hybrids(settings: Settings) -> list[int]:
    """The layers that use a shared block."""
    return [i for i, kind in enumerate(settings["layers_block_type"]) if kind == "hybrid"]


def _attention(settings: Settings) -> dict[str, Any]:
    return {
        "width": settings["intermediate_size"],
        "heads": settings["num_attention_heads"],
        "kv_heads": settings["num_key_value_heads"],
        "head_width": settings["attention_head_dim"],
    }


def _sharpened(table: Table) -> Table:
    return scaled(table, {"W_q.weight": SHARPER})


def _fused_mlp(width: int) -> Table:
    both = "feed_forward.gate_up_proj.weight"
    return {
        "mlp.W_1.weight": TensorSource(both, rows(0, width)),
        "mlp.W_2.weight": TensorSource(both, rows(width, 2 * width)),
        "mlp.W_3.weight": "feed_forward.down_proj.weight",
    }


def _adapters(block: Mapping[str, Any], use: int) -> Table:
    """What a layer adds to a block's projections, the use of a shared block of this number."""
    lists = {"mlp": "feed_forward.gate_up_proj_adapter_list"} if block.get("rank") else {}
    if block.get("attention_rank"):
        lists |= {name: f"self_attn.linear_{name}_adapter_list" for name in "qkv"}
    table: Table = {
        f"{name}.{half}.weight": f"{theirs}.{use}.{half}.weight"
        for name, theirs in lists.items()
        for half in (0, 1)
    }
    return scaled(table, {"q.1.weight": SHARPER})


# Mamba of several heads, each with its own B, C and Δ


def _mamba_heads(settings: Settings) -> list[dict[str, Any]]:
    expand, heads = settings["mamba_expand"], settings["n_mamba_heads"]
    if expand % heads:
        raise ValueError(
            f"a {settings.kind} checkpoint with n_mamba_heads = {heads} cannot be imported, only"
            f" with divisors of mamba_expand = {expand}"
        )
    return [{"name": "mamba", **settings.pick(HYBRID_MAMBA), "expand": expand // heads}] * heads


def _mamba_weights(settings: Settings, mixer: Mapping[str, Any], heads: int) -> Table:
    width = mixer["expand"] * settings["hidden_size"]
    table: Table = {}
    for head in range(heads):
        ours = "mixer" if heads == 1 else f"mixer.mixers.{head}"
        weights = _head_weights(mixer, head, width, conv_bias=settings["mamba_conv_bias"])
        table |= {f"{ours}.{name}": part for name, part in weights.items()}
    return table


def _head_weights(mixer: Mapping[str, Any], head: int, width: int, *, conv_bias: bool) -> Table:
    rank, state = mixer["rank"], mixer["state"]
    own = rows(head * width, (head + 1) * width)
    small = {"Delta_1": (0, rank), "B": (rank, rank + state), "C": (rank + state, None)}

    return {
        "W_u.weight": TensorSource("mamba.in_proj.weight", _every_other(0, own)),
        "W_z.weight": TensorSource("mamba.in_proj.weight", _every_other(1, own)),
        "conv.weight": TensorSource("mamba.conv1d.weight", lambda weight: taps(own(weight))),
        "conv_bias": TensorSource("mamba.conv1d.bias", own) if conv_bias else ConstantTensor(0.0),
        **{
            f"W_{name}.weight": TensorSource("mamba.x_proj_weight", _of_head(head, *part))
            for name, part in small.items()
        },
        "W_Delta_2.weight": TensorSource("mamba.dt_proj_weight", _of_head(head)),
        "W_Delta_2.bias": TensorSource("mamba.dt_proj_bias", _of_head(head)),
        "log_A": TensorSource("mamba.A_log", _of_head(head)),
        "D": TensorSource("mamba.D", _of_head(head)),
        "W_o.weight": TensorSource("mamba.out_proj.weight", lambda weight: own(weight.mT).mT),
    }


def _every_other(first: int, own: Convert) -> Convert:
    """Theirs has the outputs of W_u and W_z in turn."""
    return lambda weight: own(weight[first::2])


def _of_head(head: int, start: int = 0, stop: int | None = None) -> Convert:
    return lambda weights: weights[head, start:stop]
