"""The settings of transformers' configurations that describe a model of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastweights.importers.nemotron_h import CHANNELS
from fastweights.importers.shared_settings import (
    Fields,
    attention,
    common,
    decoder,
    dense,
    expert_width,
    first,
    layer_types,
    parts,
    rope_parameters,
)
from fastweights.layers import Experts
from fastweights.layers.experts import Routing
from fastweights.mixers import (
    KDA,
    MLA,
    MLSTM,
    RGLRU,
    GatedDeltaNet,
    GatedShortConvolution,
    Mamba,
    Mamba2,
    OLMo2Attention,
    SoftmaxAttention,
)
from fastweights.mixers.shared import SharedBlock
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
        **_grouped_routing(layer.router.routing),
        "num_local_experts": layer.router.routing.count,
        "moe_intermediate_size": width,
        "n_shared_experts": layer.shared.W_1.out_features // width,  # type: ignore[union-attr]
    }


def _grouped_routing(routing: Routing) -> Fields:
    """How families after DeepSeek-V3 state the choice of experts."""
    return {
        "num_experts_per_tok": routing.chosen,
        "norm_topk_prob": routing.normalized,
        "n_group": routing.groups,
        "topk_group": routing.chosen_groups,
        "routed_scaling_factor": routing.scale,
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
        **dense(model),
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
        **_grouped_routing(routing),
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
    mixer = first(model, Mamba)
    count = len(parts(model, Mamba)) // model.config.num_hidden_layers
    return {
        **_shared(model),
        "n_mamba_heads": count,
        "mamba_expand": count * mixer.W_u.out_features // mixer.d,
        "mamba_d_state": mixer.log_A.shape[1],
        "mamba_d_conv": mixer.conv.size,
        "mamba_dt_rank": mixer.W_Delta_1.out_features,
    }


def zamba2(model: FastWeightsForCausalLM) -> Fields:
    fields, mixer = _shared(model), first(model, Mamba2)
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
        **fields,
        **adapted,
        "n_mamba_heads": mixer.heads,
        "mamba_expand": mixer.W_z.out_features // mixer.d,
        "mamba_d_state": mixer.split[1] // mixer.groups,
        "mamba_d_conv": mixer.conv.size,
        "mamba_ngroups": mixer.groups,
        "time_step_min": TINY,
    }


SETTINGS: dict[str, Callable[[FastWeightsForCausalLM], Fields]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen,
    "qwen3": qwen,
    "qwen3_next": qwen3_next,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "olmo_hybrid": olmo_hybrid,
    "kimi_linear": kimi_linear,
    "bailing_hybrid": bailing_hybrid,
    "lfm2": lfm2,
    "minimax": minimax,
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
    "zamba": zamba,
    "zamba2": zamba2,
}
"""A model_type of transformers → the settings of such a model that a model of ours is."""
