"""How models of transformers go on from their caches: tried once, and read accordingly."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from fastweights import patch_transformers, stream
from fastweights.linearize import LinearAttentionConfig, linearize, read_by_softmax
from fastweights.models import continuation
from fastweights.models.continuation import Continuation, NoCacheError, continuation_of
from fastweights.training.language.perplexity import token_losses
from tiny import tiny
from transformers_families import build_family, present_families

WAYS = {
    "mamba": Continuation(1),
    "zamba": Continuation(1),
    "bamba": Continuation(inf, positions=True),
    "mamba2": Continuation(),
    "glm5_next": Continuation(0, positions=True),
}
PRESENT = [name for name in WAYS if name in present_families()]
IDS = torch.arange(60).reshape(2, 30) * 7 % 50 + 5


def family(name: str) -> Any:
    model = build_family(name).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.filterwarnings("ignore:a .* does not go on from its cache")
def test_pieces_change_nothing(name: str) -> None:
    """Losses are those of whole texts, and a stream has the tokens of generate."""
    model = family(name)
    assert_close(token_losses(model, IDS, chunk=8), token_losses(model, IDS), rtol=0, atol=1e-5)
    mask = torch.ones_like(IDS)
    wanted = model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for chunk in (8, 2048):
        found = stream(model, IDS, max_new_tokens=6, temperature=0, chunk=chunk)
        assert torch.equal(torch.stack([*found], 1), wanted[:, IDS.shape[1] :])


@pytest.mark.parametrize("name", PRESENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:a .* does not go on from its cache")
def test_a_way_is_found_in_any_precision(name: str, dtype: torch.dtype) -> None:
    model = family(name).to(dtype)
    before = copy.deepcopy(model.state_dict())
    assert continuation_of(model) == WAYS[name]
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:a .* does not go on from its cache")
def test_caches_of_any_name_are_gone_on_from() -> None:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2}
    model = RwkvForCausalLM(RwkvConfig(vocab_size=64, eos_token_id=None, **sizes)).eval()
    wanted = IDS
    for _ in range(5):
        wanted = torch.cat([wanted, model(wanted).logits[:, -1:].argmax(-1)], 1)
    for chunk in (8, 2048):
        found = stream(model, IDS, max_new_tokens=5, temperature=0, chunk=chunk)
        assert torch.equal(torch.stack([*found], 1), wanted[:, IDS.shape[1] :])


def test_a_model_without_a_cache_is_refused() -> None:
    model = OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(vocab_size=64, n_embd=16, n_layer=1, n_head=2)
    ).eval()
    with pytest.raises(NoCacheError, match=r"a OpenAIGPTLMHeadModel returns no cache .*generate"):
        next(stream(model, IDS))


def test_it_is_said_once() -> None:
    model = family("mamba")
    with pytest.warns(UserWarning, match="a MambaForCausalLM does not go on from its cache"):
        token_losses(model, IDS, chunk=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        token_losses(model, IDS, chunk=8)


def test_a_patched_model_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    found = Continuation()
    monkeypatch.setattr(continuation, "_try_out", lambda model: tried.append(model) or found)
    model = family("mamba")
    for context in (nullcontext, nullcontext, partial(patch_transformers, model), nullcontext):
        with context():
            continuation_of(model)
    assert tried == [model] * 3


def test_ours_are_not_tried() -> None:
    assert continuation_of(tiny("metala")) == Continuation()


@pytest.mark.filterwarnings("ignore:a .* does not go on from its cache")
def test_a_linearized_model_with_such_layers() -> None:
    """generate reads its prompt at once, and the softmax that hands over, too."""
    model = linearize(family("jamba"), LinearAttentionConfig(window=3)).eval()
    given = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 2, "do_sample": False}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    chunked, whole = (
        model.generate(IDS, **given, **more).logits for more in ({"prefill_chunk_size": 8}, {})
    )
    assert_close(chunked, whole, rtol=0, atol=1e-5)
    (first, *_), (second, *_) = (
        [*stream(model, IDS[:, -1:], temperature=0, max_new_tokens=2, cache=cache)]
        for cache in (read_by_softmax(model, IDS[:, :-1], piece=p) for p in (8, 64))
    )
    assert torch.equal(first, second)
