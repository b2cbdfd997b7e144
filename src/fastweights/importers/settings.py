"""The settings of transformers' configurations that describe a model of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from fastweights.importers.nemotron_h import CHANNELS
from fastweights.layers import Experts, Rope
from fastweights.mixers import MLSTM, RGLRU, GatedDeltaNet, Mamba, Mamba2, SoftmaxAttention
from fastweights.models import FastWeightsForCausalLM

Fields = dict[str, Any]
M = TypeVar("M", bound=nn.Module)


def parts(model: FastWeightsForCausalLM, kind: type[M]) -> list[M]:
    """The modules of this kind in a model's layers, in their order."""
    return [part for part in model.model.layers.modules() if type(part) is kind]


def first(model: FastWeightsForCausalLM, kind: type[M]) -> M:
    """The first module of this kind.

    Raises:
        AttributeError: There is none.
    """
    found = parts(model, kind)
    if not found:
        raise AttributeError(f"no layer has a {kind.__name__}")
    return found[0]


def common(model: FastWeightsForCausalLM) -> Fields:
    """What every family states under the same names."""
    names = ("vocab_size", "hidden_size", "tie_word_embeddings")
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(model.config, name) for name in (*names, *ends)}


def decoder(model: FastWeightsForCausalLM) -> Fields:
    """What families of decoders with MLPs state under the same names."""
    return {
        **common(model),
        "num_hidden_layers": model.config.num_hidden_layers,
        "rms_norm_eps": model.config.norm_eps,
        "hidden_act": model.config.hidden_act,
        **_dense(model),
    }


def _dense(model: FastWeightsForCausalLM) -> Fields:
    """The width of MLPs that are not experts, if there are any."""
    for mlp in model.config.layer_mlps:
        if mlp is not None and mlp["name"] != "experts":
            return {"intermediate_size": mlp["width"]}
    return {}


def rope_parameters(rope: Rope) -> Fields:
    """How transformers states rotary positions."""
    stretch: Fields = {"rope_type": "default"}
    if rope.factor != 1:
        stretch = {"rope_type": "linear", "factor": rope.factor}
    if rope.factor != 1 and rope.context:
        stretch |= {
            "rope_type": "llama3",
            "original_max_position_embeddings": rope.context,
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
        }
    turning = {} if rope.fraction == 1 else {"partial_rotary_factor": rope.fraction}
    return {"rope_theta": rope.base, **stretch, **turning}


def attention(model: FastWeightsForCausalLM) -> Fields:
    """How transformers states softmax attention."""
    softmax = first(model, SoftmaxAttention)
    return {
        "num_attention_heads": softmax.heads,
        "num_key_value_heads": softmax.kv_heads,
        "head_dim": softmax.rope.width,
        "attention_bias": softmax.W_q.bias is not None,
        "rope_parameters": rope_parameters(softmax.rope),
    }


def llama(model: FastWeightsForCausalLM) -> Fields:
    return {**decoder(model), **attention(model), "mlp_bias": model.config.mlp_bias}


def mistral(model: FastWeightsForCausalLM) -> Fields:
    window = first(model, SoftmaxAttention).window
    return {**decoder(model), **attention(model), "sliding_window": window}


def qwen(model: FastWeightsForCausalLM) -> Fields:
    windows = [softmax.window for softmax in parts(model, SoftmaxAttention)]
    largest = max((window for window in windows if window), default=None)
    return {
        **decoder(model),
        **attention(model),
        "use_sliding_window": largest is not None,
        "sliding_window": largest,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windows],
    }


def layer_types(model: FastWeightsForCausalLM) -> list[str]:
    """Which layers are softmax attention, in transformers' words."""
    return [
        "full_attention" if isinstance(block.mixer, SoftmaxAttention) else "linear_attention"
        for block in model.model.layers
    ]


def qwen3_next(model: FastWeightsForCausalLM) -> Fields:
    delta = first(model, GatedDeltaNet)
    value_heads = delta.heads * delta.served
    return {
        **decoder(model),
        **attention(model),
        "layer_types": layer_types(model),
        "linear_num_key_heads": delta.heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": delta.W_k.out_features // delta.heads,
        "linear_value_head_dim": delta.W_v.out_features // value_heads,
        "linear_conv_kernel_dim": delta.conv_k.size,
        **_qwen_experts(model),
    }


