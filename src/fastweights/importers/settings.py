"""The settings of transformers' configurations that describe a model of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastweights.importers.mamba_settings import (
    bamba,
    falcon_h1,
    falcon_mamba,
    granitemoehybrid,
    jamba,
    mamba,
    mamba2,
    nemotron_h,
    zamba,
    zamba2,
)
from fastweights.importers.shared_settings import (
    Fields,
    attention,
    common,
    decoder,
    expert_width,
    first,
    grouped_routing,
    layer_types,
    parts,
    rope_parameters,
)
from fastweights.layers import Experts, GatedMLP
from fastweights.mixers import (
    KDA,
    MLA,
    MLSTM,
    RGLRU,
    GatedDeltaNet,
    GatedShortConvolution,
    OLMo2Attention,
    SoftmaxAttention,
)
from fastweights.models import FastWeightsForCausalLM


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


def gemma3_text(model: FastWeightsForCausalLM) -> Fields:
    """With the scale of scores as it is in the norms of queries."""
    fields = qwen(model)
    del fields["use_sliding_window"]
    activation = fields.pop("hidden_act")
    layers = parts(model, SoftmaxAttention)
    kinds = zip(fields["layer_types"], layers, strict=True)
    return {
        **fields,
        "hidden_activation": activation,
        "query_pre_attn_scalar": fields["head_dim"],
        "rope_parameters": {kind: rope_parameters(softmax.rope) for kind, softmax in kinds},
        "final_logit_softcapping": model.config.logit_cap,
    }


def lfm2(model: FastWeightsForCausalLM) -> Fields:
    mixer = first(model, GatedShortConvolution)
    fields = {**decoder(model), **attention(model)}
    return {
        **fields,
        "norm_eps": fields.pop("rms_norm_eps"),
        "layer_types": layer_types(model, "conv"),
        "conv_L_cache": mixer.conv.size,
        "conv_bias": mixer.conv_bias is not None,
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(model: FastWeightsForCausalLM) -> Fields:
    routing = first(model, Experts).router.routing
    dense = [isinstance(block.mlp, GatedMLP) for block in model.model.layers]
    fields = lfm2(model)
    fields.pop("block_auto_adjust_ff_dim")
    return {
        **fields,
        "num_dense_layers": sum(dense),
        "moe_intermediate_size": expert_width(model),
        "num_experts": routing.count,
        "num_experts_per_tok": routing.chosen,
        "use_expert_bias": routing.corrected,
        "norm_topk_prob": routing.normalized,
        "routed_scaling_factor": routing.scale,
    }


def minimax(model: FastWeightsForCausalLM) -> Fields:
    """With β = α, so that weights are as they are."""
    alpha = 1 / model.config.input_scale
    kinds = ("full_attn", "linear_attn", "mlp")
    return {
        **decoder(model),
        **attention(model),
        "rms_norm_eps": model.config.norm_eps * alpha**2,
        "layer_types": layer_types(model),
        "sliding_window": first(model, SoftmaxAttention).window,
        **_minimax_experts(model),
        **{f"{kind}_{factor}_factor": alpha for kind in kinds for factor in ("alpha", "beta")},
    }


def _minimax_experts(model: FastWeightsForCausalLM) -> Fields:
    found = parts(model, Experts)
    if not found:
        return {"num_local_experts": 1, "num_experts_per_tok": 1}
    routing = found[0].router.routing
    return {
        "intermediate_size": expert_width(model),
        "num_local_experts": routing.count,
        "num_experts_per_tok": routing.chosen,
    }


def _gated_delta(model: FastWeightsForCausalLM) -> Fields:
    delta = first(model, GatedDeltaNet)
    value_heads = delta.heads * delta.served
    return {
        "layer_types": layer_types(model),
        "linear_num_key_heads": delta.heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": delta.W_k.out_features // delta.heads,
        "linear_value_head_dim": delta.W_v.out_features // value_heads,
        "linear_conv_kernel_dim": delta.conv_k.size,
    }


def qwen3_5_text(model: FastWeightsForCausalLM) -> Fields:
    return {**decoder(model), **attention(model, partial=True), **_gated_delta(model)}


def qwen3_5_moe_text(model: FastWeightsForCausalLM) -> Fields:
    """Experts in every layer, their weights normalised."""
    experts = _qwen_experts(model)
    for name in ("norm_topk_prob", "mlp_only_layers"):
        experts.pop(name, None)
    return {**qwen3_5_text(model), **experts}


def qwen3_next(model: FastWeightsForCausalLM) -> Fields:
    return {**qwen3_5_text(model), **_qwen_experts(model)}


def olmo_hybrid(model: FastWeightsForCausalLM) -> Fields:
    softmax = attention(model, OLMo2Attention)
    turned = first(model, OLMo2Attention).rope.fraction > 0
    return {
        **decoder(model),
        **softmax,
        "rope_parameters": softmax["rope_parameters"] if turned else None,
        **_gated_delta(model),
        "linear_allow_neg_eigval": first(model, GatedDeltaNet).largest > 1,
    }


def _latent(model: FastWeightsForCausalLM) -> Fields:
    """Kimi Delta Attention and latent attention."""
    delta, softmax = first(model, KDA), first(model, MLA)
    width, turned = softmax.parts
    return {
        **decoder(model),
        "layer_types": layer_types(model),
        **_latent_experts(model),
        "num_attention_heads": softmax.heads,
        "num_key_value_heads": softmax.heads,
        "kv_lora_rank": softmax.W_c.out_features,
        "qk_nope_head_dim": width,
        "qk_rope_head_dim": turned,
        "v_head_dim": softmax.W_uv.shape[1],
        "linear_num_heads": delta.heads,
        "linear_head_dim": delta.W_k.out_features // delta.heads,
        "linear_conv_kernel_dim": delta.conv_k.size,
    }


def _latent_experts(model: FastWeightsForCausalLM) -> Fields:
    sparse = [isinstance(block.mlp, Experts) for block in model.model.layers]
    fields: Fields = {"mlp_layer_types": ["sparse" if one else "dense" for one in sparse]}
    if not any(sparse):
        return fields
    layer, width = first(model, Experts), expert_width(model)
    return {
        **fields,
        **grouped_routing(layer.router.routing),
        "num_local_experts": layer.router.routing.count,
        "moe_intermediate_size": width,
        "n_shared_experts": layer.shared.W_1.out_features // width,  # type: ignore[union-attr]
    }


def kimi_linear(model: FastWeightsForCausalLM) -> Fields:
    queries = first(model, MLA).W_cq
    return {**_latent(model), "q_lora_rank": None if queries is None else queries.out_features}


def bailing_hybrid(model: FastWeightsForCausalLM) -> Fields:
    fields, lowest = _latent(model), first(model, KDA).lowest
    bound = {} if lowest is None else {"kda_lower_bound": -lowest}
    return {
        **fields,
        "head_dim": fields["linear_head_dim"],
        "short_conv_kernel_size": fields["linear_conv_kernel_dim"],
        "rope_parameters": rope_parameters(first(model, MLA).rope),
        "kda_safe_gate": lowest is not None,
        **bound,
        "num_mtp_layers": 0,
    }


def _qwen_experts(model: FastWeightsForCausalLM) -> Fields:
    found = parts(model, Experts)
    if not found:
        return {"num_experts": 0}
    routing, shared = found[0].router.routing, found[0].shared
    plain = [i for i, one in enumerate(model.model.layers) if not isinstance(one.mlp, Experts)]
    return {
        "num_experts": routing.count,
        "num_experts_per_tok": routing.chosen,
        "norm_topk_prob": routing.normalized,
        "moe_intermediate_size": expert_width(model),
        "shared_expert_intermediate_size": shared.W_1.out_features,  # type: ignore[union-attr]
        "mlp_only_layers": plain,
    }


def recurrent_gemma(model: FastWeightsForCausalLM) -> Fields:
    lru, softmax = first(model, RGLRU), attention(model, partial=True)
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
    "gemma3_text": gemma3_text,
    "qwen3_next": qwen3_next,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "olmo_hybrid": olmo_hybrid,
    "kimi_linear": kimi_linear,
    "bailing_hybrid": bailing_hybrid,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "minimax": minimax,
    "mamba": mamba,
    "falcon_mamba": falcon_mamba,
    "mamba2": mamba2,
    "bamba": bamba,
    "granitemoehybrid": granitemoehybrid,
    "nemotron_h": nemotron_h,
    "falcon_h1": falcon_h1,
    "jamba": jamba,
    "recurrent_gemma": recurrent_gemma,
    "xlstm": xlstm,
    "zamba": zamba,
    "zamba2": zamba2,
}
"""A model_type of transformers → the settings of such a model that a model of ours is."""
