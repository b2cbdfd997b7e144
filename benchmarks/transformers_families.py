"""Models of transformers' linear families in one size, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH, LAYERS, VOCABULARY, HEADS, HEAD = 512, 4, 1024, 8, 64
EXPERTS, CHOSEN, EXPERT_WIDTH = 4, 2, 512
STATE = 128
"""Rows of Mamba-2's state."""

Settings = dict[str, Any]


def _order(linear: str = "linear_attention", last: str = "full_attention") -> list[str]:
    return [linear] * (LAYERS - 1) + [last]


COMMON: Settings = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SOFTMAX: Settings = {
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
}
HYBRID = SOFTMAX | {"layer_types": _order()}
SCAN = {
    "mamba_n_heads": 2 * HEADS,
    "mamba_d_head": HEAD,
    "mamba_n_groups": 1,
    "mamba_d_state": STATE,
}
ZAMBA = SOFTMAX | {
    "num_key_value_heads": HEADS,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
}
DELTA = HYBRID | {
    "head_dim": HEAD,
    "linear_num_key_heads": HEADS // 2,
    "linear_num_value_heads": HEADS,
    "linear_key_head_dim": HEAD,
    "linear_value_head_dim": HEAD,
}
MOE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": EXPERT_WIDTH,
    "shared_expert_intermediate_size": EXPERT_WIDTH,
}
KIMI = HYBRID | {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": HEAD,
    "n_shared_experts": 1,
    "num_experts_per_tok": CHOSEN,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": EXPERT_WIDTH,
    "linear_head_dim": HEAD,
    "linear_num_heads": HEADS,
    "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
}
INKLING = SOFTMAX | {
    "layer_types": _order("hybrid_sliding", "hybrid"),
    "head_dim": HEAD,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": HEADS // 2,
    "swa_head_dim": HEAD,
    "sliding_window_size": 256,
    "rel_extent": 256,
    "moe_intermediate_size": EXPERT_WIDTH,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "n_shared_experts": 1,
    "unpadded_vocab_size": VOCABULARY,
}

FAMILIES: dict[str, tuple[str, Settings]] = {
    "mamba": ("mamba", {}),
    "falcon_mamba": ("falcon_mamba", {}),
    "jamba": (
        "jamba",
        SOFTMAX
        | {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
        | {"attn_layer_period": LAYERS, "attn_layer_offset": LAYERS - 1},
    ),
    "zamba": ("zamba", ZAMBA),
    "mamba2": (
        "mamba2",
        {"num_heads": 2 * HEADS, "head_dim": HEAD, "n_groups": 1, "state_size": STATE},
    ),
    "bamba": ("bamba", SOFTMAX | SCAN | {"attn_layer_indices": [LAYERS - 1]}),
    "zamba2": (
        "zamba2",
        ZAMBA | {"n_mamba_heads": 2 * HEADS, "mamba_d_state": STATE, "use_mem_rope": True},
    ),
    "falcon_h1": ("falcon_h1", SOFTMAX | SCAN | {"mamba_d_ssm": 2 * WIDTH}),
    "granitemoehybrid": (
        "granitemoehybrid",
        HYBRID
        | SCAN
        | {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
        | {"shared_intermediate_size": EXPERT_WIDTH},
    ),
    "nemotron_h": (
        "nemotron_h",
        SOFTMAX
        | {"layer_types": ["linear_attention", "mlp", "linear_attention", "full_attention"]}
        | {"head_dim": HEAD, "ssm_state_size": STATE, "n_groups": 1}
        | {"mamba_num_heads": 2 * HEADS, "mamba_head_dim": HEAD},
    ),
    "qwen3_next": ("qwen3_next", DELTA | {"num_experts": 0, "mlp_only_layers": [*range(LAYERS)]}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA | MOE),
    "qwen4_exp": (
        "qwen4_exp_text",
        DELTA
        | MOE
        | {"layer_types": _order(last="indexed_attention"), "hc_count": 2, "hc_lowrank": 32}
        | {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 64}
        | {"indexer_budget": 256, "indexer_compress_ratio": 16},
    ),
    "olmo_hybrid": ("olmo_hybrid", DELTA | {"linear_num_key_heads": HEADS}),
    "kimi_linear": ("kimi_linear", KIMI),
    "bailing_hybrid": ("bailing_hybrid", KIMI | {"head_dim": HEAD, "num_mtp_layers": 0}),
    "glm5_next": (
        "glm5_next",
        KIMI
        | {"layer_types": _order(last="indexed_attention"), "hc_mult": 2}
        | {"q_lora_rank": 128, "qk_rope_head_dim": 0}
        | {"index_topk": 256, "index_kpool": 16, "index_n_heads": 4, "index_head_dim": 32},
    ),
    "lfm2": ("lfm2", SOFTMAX | {"layer_types": _order("conv")}),
    "lfm2_moe": (
        "lfm2_moe",
        SOFTMAX | MOE | {"layer_types": _order("conv"), "num_dense_layers": 1},
    ),
    "inkling": ("inkling_text", INKLING),
    "inkling2": ("inkling2_text", INKLING),
    "recurrent_gemma": ("recurrent_gemma", SOFTMAX | {"attention_window_size": 256}),
    "rwkv": ("rwkv", {}),
    "xlstm": ("xlstm", {"num_heads": HEADS}),
    "minimax": (
        "minimax",
        HYBRID | {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    ),
    "llama": ("llama", SOFTMAX),
}
"""Of each model folder the model type of its texts, and its settings beside the common ones; the
last is softmax alone, which nothing replaces.
"""


SEEING: dict[str, Settings] = {
    "glm5_next": {"depth": 1, "hidden_size": 64, "num_heads": 1, "out_hidden_size": WIDTH}
}
"""Model types that have no class for texts alone, with the smallest part that sees."""


def present_families() -> tuple[str, ...]:
    """Those that the installed transformers has."""
    return tuple(family for family, (kind, _) in FAMILIES.items() if kind in CONFIG_MAPPING)


def build_family(family: str) -> PreTrainedModel:
    """The family's model: width 512, four layers, a softmax one last where it is a hybrid."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    if kind in SEEING:
        parts = {"text_config": COMMON | settings, "vision_config": SEEING[kind]}
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**parts))
    else:
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**COMMON | settings))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5 * WIDTH**-0.5)
    return model.eval()
