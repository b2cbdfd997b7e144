"""Assisted decoding: caches that take candidates back, as the model and as its assistant."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import PreTrainedModel

from fastweights import FastWeightsCache
from fastweights.linearize import RULES, LinearAttentionConfig, StateLayer
from fastweights.models.cache import LAST, WORTH_READING_APART
from kinds import form_of, one_of_each, slow_but
from pretrained import VOCABULARY, linear_llama, llama
from tiny import LAYERS, tiny

pytestmark = pytest.mark.sampled

NEW = 12
LONG = LAST + WORTH_READING_APART + 5
each_form = pytest.mark.parametrize("layers", one_of_each(LAYERS, form_of))


def prompt(length: int = 9) -> torch.Tensor:
    """Text with a rhythm, so that looking up what followed before finds candidates."""
    return (torch.arange(length) * 5 % 7)[None] + 1


def greedy(model: PreTrainedModel, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **arguments)


def own(layers: str, noise: float = 0.0) -> PreTrainedModel:
    return shaken(tiny(layers, vocab_size=VOCABULARY), noise)


def shaken(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A model that often, but not always, agrees with the one it was."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model


def linearized(rule: str, noise: float = 0.0) -> PreTrainedModel:
    chosen = [0] if rule == "windowed" else None
    analog = LinearAttentionConfig(rule=rule, window=0 if rule == "supra" else 3)
    return shaken(linear_llama(analog, chosen=chosen), noise)


def softmax(noise: float = 0.0) -> PreTrainedModel:
    model = shaken(llama(), noise)
    model.generation_config.eos_token_id = None
    return model


@each_form
def test_an_assistant_changes_no_greedy_token(layers: str) -> None:
    model, assistant, ids = own(layers), own(layers, noise=0.03), prompt()
    assert torch.equal(greedy(model, ids, assistant_model=assistant), greedy(model, ids))


@each_form
def test_candidates_from_the_prompt_change_no_greedy_token(layers: str) -> None:
    model = own(layers)
    ids = prompt(LONG)
    assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=4), greedy(model, ids))


@pytest.mark.parametrize("rule", slow_but(sorted(RULES), ("windowed", "mesa", "kda")))
def test_linearized_models_with_assistants(rule: str) -> None:
    model, assistant = linearized(rule), linearized(rule, noise=0.03)
    for ids in (prompt(), prompt(LONG)):
        expected = greedy(model, ids)
        assert torch.equal(greedy(model, ids, assistant_model=assistant), expected)
        assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=4), expected)


@pytest.mark.parametrize("layers", ["metala", "mesa", "mamba2", "hybrid"])
def test_a_softmax_model_and_ours_assist_each_other(layers: str) -> None:
    ours, theirs, ids = own(layers), softmax(), prompt()
    assert torch.equal(greedy(theirs, ids, assistant_model=ours), greedy(theirs, ids))
    assert torch.equal(greedy(ours, ids, assistant_model=theirs), greedy(ours, ids))


@pytest.mark.parametrize("rule", ["windowed", "metala"])
def test_a_softmax_model_and_its_conversion_assist_each_other(rule: str) -> None:
    linear, theirs, ids = linearized(rule), softmax(), prompt(LONG)
    assert torch.equal(greedy(theirs, ids, assistant_model=linear), greedy(theirs, ids))
    assert torch.equal(greedy(linear, ids, assistant_model=theirs), greedy(linear, ids))


def test_padding_and_an_assistant() -> None:
    model, assistant = own("hybrid"), own("hybrid", noise=0.03)
    ids, mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt()], 1), torch.ones(1, 13)
    mask[:, :4] = 0
    assisted = greedy(model, ids, attention_mask=mask, assistant_model=assistant)
    assert torch.equal(assisted[:, 4:], greedy(model, prompt()))


def test_most_candidates_of_a_good_assistant_are_taken() -> None:
    """The model reads far fewer times than it makes tokens."""
    model, calls = own("metala"), []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    assistant = own("metala")
    greedy(model, prompt(), assistant_model=assistant)
    assert len(calls) <= NEW // 2


@each_form
def test_a_cache_goes_back_where_it_was(layers: str) -> None:
    model, ids, cache = own(layers), prompt(LONG + 12), FastWeightsCache()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    cache.activate_past_recording()
    read = 0
    for fed, back in ((LONG, 1), (6, 3), (1, 0), (1, 0), (4, 4), (2, 1), (1, 0)):
        y = model(ids[:, read : read + fed], past_key_values=cache, use_cache=True).logits
        assert_close(y, whole[:, read : read + fed])
        cache.crop(-back)
        read += fed - back
        assert cache.get_seq_length() == read
    y = model(ids[:, read:], past_key_values=cache, use_cache=False).logits
    assert_close(y, whole[:, read:])


def test_several_crops_add_up() -> None:
    model, ids, cache = own("hybrid"), prompt(14), FastWeightsCache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache, use_cache=True)
    for back in (1, 2, 0, 2):
        cache.crop(-back)
    assert cache.get_seq_length() == 5
    assert cache.position is not None
    assert int(cache.position) == 5
    twice = copy.deepcopy(cache)
    twice.batch_repeat_interleave(2)
    whole = model(ids).logits
    assert_close(model(ids[:, 5:], past_key_values=cache).logits, whole[:, 5:])
    both = model(ids[:, 5:].expand(2, -1), past_key_values=twice).logits
    assert_close(both, whole[:, 5:].expand(2, -1, -1))


def test_memory_is_that_of_one_copy() -> None:
    model, cache = own("metala"), FastWeightsCache()
    cache.activate_past_recording()
    model(prompt(500), past_key_values=cache, use_cache=True)
    assert cache.past is not None
    assert cache.past.since.length == LAST
    size = cache.nbytes
    cache.crop(0)
    assert cache.past is None
    assert cache.nbytes == size


def test_what_cannot_be_taken_back() -> None:
    model, cache = own("metala"), FastWeightsCache()
    model(prompt(), past_key_values=cache, use_cache=True)
    with pytest.raises(NotImplementedError, match=r"crop\(-1\).*before 0 of them.*deepcopy"):
        cache.crop(-1)
    cache.activate_past_recording()
    model(prompt(3), past_key_values=cache, use_cache=True)
    with pytest.raises(NotImplementedError, match="before 3 of them at most"):
        cache.crop(-4)
    layer = StateLayer()
    with pytest.raises(NotImplementedError, match="before 0 of them at most"):
        layer.crop(-1)
