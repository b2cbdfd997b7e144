"""Small random models of transformers that `patch_transformers` is for, one per kind of rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 64
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_HYBRID = _COMMON | {
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen3_next": _HYBRID
    | {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 0,
        "mlp_only_layers": [0, 1],
    },
    "bamba": _HYBRID
    | {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "attn_layer_indices": [1],
    },
    "mamba": _COMMON | {"state_size": 8},
}


def build(model_type: str, **others: Any) -> Any:
    """A model of this type whose mixers matter."""
    torch.manual_seed(0)
    configuration = AutoConfig.for_model(model_type, **(CONFIGURATIONS[model_type] | others))
    model = AutoModelForCausalLM.from_config(configuration)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


def tokens(*shape: int) -> Tensor:
    """Tokens none of which is padding."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def learn(model: Any, ids: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    """(logits, all gradients in one row) of predicting `ids`."""
    model.zero_grad()
    found = model(input_ids=ids, labels=ids, use_cache=False, **named)
    found.loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return found.logits.detach(), torch.cat(gradients)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference beside the largest number."""
    return ((found - expected).abs().max() / expected.abs().max()).item()