def _qwen_experts(model: FastWeightsForCausalLM) -> Fields:
    found = parts(model, Experts)
    if not found:
        return {"num_experts": 0}
    routing, shared = found[0].router.routing, found[0].shared
    dense = [i for i, one in enumerate(model.model.layers) if not isinstance(one.mlp, Experts)]
    return {
        "num_experts": routing.count,
        "num_experts_per_tok": routing.chosen,
        "norm_topk_prob": routing.normalized,
        "moe_intermediate_size": expert_width(model),
        "shared_expert_intermediate_size": shared.W_1.out_features,  # type: ignore[union-attr]
        "mlp_only_layers": dense,
    }


def expert_width(model: FastWeightsForCausalLM) -> int:
    """Channels inside an expert."""
    return first(model, Experts).experts[0].W_1.out_features  # type: ignore[union-attr]


def _mamba(model: FastWeightsForCausalLM) -> Fields:
    mixer = first(model, Mamba)
    return {
        **common(model),
        "num_hidden_layers": model.config.num_hidden_layers,
        "layer_norm_epsilon": model.config.norm_eps,
        "state_size": mixer.log_A.shape[1],
        "expand": mixer.W_u.out_features // mixer.d,
        "conv_kernel": mixer.conv.size,
        "time_step_rank": mixer.W_Delta_1.out_features,
    }


def falcon_mamba(model: FastWeightsForCausalLM) -> Fields:
    return {**_mamba(model), "mixer_rms_eps": first(model, Mamba).norm_B.eps}


def mamba2(model: FastWeightsForCausalLM) -> Fields:
    mixer = first(model, Mamba2)
    width = mixer.W_z.out_features
    return {
        **common(model),
        "num_hidden_layers": model.config.num_hidden_layers,
        "layer_norm_epsilon": model.config.norm_eps,
        "num_heads": mixer.heads,
        "head_dim": width // mixer.heads,
        "state_size": mixer.split[1] // mixer.groups,
        "expand": width // mixer.d,
        "conv_kernel": mixer.conv.size,
        "n_groups": mixer.groups,
    }


def _hybrid_mamba2(model: FastWeightsForCausalLM) -> Fields:
    """How Bamba and its descendants state Mamba-2."""
    mixer = first(model, Mamba2)
    width = mixer.W_z.out_features
    return {
        "mamba_n_heads": mixer.heads,
        "mamba_d_head": width // mixer.heads,
        "mamba_d_state": mixer.split[1] // mixer.groups,
        "mamba_expand": width // mixer.d,
        "mamba_d_conv": mixer.conv.size,
        "mamba_n_groups": mixer.groups,
    }


def bamba(model: FastWeightsForCausalLM) -> Fields:
    attending = [i for i, kind in enumerate(layer_types(model)) if kind == "full_attention"]
    softmax = attention(model) if attending else {"num_attention_heads": 1}
    softmax.pop("head_dim", None)
    return {
        **decoder(model),
        **softmax,
        **_hybrid_mamba2(model),
        "attn_layer_indices": attending,
    }


def granitemoehybrid(model: FastWeightsForCausalLM) -> Fields:
    experts, dense = parts(model, Experts), _dense(model)
    widths: Fields = {"num_local_experts": 0, "shared_intermediate_size": 1}
    if dense:
        widths["shared_intermediate_size"] = dense["intermediate_size"]
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
    mamba, kinds = first(model, Mamba2), []
    for kind, block in zip(layer_types(model), model.model.layers, strict=True):
        channels = CHANNELS[isinstance(block.mlp, Experts)]
        kinds += [kind] if block.mlp is None else [kind, channels]
    attends = "full_attention" in kinds
    softmax = attention(model) if attends else {}
    softmax.pop("rope_parameters", None)
    return {
        **common(model),
        **softmax,
        **_dense(model),
        **(_nemotron_experts(model) if parts(model, Experts) else {}),
        "layers_block_type": kinds,
        "layer_norm_epsilon": model.config.norm_eps,
        "mlp_hidden_act": model.config.hidden_act,
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.W_z.out_features // mamba.heads,
        "ssm_state_size": mamba.split[1] // mamba.groups,
        "conv_kernel": mamba.conv.size,
        "n_groups": mamba.groups,
        "time_step_min": TINY,
    }


