"""The settings of transformers' configurations that describe a model of ours with Mamba or Mamba-2
in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastweights.importers.mamba import HYBRID_MAMBA, HYBRID_MAMBA2, MAMBA, MAMBA2
from fastweights.importers.nemotron_h import CHANNELS
from fastweights.importers.nemotron_h import MAMBA2 as NEMOTRON_MAMBA2
from fastweights.importers.shared_settings import (
    Fields,
    attention,
    common,
    decoder,
    dense,
    expert_width,
    first,
    grouped_routing,
    layer_types,
    parts,
    rope_parameters,
)
from fastweights.importers.zamba import MAMBA2 as ZAMBA_MAMBA2
from fastweights.layers import Experts
from fastweights.mixers import Mamba, Mamba2, SoftmaxAttention
from fastweights.mixers.shared import SharedBlock
from fastweights.models import FastWeightsForCausalLM

TINY = 1e-30
"""A limit of Δ that is none, whose logarithm transformers takes."""


def _mamba(model: FastWeightsForCausalLM, names: Mapping[str, str]) -> Fields:
    """The arguments of Mamba by their names there."""
    mixer = first(model, Mamba)
    found = {
        "state": mixer.log_A.shape[1],
        "expand": mixer.W_u.out_features // mixer.d,
        "conv": mixer.conv.size,
        "rank": mixer.W_Delta_1.out_features,
    }
    return {theirs: found[ours] for ours, theirs in names.items()}


def _mamba2(model: FastWeightsForCausalLM, names: Mapping[str, str], width: str = "") -> Fields:
    """The arguments of Mamba-2, and the width of its heads, by their names there."""
    mixer = first(model, Mamba2)
    channels = mixer.W_z.out_features
    found = {
        "heads": mixer.heads,
        "state": mixer.split[1] // mixer.groups,
        "expand": channels // mixer.d,
        "conv": mixer.conv.size,
        "groups": mixer.groups,
    }
    widths = {width: channels // mixer.heads} if width else {}
    return {theirs: found[ours] for ours, theirs in names.items()} | widths


def _stack(model: FastWeightsForCausalLM) -> Fields:
    """How models of such layers alone state the others."""
    return {
        **common(model),
        "num_hidden_layers": model.config.num_hidden_layers,
        "layer_norm_epsilon": model.config.norm_eps,
    }


def mamba(model: FastWeightsForCausalLM) -> Fields:
    return {**_stack(model), **_mamba(model, MAMBA)}


def falcon_mamba(model: FastWeightsForCausalLM) -> Fields:
    return {**mamba(model), "mixer_rms_eps": first(model, Mamba).norm_B.eps}


def mamba2(model: FastWeightsForCausalLM) -> Fields:
    return {**_stack(model), **_mamba2(model, MAMBA2, "head_dim")}


def _hybrid_mamba2(model: FastWeightsForCausalLM) -> Fields:
    """How Bamba and its descendants state Mamba-2."""
    return _mamba2(model, HYBRID_MAMBA2, "mamba_d_head")


def bamba(model: FastWeightsForCausalLM) -> Fields:
    attending = [i for i, kind in enumerate(layer_types(model)) if kind == "full_attention"]
    softmax = attention(model, partial=True) if attending else {"num_attention_heads": 1}
    softmax.pop("head_dim", None)
    return {
        **decoder(model),
        **softmax,
        **_hybrid_mamba2(model),
        "attn_layer_indices": attending,
    }


def granitemoehybrid(model: FastWeightsForCausalLM) -> Fields:
    experts, plain = parts(model, Experts), dense(model)
    widths: Fields = {"num_local_experts": 0, "shared_intermediate_size": 1}
    if plain:
        widths["shared_intermediate_size"] = plain["intermediate_size"]
    if experts:
        routing, shared = experts[0].router.routing, experts[0].shared
        widths = {
            "num_local_experts": routing.count,
            "num_experts_per_tok": routing.chosen,
            "intermediate_size": expert_width(model),
            "shared_intermediate_size": shared.W_1.out_features,  # type: ignore[union-attr]
        }
    softmax = attention(model)
    width = softmax.pop("head_dim")
    rotary = first(model, SoftmaxAttention).rope.fraction > 0
    return {
        **decoder(model),
        **softmax,
        **_hybrid_mamba2(model),
        **widths,
        "rope_parameters": softmax["rope_parameters"] if rotary else None,
        "position_embedding_type": "rope" if rotary else None,
        "layer_types": layer_types(model),
        "embedding_multiplier": model.config.input_scale,
        "attention_multiplier": width**-0.5,
    }


def falcon_h1(model: FastWeightsForCausalLM) -> Fields:
    mamba, softmax = first(model, Mamba2), attention(model)
    normed = mamba.w_norm is not None
    return {
        **decoder(model),
        **softmax,
        **_hybrid_mamba2(model),
        "mamba_d_ssm": mamba.W_z.out_features,
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": not normed,
        "embedding_multiplier": model.config.input_scale,
    }


def nemotron_h(model: FastWeightsForCausalLM) -> Fields:
    kinds: list[str] = []
    for kind, block in zip(layer_types(model), model.model.layers, strict=True):
        channels = CHANNELS[isinstance(block.mlp, Experts)]
        kinds += [kind] if block.mlp is None else [kind, channels]
    attends = "full_attention" in kinds
    softmax = attention(model) if attends else {}
    softmax.pop("rope_parameters", None)
    return {
        **common(model),
        **softmax,
        **dense(model),
        **(_nemotron_experts(model) if parts(model, Experts) else {}),
        "layers_block_type": kinds,
        "layer_norm_epsilon": model.config.norm_eps,
        "mlp_hidden_act": model.config.hidden_act,
        **_mamba2(model, NEMOTRON_MAMBA2, "mamba_head_dim"),
        "time_step_min": TINY,
    }


def _nemotron_experts(model: FastWeightsForCausalLM) -> Fields:
    layer = first(model, Experts)
    routing = layer.router.routing
    return {
        "n_routed_experts": routing.count,
        **grouped_routing(routing),
        "moe_intermediate_size": expert_width(model),
        "moe_shared_expert_intermediate_size": layer.shared.W_1.out_features,  # type: ignore[union-attr]
        "moe_latent_size": None if layer.W_in is None else layer.W_in.out_features,
    }


def jamba(model: FastWeightsForCausalLM) -> Fields:
    softmax = attention(model)
    attends = [kind == "full_attention" for kind in layer_types(model)]
    sparse = [isinstance(block.mlp, Experts) for block in model.model.layers]
    experts = parts(model, Experts)
    routing = experts[0].router.routing if experts else None
    return {
        **decoder(model),
        **({} if routing is None else {"intermediate_size": expert_width(model)}),
        "num_attention_heads": softmax["num_attention_heads"],
        "num_key_value_heads": softmax["num_key_value_heads"],
        **_mamba(model, HYBRID_MAMBA),
        "num_experts": 1 if routing is None else routing.count,
        "num_experts_per_tok": 1 if routing is None else routing.chosen,
        **_recurring("attn_layer", attends),
        **_recurring("expert_layer", sparse),
    }


def _recurring(what: str, marked: list[bool]) -> Fields:
    """The period and offset of layers that come back; the length of the model for one of them."""
    places = [i for i, one in enumerate(marked) if one] or [0]
    period = places[1] - places[0] if len(places) > 1 else len(marked)
    return {f"{what}_period": period, f"{what}_offset": places[0]}


def _shared(model: FastWeightsForCausalLM) -> Fields:
    """Blocks that layers share, which are all of one size."""
    blocks, layers = model.model.shared, range(model.config.num_hidden_layers)
    shared = {} if not len(blocks) else _shared_block(blocks[0])  # type: ignore[arg-type]
    used = model.config.layer_shared_blocks
    return {
        **common(model),
        **shared,
        "num_hidden_layers": len(layers),
        "rms_norm_eps": model.config.norm_eps,
        "hidden_act": model.config.hidden_act,
        "layers_block_type": ["hybrid" if i in used else "linear_attention" for i in layers],
    }


def _shared_block(block: SharedBlock) -> Fields:
    return {
        "intermediate_size": block.mlp.W_1.out_features,
        "num_attention_heads": block.heads,
        "num_key_value_heads": block.kv_heads,
        "attention_head_dim": block.rope.width,
    }


def zamba(model: FastWeightsForCausalLM) -> Fields:
    count = len(parts(model, Mamba)) // model.config.num_hidden_layers
    own = _mamba(model, HYBRID_MAMBA)
    whole = {"n_mamba_heads": count, "mamba_expand": count * own["mamba_expand"]}
    return {**_shared(model), **own, **whole}


def zamba2(model: FastWeightsForCausalLM) -> Fields:
    blocks: Any = list(model.model.shared)
    adapted: Fields = {}
    if blocks:
        block = blocks[0]
        adapted = {
            "num_mem_blocks": len(blocks),
            "adapter_rank": block.rank or 1,
            "use_shared_attention_adapter": block.attention_rank is not None,
            "use_mem_rope": block.rope.fraction > 0,
            "rope_parameters": rope_parameters(block.rope),
        }
    return {
        **_shared(model),
        **adapted,
        **_mamba2(model, ZAMBA_MAMBA2),
        "time_step_min": TINY,
    }
