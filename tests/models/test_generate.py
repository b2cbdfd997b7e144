"""Decoding: transformers' generate, and the library's own stream."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights import FastWeightsCache, FastWeightsForCausalLM, stream
from fastweights.generate import Sampler
from kinds import form_of, one_of_each
from tiny import LAYERS, VOCABULARY, tiny, tokens

pytestmark = pytest.mark.sampled

each_form = pytest.mark.parametrize("layers", one_of_each(LAYERS, form_of))
NEW = 6


def by_full_forwards(model: FastWeightsForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    for _ in range(NEW):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def greedy(model: FastWeightsForCausalLM, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, **arguments)


def streamed(model: FastWeightsForCausalLM, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return torch.stack(
        list(stream(model, ids, **{"max_new_tokens": NEW, "temperature": 0, **arguments})), 1
    )


@each_form
def test_greedy_is_the_argmax_of_full_forwards(layers: str) -> None:
    model, ids = tiny(layers), tokens(2, 5)
    expected = by_full_forwards(model, ids)
    assert torch.equal(greedy(model, ids), expected)
    assert torch.equal(greedy(model, ids, prefill_chunk_size=2), expected)
    assert torch.equal(streamed(model, ids), expected[:, 5:])
    assert torch.equal(streamed(model, ids, chunk=2), expected[:, 5:])


@each_form
def test_left_padded_prompts_continue_as_if_alone(layers: str) -> None:
    model, ids = tiny(layers, pad_token_id=0), tokens(2, 7)
    ids[0, :3] = 0
    mask = (ids != 0).long()
    alone = torch.cat([greedy(model, ids[:1, 3:])[:, 4:], greedy(model, ids[1:])[:, 7:]])
    assert torch.equal(greedy(model, ids, attention_mask=mask)[:, 7:], alone)
    assert torch.equal(greedy(model, ids, attention_mask=mask, prefill_chunk_size=2)[:, 7:], alone)
    assert torch.equal(streamed(model, ids, attention_mask=mask, chunk=2), alone)


@each_form
def test_beams_do_not_depend_on_the_cache(layers: str) -> None:
    model, ids = tiny(layers), tokens(2, 5)
    cached, plain = (
        greedy(
            model, ids, num_beams=3, use_cache=use, return_dict_in_generate=True, output_scores=True
        )
        for use in (True, False)
    )
    assert torch.equal(cached.sequences, plain.sequences)
    assert_close(cached.sequences_scores, plain.sequences_scores)


@pytest.mark.parametrize("layers", ["mesa", "hybrid"])
def test_sampling_depends_on_the_seed_alone(layers: str) -> None:
    model, ids = tiny(layers), tokens(2, 5)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        drawn.append(
            model.generate(
                ids, do_sample=True, max_new_tokens=NEW, num_return_sequences=2, use_cache=use_cache
            )
        )
    assert drawn[0].shape == (4, 5 + NEW)
    assert torch.equal(*drawn)


@each_form
def test_a_returned_cache_goes_on(layers: str) -> None:
    model, ids, more = tiny(layers), tokens(2, 5), tokens(2, 3, seed=1)
    first = greedy(model, ids, return_dict_in_generate=True)
    conversation = torch.cat([first.sequences, more], 1)
    assert first.past_key_values.get_seq_length() == 5 + NEW - 1
    continued = greedy(model, conversation, past_key_values=first.past_key_values)
    assert torch.equal(continued, greedy(model, conversation))


def test_a_cache_of_the_users_own_is_filled() -> None:
    model, ids, cache = tiny(), tokens(2, 5), FastWeightsCache()
    assert torch.equal(greedy(model, ids, past_key_values=cache), greedy(model, ids))
    assert cache.get_seq_length() == 5 + NEW - 1


@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded"])
def test_other_caches_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"cache_implementation='{kind}'.*leave it out"):
        greedy(tiny(), tokens(1, 3), cache_implementation=kind)


def test_stream_ends_like_generate() -> None:
    model, ids = tiny(), tokens(3, 5)
    free = greedy(model, ids)[:, 5:]
    ends = [int(free[0, 2]), int(free[1, 0]), int(free[2, 3])]
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = 0
    expected = greedy(model, ids, attention_mask=torch.ones_like(ids))[:, 5:]
    assert torch.equal(streamed(model, ids), expected)
    assert expected.shape[1] < NEW or (expected == 0).any()


def test_stream_is_endless_and_of_constant_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Watched(FastWeightsCache):
        def advance(self, *arguments: Any) -> None:
            super().advance(*arguments)
            sizes.append(self.nbytes)

    monkeypatch.setattr("fastweights.generate.FastWeightsCache", Watched)
    model = tiny("mamba")
    assert len(list(islice(stream(model, tokens(1, 9), chunk=4), 40))) == 40
    assert len(set(sizes)) == 1
    assert len(sizes) == 3 + 39


def test_stream_samples_by_its_generator() -> None:
    model, ids = tiny(), tokens(2, 5)
    settings = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    first, again = (
        streamed(model, ids, generator=torch.Generator().manual_seed(4), **settings)
        for _ in range(2)
    )
    assert torch.equal(first, again)


def test_sampler_draws_among_the_allowed_in_proportion() -> None:
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]])

    def frequencies(**settings: Any) -> torch.Tensor:
        sampler = Sampler(generator=torch.Generator().manual_seed(0), **settings)
        return torch.bincount(sampler(p.log().expand(20_000, -1)), minlength=4) / 20_000

    assert_close(frequencies(), p[0], atol=0.02, rtol=0)
    assert_close(frequencies(top_k=2), torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=0.02, rtol=0)
    assert_close(frequencies(top_p=0.7), torch.tensor([2 / 3, 1 / 3, 0, 0]), atol=0.02, rtol=0)
    assert_close(frequencies(top_p=0.01), torch.tensor([1.0, 0, 0, 0]), atol=0, rtol=0)
    assert_close(frequencies(temperature=0.5), p[0].square() / p.square().sum(), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0},
        {"top_p": 1.5},
        {"chunk": 0},
        {"max_new_tokens": 0},
    ],
)
def test_stream_refuses_nonsense_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        stream(tiny(), tokens(1, 3), **arguments)


@pytest.mark.usefixtures("unchecked")
def test_prompts_that_are_no_token_ids() -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"shape \[3\], must be \[batch, time\]; one text"):
        stream(model, tokens(3))
    with pytest.raises(TypeError, match=r"input_ids are a str; pass a tensor \[batch, time\]"):
        model.generate("where to")
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 2\]"):
        stream(model, tokens(1, 3), attention_mask=torch.ones(1, 2))


def test_any_model_of_transformers_is_streamed() -> None:
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32}
    config = LlamaConfig(**settings, num_hidden_layers=2, num_attention_heads=2)
    model, ids = LlamaForCausalLM(config).eval(), tokens(2, 5)
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    streamed = list(stream(model, ids, max_new_tokens=NEW, temperature=0, chunk=2))
    assert torch.equal(torch.stack(streamed, 1), expected[:, 5:])
    with pytest.raises(ValueError, match="attention_mask for a LlamaForCausalLM"):
        stream(model, ids, attention_mask=torch.ones_like(ids))


@each_form
def test_a_stream_goes_on_from_a_cache(layers: str) -> None:
    model, ids = tiny(layers), tokens(2, 9)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    assert torch.equal(streamed(model, ids[:, 6:], cache=cache), streamed(model, ids))
