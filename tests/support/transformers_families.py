"""Small random models of transformers' own linear families, from one table of configurations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 64
HEADS = 4
LAYERS = 2
SIZE = 0.8
"""Of a weight, times √width: mixers matter, and rounding does not grow from layer to layer. The
logarithms of decay rates are as small, so that states last for several tokens.
"""

Configuration = dict[str, Any]


def _common(width: int) -> Configuration:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _hybrid(width: int, layer_types: str = "layer_types", linear: str = "linear_attention") -> Any:
    """Width, a gated MLP, and a softmax layer behind a linear one."""
    return _common(width) | {
        "intermediate_size": 2 * width,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        layer_types: [linear, "full_attention"],
    }


def _mamba(width: int) -> Configuration:
    return _common(width) | {"state_size": 8}


def _mamba2(width: int) -> Configuration:
    heads = {"num_heads": HEADS, "head_dim": width // 2, "n_groups": 2}
    return _common(width) | heads | {"state_size": 8, "chunk_size": 16}


def _jamba(width: int) -> Configuration:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    attention = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
    return _hybrid(width, "_") | experts | attention


def _heads(width: int) -> Configuration:
    return {
        "mamba_n_heads": HEADS,
        "mamba_d_head": width // 2,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }


def _bamba(width: int) -> Configuration:
    return _hybrid(width, "_") | _heads(width) | {"attn_layer_indices": [1]}


def _granite(width: int) -> Configuration:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": width}
    return _hybrid(width) | _heads(width) | experts


def _falcon_h1(width: int) -> Configuration:
    return _hybrid(width, "_") | _heads(width) | {"mamba_d_ssm": 2 * width}


def _zamba(width: int) -> Configuration:
    return _hybrid(width, "_") | {
        "num_key_value_heads": HEADS,
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    }


def _zamba2(width: int) -> Configuration:
    return _zamba(width) | {
        "n_mamba_heads": HEADS,
        "mamba_ngroups": 2,
        "chunk_size": 16,
        "adapter_rank": 4,
        "use_mem_rope": True,
    }


def _nemotron(width: int) -> Configuration:
    return _hybrid(width) | {
        "head_dim": width // HEADS,
        "ssm_state_size": 8,
        "mamba_num_heads": HEADS,
        "mamba_head_dim": width // 2,
        "n_groups": 2,
        "chunk_size": 16,
    }


def _delta(width: int) -> Configuration:
    return {
        "head_dim": width // HEADS,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": HEADS,
        "linear_key_head_dim": width // HEADS,
        "linear_value_head_dim": width // HEADS,
    }


def _experts(width: int) -> Configuration:
    return {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


def _qwen3_5(width: int) -> Configuration:
    return _hybrid(width) | _delta(width)


def _qwen3_moe(width: int) -> Configuration:
    return _qwen3_5(width) | _experts(width)


def _qwen4(width: int) -> Configuration:
    indexer = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    budget = {"indexer_budget": 8, "indexer_compress_ratio": 4}
    return _qwen3_moe(width) | indexer | budget | {"hc_count": 2, "hc_lowrank": 4}


def _lara(width: int) -> Configuration:
    layers = {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 8}
    return _qwen3_moe(width) | layers


def _olmo(width: int) -> Configuration:
    return _hybrid(width) | _delta(width) | {"linear_num_value_heads": 2}


def _latent(width: int) -> Configuration:
    """Softmax layers over a latent (MLA), and experts."""
    return _hybrid(width) | {
        "num_key_value_heads": HEADS,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": width,
        "linear_head_dim": width // HEADS,
        "linear_num_heads": HEADS,
        "mlp_layer_types": ["dense", "sparse"],
    }


def _bailing(width: int) -> Configuration:
    return _latent(width) | {"head_dim": width // HEADS, "num_mtp_layers": 0}


def _glm(width: int) -> Configuration:
    indexer = {"index_topk": 8, "index_kpool": 4, "index_n_heads": 2, "index_head_dim": 8}
    layers = {"layer_types": ["linear_attention", "indexed_attention"], "hc_mult": 2}
    text = _latent(width) | indexer | layers | {"q_lora_rank": 8, "qk_rope_head_dim": 0}
    pictures = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    pictures |= {"out_hidden_size": width, "projection_intermediate_size": 16}
    return {"text_config": text, "vision_config": pictures}


def _lfm2(width: int) -> Configuration:
    return _hybrid(width, linear="conv")


def _lfm2_moe(width: int) -> Configuration:
    return _lfm2(width) | _experts(width) | {"num_dense_layers": 1}


def _lfm3(width: int) -> Configuration:
    return _lfm2(width) | {"head_dim": width // HEADS}


def _inkling(width: int) -> Configuration:
    head = width // HEADS
    return _hybrid(width) | {
        "layer_types": ["hybrid_sliding", "hybrid"],
        "head_dim": head,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": head,
        "sliding_window_size": 8,
        "d_rel": 4,
        "rel_extent": 16,
        "moe_intermediate_size": width,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "unpadded_vocab_size": VOCABULARY,
    }


FAMILIES: dict[str, tuple[str, Callable[[int], Configuration]]] = {
    "mamba": ("mamba", _mamba),
    "mamba2": ("mamba2", _mamba2),
    "falcon_mamba": ("falcon_mamba", _mamba),
    "jamba": ("jamba", _jamba),
    "bamba": ("bamba", _bamba),
    "zamba": ("zamba", _zamba),
    "zamba2": ("zamba2", _zamba2),
    "nemotron_h": ("nemotron_h", _nemotron),
    "granitemoehybrid": ("granitemoehybrid", _granite),
    "falcon_h1": ("falcon_h1", _falcon_h1),
    "qwen3_next": ("qwen3_next", _qwen3_moe),
    "qwen3_5": ("qwen3_5_text", _qwen3_5),
    "qwen3_5_moe": ("qwen3_5_moe_text", _qwen3_moe),
    "qwen4_exp": ("qwen4_exp_text", _qwen4),
    "lara_mini": ("lara_mini", _lara),
    "olmo_hybrid": ("olmo_hybrid", _olmo),
    "kimi_linear": ("kimi_linear", _latent),
    "bailing_hybrid": ("bailing_hybrid", _bailing),
    "glm5_next": ("glm5_next", _glm),
    "lfm2": ("lfm2", _lfm2),
    "lfm2_moe": ("lfm2_moe", _lfm2_moe),
    "lfm3": ("lfm3", _lfm3),
    "inkling": ("inkling_text", _inkling),
    "inkling2": ("inkling2_text", _inkling),
    "inkling2_loop": ("inkling2_loop_text", _inkling),
}
"""Of each model folder the model type of its texts, and the configuration of a width."""


def present_families() -> tuple[str, ...]:
    """Those that the installed transformers has, with the layers that are configured here."""
    return tuple(filter(_is_present, FAMILIES))


@cache
def _is_present(family: str) -> bool:
    kind, configure = FAMILIES[family]
    if kind not in CONFIG_MAPPING:
        return False
    try:
        CONFIG_MAPPING[kind](**{k: v for k, v in configure(32).items() if k != "_"})
    except (ValueError, StrictDataclassError) as error:  # of layers that it does not know yet
        return "layer_types" not in str(error)
    return True


def build_family(family: str, width: int = 32, **settings: Any) -> nn.Module:
    """A model of two layers, a linear and, in hybrids, a softmax one, whose weights are large
    enough that its mixers matter.

    Args:
        family: a name of `present_families`
        width: the model's; heads, groups and MLPs grow with it
        settings: what else its configuration shall say
    """
    kind, configure = FAMILIES[family]
    configuration = {k: v for k, v in configure(width).items() if k != "_"} | settings
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**configuration)
    auto = (
        AutoModelForCausalLM if "text_config" not in configuration else AutoModelForImageTextToText
    )
    model = auto.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("A_log"):
            nn.init.normal_(parameter, std=SIZE * width**-0.5)
    return model.eval()
