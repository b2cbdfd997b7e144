"""Small random models of transformers' own linear families: those of `ORIGINALS`, and others."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from reference_models import COMMON, ORIGINALS, VOCABULARY

WIDTH = 32
SIZE = 0.8
"""Of a weight, times √width: mixers matter, and rounding does not grow from layer to layer. The
logarithms of decay rates are as small, so that states last for several tokens.
"""
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IMPORTED = {
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "falcon_mamba": "Falcon-Mamba",
    "jamba": "Jamba, experts",
    "bamba": "Bamba",
    "zamba": "Zamba",
    "zamba2": "Zamba2",
    "nemotron_h": "Nemotron-H",
    "granitemoehybrid": "Granite 4.0, experts",
    "falcon_h1": "Falcon-H1",
    "qwen3_next": "Qwen3-Next, experts",
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5, experts",
    "olmo_hybrid": "OLMo Hybrid, with RoPE",
    "kimi_linear": "Kimi Linear, experts",
    "bailing_hybrid": "Ling 3.0, experts",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2, experts",
}
"""Model folders → names of `ORIGINALS`."""
_HYBRID = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN4 = {
    **_HYBRID,
    **_DELTA,
    **_EXPERTS,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "hc_count": 2,
    "hc_lowrank": 4,
}
_LARA = {
    **_HYBRID,
    **_DELTA,
    **_EXPERTS,
    "layer_types": ["linear_attention", "sliding_attention"],
    "sliding_window": 8,
}
_GLM = {
    "text_config": {
        **{name: size for name, size in _HYBRID.items() if name != "head_dim"},
        **_EXPERTS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "v_head_dim": 8,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 4,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "index_topk": 8,
        "index_kpool": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "layer_types": ["linear_attention", "indexed_attention"],
        "hc_mult": 2,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": WIDTH,
        "projection_intermediate_size": 16,
    },
}
_INKLING = {
    **_HYBRID,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "sliding_window_size": 8,
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "d_rel": 4,
    "rel_extent": 16,
    "n_shared_experts": 1,
    "unpadded_vocab_size": VOCABULARY,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (ORIGINALS[one].kind, ORIGINALS[one].settings) for name, one in _IMPORTED.items()},
    "qwen4_exp": ("qwen4_exp_text", _QWEN4),
    "lara_mini": ("lara_mini", _LARA),
    "glm5_next": ("glm5_next", _GLM),
    "lfm3": ("lfm3", {**_HYBRID, "layer_types": ["conv", "full_attention"]}),
    "inkling": ("inkling_text", _INKLING),
    "inkling2": ("inkling2_text", _INKLING),
    "inkling2_loop": ("inkling2_loop_text", _INKLING),
}
"""Of each model folder the model type of its texts, and its configuration."""


def present_families() -> tuple[str, ...]:
    """Those that the installed transformers has, with the layers that are configured here."""
    return tuple(filter(_is_present, FAMILIES))


@cache
def _is_present(family: str) -> bool:
    kind, fields = FAMILIES[family]
    if kind not in CONFIG_MAPPING:
        return False
    try:
        CONFIG_MAPPING[kind](**fields)
    except (ValueError, StrictDataclassError) as error:  # of layers that it does not know yet
        return "layer_types" not in str(error)
    return True


def build_family(family: str, **settings: Any) -> nn.Module:
    """A model of a few layers whose weights are large enough that its mixers matter.

    Args:
        family: a name of `present_families`
        settings: what else its configuration shall say
    """
    kind, fields = FAMILIES[family]
    pictures = "text_config" in fields
    fields = {**COMMON, **ENDS, **fields, **settings}
    if pictures:
        fields["text_config"] = {**COMMON, **ENDS, **fields["text_config"]}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**fields)
    if family in _IMPORTED:
        config._experts_implementation = "eager"  # its kernels want widths that are multiples
    auto = AutoModelForImageTextToText if pictures else AutoModelForCausalLM
    model = auto.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("A_log"):
            nn.init.normal_(parameter, std=SIZE * WIDTH**-0.5)
    return model.eval()
