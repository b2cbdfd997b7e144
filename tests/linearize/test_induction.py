"""The teachers that look far begin with heads that find what followed the same tokens before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastweights.linearize import LinearAttentionConfig, WindowOnly, linearize, use_mode

FIELDS = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture
def set_induction_heads(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from induction import set_induction_heads

    return set_induction_heads


def new_model(name: str, **other: object) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**FIELDS, **other}))


@torch.no_grad()
def recalled(model: Any, distance: int = 100) -> float:
    """The share of tokens, of the second half but its first ones, that are predicted right."""
    half = torch.randint(0, 512, (4, distance), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([half, half], 1)
    right = model(input_ids=ids).logits[:, :-1].argmax(-1) == ids[:, 1:]
    return float(right[:, distance + 2 :].float().mean())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_untrained_model_repeats_what_stands_far_back_but_not_through_a_window(
    set_induction_heads: Any, name: str
) -> None:
    assert recalled(new_model(name)) < 0.05
    model = set_induction_heads(new_model(name))
    assert recalled(model) > 0.8
    with use_mode(linearize(model, LinearAttentionConfig(window=64)), WindowOnly()):
        assert recalled(model) < 0.05


def test_heads_that_share_no_keys_are_refused(set_induction_heads: Any) -> None:
    with pytest.raises(ValueError, match="two heads for every key head"):
        set_induction_heads(new_model("llama", num_key_value_heads=4))
