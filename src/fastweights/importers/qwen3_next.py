"""Qwen3-Next and Qwen3.5: gated delta layers with gated softmax attention between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from fastweights.importers.attention import HEAD_NORMS, attention
from fastweights.importers.experts import experts, mlps_of_layers
from fastweights.importers.plan import (
    NORMS,
    Convert,
    ImportPlan,
    LayerPlan,
    Table,
    TensorSource,
    convolutions,
    glu_mlp,
    one_plus,
    outer,
    plan_layers,
    rows,
)
from fastweights.importers.source import CheckpointSource, Settings

FLOOR = 1e-6
"""Its L2 norm of q and k is x / √(|x|² + 10⁻⁶)."""

DELTA_REST: Table = {
    "mixer.log_a": "linear_attn.A_log",
    "mixer.b_alpha": "linear_attn.dt_bias",
}


def qwen3_next(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Qwen3-Next checkpoint; what predicts several tokens is left out."""
    return _plan(source, _delta_weights, partial(_is_sparse, source.settings))


def qwen3_5_text(source: CheckpointSource) -> ImportPlan:
    """Plan the import of the language model of a dense Qwen3.5 checkpoint: Qwen3-Next with one
    matrix each for q, k and v, the gate, β and α.
    """
    return _plan(source, _apart_weights, lambda _: False)


def qwen3_5_moe_text(source: CheckpointSource) -> ImportPlan:
    """Plan the import of the language model of a Qwen3.5 checkpoint with experts in every layer."""
    return _plan(source, _apart_weights, lambda _: True)


def _plan(
    source: CheckpointSource,
    delta_weights: Callable[[Settings], Table],
    is_sparse: Callable[[int], bool],
) -> ImportPlan:
    settings = source.settings
    settings.require("attention_bias", False)
    kinds = {
        "linear_attention": (gated_delta(settings), delta_weights(settings)),
        "full_attention": _softmax(settings),
    }
    layers = [kinds[kind] for kind in settings["layer_types"]]
    sparse = [is_sparse(layer) for layer in range(len(layers))]
    return plan_layers(
        source,
        layers,
        {ours: TensorSource(str(theirs), one_plus) for ours, theirs in NORMS.items()},
        mlps=mlps_of_layers(source, sparse, glu_mlp(), _experts),
        around=outer(convert=one_plus),
        published=[{r"^model\.": "model.language_model."}],
        ignored=("mtp.*", "model.visual.*"),
        norm_eps=settings["rms_norm_eps"],
        hidden_act=settings["hidden_act"],
        intermediate_size=settings.get("intermediate_size", None),
    )


def _is_sparse(settings: Settings, layer: int) -> bool:
    """Whether this layer is a mixture of experts."""
    dense = layer in settings["mlp_only_layers"] or (layer + 1) % settings["decoder_sparse_step"]
    return bool(settings["num_experts"] and not dense)


def _experts(source: CheckpointSource) -> LayerPlan:
    settings = source.settings
    count, width = settings["num_experts"], settings["moe_intermediate_size"]
    routing = {
        "count": count,
        "chosen": settings["num_experts_per_tok"],
        "normalized": settings.get("norm_topk_prob", True),
    }
    shared = {"shared": settings["shared_expert_intermediate_size"], "shared_gate": True}
    return {"name": "experts", "width": width, "routing": routing, **shared}, {
        "mlp.router.W.weight": "mlp.gate.weight",
        **experts(source, "mlp.experts", count, width),
        **glu_mlp("mlp.shared_expert", ours="mlp.shared"),
        "mlp.w_shared.weight": "mlp.shared_expert_gate.weight",
    }


def gated_delta(settings: Settings) -> dict[str, Any]:
    """Return the entry of `mixers` for the gated delta layer that these settings describe."""
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
    fused = {"q": (0, k), "k": (k, 2 * k), "v": (2 * k, 2 * k + v), "g": (2 * k + v, 2 * (k + v))}
    small = {"beta": (0, served), "alpha": (served, 2 * served)}
    return {
        **{
            f"mixer.W_{n}.weight": TensorSource(
                f"linear_attn.in_proj_{theirs}.weight", of_heads(heads, *span)
            )
            for theirs, parts in (("qkvz", fused), ("ba", small))
            for n, span in parts.items()
        },
        **_delta_rest(settings),
    }


def _apart_weights(settings: Settings) -> Table:
    ends = dict(zip("qkv", accumulate(convolved_widths(settings).values()), strict=True))
    return {
        **{
            f"mixer.W_{n}.weight": TensorSource(
                "linear_attn.in_proj_qkv.weight", rows(end - convolved_widths(settings)[n], end)
            )
            for n, end in ends.items()
        },
        "mixer.W_g.weight": "linear_attn.in_proj_z.weight",
        "mixer.W_beta.weight": "linear_attn.in_proj_b.weight",
        "mixer.W_alpha.weight": "linear_attn.in_proj_a.weight",
        **_delta_rest(settings),
    }


def convolved_widths(settings: Settings) -> dict[str, int]:
    """Return the channels of q, k and v in a gated delta layer."""
    keys = settings["linear_num_key_heads"] * settings["linear_key_head_dim"]
    values = settings["linear_num_value_heads"] * settings["linear_value_head_dim"]
    return {"q": keys, "k": keys, "v": values}


def _delta_rest(settings: Settings) -> Table:
    return {
        **convolutions(["linear_attn.conv1d.weight"], "linear_attn", convolved_widths(settings)),
        **DELTA_REST,
        "mixer.norm.weight": "linear_attn.norm.weight",
        "mixer.W_o.weight": "linear_attn.out_proj.weight",
    }


def _softmax(settings: Settings) -> LayerPlan:
    heads, width = settings["num_attention_heads"], settings["head_dim"]
    return {**attention(settings), "qk_norm": settings["rms_norm_eps"], "gated": True}, {
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
