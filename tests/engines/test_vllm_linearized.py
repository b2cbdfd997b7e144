"""Linearized models in vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fastweights.linearize import LinearAttentionConfig, linearize
from pretrained import SIZES, llama
from served import mixed_requests, require_likeliest, run, serving, token_ids
from tiny import VOCABULARY

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's and its packages' own
]
pytest.importorskip("vllm")

ANALOGS: dict[str, dict[str, Any]] = {
    "lolcats": {"window": 5},
    "no window": {"window": 0},
    "per query head": {"window": 5, "per_query_head": True},
    "sinks": {"window": 4, "sinks": 3},
    "gla": {"rule": "gla", "window": 6},
    "convolved": {"rule": "gated_deltanet", "window": 0, "convolution": 4},
    "positions": {"rule": "lightning", "window": 0, "positions": "linear", "log_scale": 500},
}


def _qwen3() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=4, head_dim=8)
    return Qwen3ForCausalLM(config)


def _gemma2() -> Any:
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES, vocab_size=VOCABULARY, num_hidden_layers=4, head_dim=8, sliding_window=6
    )
    return Gemma2ForCausalLM(config)


FAMILIES = {"qwen3": _qwen3, "gemma2": _gemma2}


def _require_served(model: Any, folder: Path) -> None:
    model.eval().save_pretrained(folder)
    requests = mixed_requests(24)
    with serving(folder, max_num_batched_tokens=48, max_num_seqs=16) as llm:
        outputs = run(llm, requests)
    require_likeliest(model, requests, outputs)
    for request, output in list(zip(requests, outputs, strict=True))[:6]:
        ids = torch.tensor([request.prompt])
        expected = model.generate(
            ids, max_new_tokens=request.count, do_sample=False, eos_token_id=None
        )
        assert token_ids(output) == expected[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("name", ANALOGS)
def test_a_linearized_llama_is_served(name: str, tmp_path: Path) -> None:
    analog = LinearAttentionConfig(**ANALOGS[name])
    _require_served(linearize(llama(3, torch.float32), analog, [0, 2]), tmp_path)


def test_a_llama_without_softmax_is_served(tmp_path: Path) -> None:
    _require_served(linearize(llama(2, torch.float32), LinearAttentionConfig(window=5)), tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_served(family: str, tmp_path: Path) -> None:
    model = linearize(FAMILIES[family](), LinearAttentionConfig(window=5), [0, 1])
    _require_served(model, tmp_path)