TINY = 1e-30
"""A limit of Δ that is none, whose logarithm transformers takes."""


def _nemotron_experts(model: FastWeightsForCausalLM) -> Fields:
    layer = first(model, Experts)
    routing = layer.router.routing
    return {
        "n_routed_experts": routing.count,
        "num_experts_per_tok": routing.chosen,
        "norm_topk_prob": routing.normalized,
        "n_group": routing.groups,
        "topk_group": routing.chosen_groups,
        "routed_scaling_factor": routing.scale,
        "moe_intermediate_size": expert_width(model),
        "moe_shared_expert_intermediate_size": layer.shared.W_1.out_features,  # type: ignore[union-attr]
        "moe_latent_size": None if layer.W_in is None else layer.W_in.out_features,
    }


def jamba(model: FastWeightsForCausalLM) -> Fields:
    mamba, softmax = first(model, Mamba), attention(model)
    attends = [kind == "full_attention" for kind in layer_types(model)]
    sparse = [isinstance(block.mlp, Experts) for block in model.model.layers]
    experts = parts(model, Experts)
    routing = experts[0].router.routing if experts else None
    return {
        **decoder(model),
        **({} if routing is None else {"intermediate_size": expert_width(model)}),
        "num_attention_heads": softmax["num_attention_heads"],
        "num_key_value_heads": softmax["num_key_value_heads"],
        "mamba_d_state": mamba.log_A.shape[1],
        "mamba_d_conv": mamba.conv.size,
        "mamba_expand": mamba.W_u.out_features // mamba.d,
        "mamba_dt_rank": mamba.W_Delta_1.out_features,
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


def recurrent_gemma(model: FastWeightsForCausalLM) -> Fields:
    lru, softmax = first(model, RGLRU), attention(model)
    kinds: dict[Any, str] = {RGLRU: "recurrent", SoftmaxAttention: "attention"}
    mixers = [block.mixer for block in model.model.layers]
    return {
        **common(model),
        "num_hidden_layers": model.config.num_hidden_layers,
        "rms_norm_eps": model.config.norm_eps,
        "hidden_activation": model.config.hidden_act,
        "intermediate_size": 2 * model.config.mlp_size,
        "num_attention_heads": lru.heads,
        "num_key_value_heads": softmax["num_key_value_heads"],
        "attention_bias": True,
        "rope_parameters": softmax["rope_parameters"],
        "attention_window_size": first(model, SoftmaxAttention).window,
        "lru_width": lru.W_u.out_features,
        "conv1d_width": lru.conv.size,
        "block_types": [kinds[type(mixer)] for mixer in mixers],
        "logits_soft_cap": model.config.logit_cap,
    }


def xlstm(model: FastWeightsForCausalLM) -> Fields:
    mixer, width = first(model, MLSTM), model.config.mlp_size
    return {
        **common(model),
        "num_hidden_layers": model.config.num_hidden_layers,
        "num_blocks": model.config.num_hidden_layers,
        "num_heads": mixer.heads,
        "norm_eps": model.config.norm_eps,
        "eps": 0.0,
        "qk_dim_factor": mixer.W_q.out_features / mixer.d,
        "gate_soft_cap": mixer.cap,
        "output_logit_soft_cap": model.config.logit_cap,
        "ffn_proj_factor": width / mixer.d,
        "ffn_round_up_to_multiple_of": 1,
    }


SETTINGS: dict[str, Callable[[FastWeightsForCausalLM], Fields]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen,
    "qwen3": qwen,
    "qwen3_next": qwen3_next,
    "mamba": _mamba,
    "falcon_mamba": falcon_mamba,
    "mamba2": mamba2,
    "bamba": bamba,
    "granitemoehybrid": granitemoehybrid,
    "nemotron_h": nemotron_h,
    "falcon_h1": falcon_h1,
    "jamba": jamba,
    "recurrent_gemma": recurrent_gemma,
    "xlstm": xlstm,
}
"""A model_type of transformers → the settings of such a model that a model of ours is."""
