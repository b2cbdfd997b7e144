"""Qwen3-Next: gated delta layers with gated softmax attention between them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastweights.importers.attention import HEAD_NORMS, attention
from fastweights.importers.experts import experts
from fastweights.importers.plan import (
    Convert,
    ImportPlan,
    Table,
    TensorSource,
    glu_mlp,
    one_plus,
    rows,
    shortest_period,
    stack_layers,
    taps,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

FLOOR = 1e-6
"""Its L2 norm of q and k is x / √(|x|² + 10⁻⁶)."""

OUTER = {
    "model.embed_tokens.weight": TensorSource("model.embed_tokens.weight"),
    "model.norm.weight": TensorSource("model.norm.weight", one_plus),
    "lm_head.weight": TensorSource("lm_head.weight"),
}


def qwen3_next(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Qwen3-Next checkpoint; what predicts several tokens is left out."""
    settings = source.settings
    settings.require("attention_bias", False)
    kinds = {
        "linear_attention": (_delta, _delta_weights),
        "full_attention": (_softmax, _softmax_weights),
    }
    layers = [kinds[kind] for kind in settings["layer_types"]]
    sparse = [_is_sparse(settings, layer) for layer in range(len(layers))]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=len(layers),
        mixers=shortest_period([mixer(settings) for mixer, _ in layers]),
        norm_eps=settings["rms_norm_eps"],
        hidden_act=settings["hidden_act"],
        intermediate_size=settings["intermediate_size"],
        mlps=shortest_period([_mlp(settings, one) for one in sparse]) if any(sparse) else None,
        embedding_scale=1.0,
    )
    block: Table = {
        "mixer_norm.weight": TensorSource("input_layernorm.weight", one_plus),
        "mlp_norm.weight": TensorSource("post_attention_layernorm.weight", one_plus),
    }
    mlps = {False: glu_mlp(), True: _experts(source) if any(sparse) else {}}
    tables = [
        {**block, **mlps[one], **weights(settings)}
        for (_, weights), one in zip(layers, sparse, strict=True)
    ]
    return ImportPlan(
        config, {**OUTER, **stack_layers(config, "model.layers", tables)}, ignored=("mtp.*",)
    )


def _is_sparse(settings: Settings, layer: int) -> bool:
    """Whether this layer is a mixture of experts."""
    dense = layer in settings["mlp_only_layers"] or (layer + 1) % settings["decoder_sparse_step"]
    return bool(settings["num_experts"] and not dense)


def _mlp(settings: Settings, sparse: bool) -> dict[str, Any]:
    if not sparse:
        return {"name": "gated", "width": settings["intermediate_size"]}
    routing = {
        "count": settings["num_experts"],
        "chosen": settings["num_experts_per_tok"],
        "normalized": settings["norm_topk_prob"],
    }
    return {
        "name": "experts",
        "width": settings["moe_intermediate_size"],
        "routing": routing,
        "shared": settings["shared_expert_intermediate_size"],
        "shared_gate": True,
    }


def _experts(source: CheckpointSource) -> Table:
    settings = source.settings
    return {
        "mlp.router.W.weight": "mlp.gate.weight",
        **experts(
            source, "mlp.experts", settings["num_experts"], settings["moe_intermediate_size"]
        ),
        **glu_mlp("mlp.shared_expert", ours="mlp.shared"),
        "mlp.w_shared.weight": "mlp.shared_expert_gate.weight",
    }


def _delta(settings: Settings) -> dict[str, Any]:
    heads, value_heads = settings["linear_num_key_heads"], settings["linear_num_value_heads"]
    return {
        "name": "gated_deltanet",
        "heads": heads,
        "value_heads": value_heads,
        "expand_k": heads * settings["linear_key_head_dim"] / settings["hidden_size"],
        "expand_v": value_heads * settings["linear_value_head_dim"] / settings["hidden_size"],
        "conv": settings["linear_conv_kernel_dim"],
        "eps": settings["rms_norm_eps"],
        "floor": FLOOR,
    }


def _delta_weights(settings: Settings) -> Table:
    heads, k = settings["linear_num_key_heads"], settings["linear_key_head_dim"]
    served = settings["linear_num_value_heads"] // heads
    v = served * settings["linear_value_head_dim"]
    keys, values = heads * k, heads * v
    fused = {"q": (0, k), "k": (k, 2 * k), "v": (2 * k, 2 * k + v), "g": (2 * k + v, 2 * (k + v))}
    small = {"beta": (0, served), "alpha": (served, 2 * served)}
    convolved = {"q": (0, keys), "k": (keys, 2 * keys), "v": (2 * keys, 2 * keys + values)}
    return {
        **{
            f"mixer.W_{n}.weight": TensorSource(
                "linear_attn.in_proj_qkvz.weight", of_heads(heads, *s)
            )
            for n, s in fused.items()
        },
        **{
            f"mixer.W_{n}.weight": TensorSource(
                "linear_attn.in_proj_ba.weight", of_heads(heads, *s)
            )
            for n, s in small.items()
        },
        **{
            f"mixer.conv_{n}.weight": TensorSource("linear_attn.conv1d.weight", _taps_of(*s))
            for n, s in convolved.items()
        },
        "mixer.log_a": "linear_attn.A_log",
        "mixer.b_alpha": "linear_attn.dt_bias",
        "mixer.norm.weight": "linear_attn.norm.weight",
        "mixer.W_o.weight": "linear_attn.out_proj.weight",
    }


def _softmax(settings: Settings) -> dict[str, Any]:
    return {**attention(settings), "qk_norm": settings["rms_norm_eps"], "gated": True}


def _softmax_weights(settings: Settings) -> Table:
    heads, width = settings["num_attention_heads"], settings["head_dim"]
    return {
        "mixer.W_q.weight": TensorSource("self_attn.q_proj.weight", of_heads(heads, 0, width)),
        "mixer.W_g.weight": TensorSource(
            "self_attn.q_proj.weight", of_heads(heads, width, 2 * width)
        ),
        **{f"mixer.W_{name}.weight": f"self_attn.{name}_proj.weight" for name in "kvo"},
        **{ours: TensorSource(str(theirs), one_plus) for ours, theirs in HEAD_NORMS.items()},
    }


def of_heads(heads: int, start: int, stop: int) -> Convert:
    """Return a function that takes the outputs from `start` up to `stop` of every head.

    It is for a fused projection whose outputs are ordered by heads.
    """

    def convert(weight: Tensor) -> Tensor:
        return weight.unflatten(0, (heads, -1))[:, start:stop].flatten(0, 1)

    return convert


def _taps_of(start: int, stop: int) -> Convert:
    return lambda weight: taps(rows(start, stop)(weight))
