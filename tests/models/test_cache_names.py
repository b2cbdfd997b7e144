"""Both names that transformers has had for a cache, in calls, in `generate` and in outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import generic

from fastweights import FastWeightsCache, FastWeightsForCausalLM, stream
from fastweights.models import batch_invariant
from fastweights.models.cache_names import CACHE, CACHES, name_of_cache
from pretrained import linear_llama, llama
from tiny import tiny, tokens
from transformers_log import transformers_warnings

NEW = 6
NAMES = ("past_key_values", "cache")
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "ours": lambda: tiny("metala"),
    "hybrid": lambda: tiny("hybrid"),
    "linearized": linear_llama,
}
each_name = pytest.mark.parametrize("name", NAMES)
each_model = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(autouse=True)
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers logs no word about names, not even where it would do so once per process."""
    monkeypatch.setattr(generic.logger, "warning_once", generic.logger.warning)
    with transformers_warnings() as said:
        yield
    assert not [message for message in said if "deprecated" in message]


def new_cache(model: PreTrainedModel) -> FastWeightsCache | DynamicCache:
    own = isinstance(model, FastWeightsForCausalLM)
    return FastWeightsCache() if own else DynamicCache(config=model.config)


def without_cache(model: PreTrainedModel, ids: torch.Tensor, new: int = NEW) -> torch.Tensor:
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def greedy(model: PreTrainedModel, ids: torch.Tensor, **given: object) -> torch.Tensor:
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, **settings, **given)


@each_model
@each_name
@torch.no_grad()
def test_a_call_goes_on_from_a_cache(model: str, name: str) -> None:
    reader, ids = MODELS[model](), tokens(2, 9)
    cache = new_cache(reader)
    reader(ids[:, :5], **{name: cache}, use_cache=True)
    after = reader(ids[:, 5:], **{name: cache}, use_cache=True).logits
    torch.testing.assert_close(after, reader(ids, use_cache=False).logits[:, 5:])


@each_model
def test_two_caches_are_refused(model: str) -> None:
    reader = MODELS[model]()
    both = {name: new_cache(reader) for name in NAMES}
    for call in (reader, reader.generate):
        with pytest.raises(ValueError, match="names of one argument, the cache; pass it by one"):
            call(tokens(1, 3), **both)


def test_the_forward_and_the_trunk_take_both_names() -> None:
    model, cache = tiny(), FastWeightsCache()
    with pytest.raises(ValueError, match="past_key_values and cache are names of one argument"):
        model.forward(tokens(1, 3), past_key_values=cache, cache=cache)
    for name in NAMES:
        assert getattr(model.model(tokens(1, 3), **{name: cache}), name) is cache
    assert len(cache) == 2
    assert cache.get_seq_length() == 6


@each_name
def test_outputs_have_both_names(name: str) -> None:
    model = tiny()
    for part in (model, model.model):
        assert isinstance(getattr(part(tokens(1, 3), use_cache=True), name), FastWeightsCache)
        assert getattr(part(tokens(1, 3), use_cache=False), name) is None


def test_an_output_holds_its_cache_once() -> None:
    """By the name of the installed transformers, whose `generate` looks for it."""
    output = tiny()(tokens(1, 3), use_cache=True)
    assert list(output) == ["logits", CACHE]
    assert name_of_cache(output) == CACHE == CACHES[0]
    assert name_of_cache(tiny()(tokens(1, 3), use_cache=False)) is None


@each_model
def test_generate_is_greedy_without_a_cache(model: str) -> None:
    maker, ids = MODELS[model](), tokens(2, 5)
    assert torch.equal(greedy(maker, ids), without_cache(maker, ids))


@each_model
@each_name
def test_generate_goes_on_from_a_cache(model: str, name: str) -> None:
    """It reads what the cache has not read, and no token twice."""
    maker, ids = MODELS[model](), tokens(2, 5)
    cache = new_cache(maker)
    with torch.no_grad():
        maker(ids[:, :3], **{name: cache}, use_cache=True)
    assert torch.equal(greedy(maker, ids, **{name: cache}), without_cache(maker, ids))
    assert cache.get_seq_length() == 5 + NEW - 1


@each_name
def test_a_batch_invariant_call_takes_both_names(name: str) -> None:
    model, ids = tiny(), tokens(2, 6)
    with torch.no_grad(), batch_invariant(model):
        whole = model(ids).logits
        cache = getattr(model(ids[:, :4], use_cache=True), name)
        assert torch.equal(model(ids[:, 4:], **{name: cache}).logits, whole[:, 4:])
        with pytest.raises(ValueError, match="names of one argument"):
            model(ids, cache=cache, past_key_values=cache)
        assert torch.equal(greedy(model, ids[:, :4]), without_cache(model, ids[:, :4]))


@pytest.mark.parametrize("make", [tiny, linear_llama, llama])
def test_a_stream_names_the_cache_as_the_model_does(make: Callable[[], PreTrainedModel]) -> None:
    model, ids = make(), tokens(2, 5)
    made = torch.stack(list(stream(model, ids, temperature=0, max_new_tokens=NEW)), 1)
    assert torch.equal(made, without_cache(model, ids)[:, 5:])
