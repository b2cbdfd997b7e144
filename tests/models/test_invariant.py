"""Batch invariance: the same bits in any batch, however a text is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fastweights import MIXERS, FastWeightsForCausalLM, batch_invariant, stream
from fastweights.models import FastWeightsCache, log_probabilities
from kinds import form_of, one_of_each
from pretrained import linear_llama, llama
from tiny import tiny, tokens

LENGTH, PROMPT = 6, 2
TOLERANCE = 2e-4
"""Of log-probabilities outside the mode, over the largest logit: twice that of logits."""


@torch.no_grad()
def read(model, ids: Tensor, **given) -> Tensor:
    return model(input_ids=ids, **given).logits


@torch.no_grad()
def decode(model, ids: Tensor, begin: int) -> Tensor:
    """A prompt at once, then token by token."""
    cache, found = None, []
    for piece in (ids[:, :begin], *ids[:, begin:].split(1, 1)):
        output = model(input_ids=piece, past_key_values=cache, use_cache=True)
        cache, found = output.past_key_values, [*found, output.logits]
    return torch.cat(found, dim=1)


def pad(short: Tensor, long: Tensor) -> tuple[Tensor, Tensor]:
    """Both rows, the short one behind padding, and their mask."""
    ids, mask = torch.zeros(2, long.shape[1], dtype=torch.long), torch.ones(2, long.shape[1])
    ids[0, -short.shape[1] :], ids[1] = short[0], long[0]
    mask[0, : -short.shape[1]] = 0
    return ids, mask.long()


def assert_bits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The logits of `ids` ``[2 t]``, which are the same however they are read."""
    together, (first, second) = read(model, ids), ids.split(1)
    padded, mask = pad(first[:, :PROMPT], second)
    assert torch.equal(together[:1], read(model, first))
    assert torch.equal(together, decode(model, ids, PROMPT))
    ahead = read(model, padded, attention_mask=mask)
    assert torch.equal(ahead[0, -PROMPT:], together[0, :PROMPT])
    assert torch.equal(ahead[1], together[1])
    return together


@pytest.mark.parametrize("name", one_of_each([*MIXERS, "hybrid"], form_of))
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    """And without the mode, log-probabilities stay within the tolerance that is told."""
    model, ids = tiny(name, torch.float32), tokens(2, LENGTH)
    outside = [read(model, ids), decode(model, ids, PROMPT)]
    with batch_invariant(model):
        inside = assert_bits(model, ids)
    expected = log_probabilities(inside[:, :-1], ids[:, 1:])
    for logits in outside:
        found = log_probabilities(logits[:, :-1], ids[:, 1:])
        assert (found - expected).abs().max() <= TOLERANCE * inside.abs().max()


@pytest.mark.parametrize("make", [llama, linear_llama])
def test_a_model_of_transformers(make: Callable[..., PreTrainedModel]) -> None:
    model, ids = make(dtype=torch.float32).eval(), tokens(2, LENGTH)
    outside = read(model, ids)
    with batch_invariant(model):
        assert_bits(model, ids)
    assert torch.equal(read(model, ids), outside)


def test_generated_log_probabilities_are_those_of_training() -> None:
    """Sampled with padding in a batch, scored as whole texts with gradients."""
    model = tiny("hybrid", torch.float32)
    prompts, mask = pad(tokens(1, 3), tokens(1, 6, seed=1))
    with batch_invariant(model):
        torch.manual_seed(0)
        found = model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=6,
            do_sample=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        sampled = log_probabilities(torch.stack(found.logits, 1), found.sequences[:, 6:])
        whole = model.train()(input_ids=found.sequences[:1, 3:]).logits
        again = log_probabilities(whole[:, 2:-1], found.sequences[:1, 6:])
        assert torch.equal(again, sampled[:1])
        assert model.training
        again.sum().backward()
    inside = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    whole = model(input_ids=found.sequences[:1, 3:]).logits
    log_probabilities(whole[:, 2:-1], found.sequences[:1, 6:]).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(inside[name], p.grad, atol=1e-5, rtol=1e-4)


def test_generate_and_stream_agree() -> None:
    model, ids = tiny("metala", torch.float32), tokens(2, 5)
    with batch_invariant(model):
        written = model.generate(ids, max_new_tokens=4, do_sample=False)
        streamed = list(stream(model, ids, max_new_tokens=4, temperature=0))
        beams = model.generate(ids, max_new_tokens=4, do_sample=False, num_beams=3)
        apart = model.generate(ids[:1], max_new_tokens=4, do_sample=False, num_beams=3)
    assert torch.equal(written[:, 5:], torch.stack(streamed, 1))
    assert torch.equal(beams[:1], apart)


def test_a_loaded_model_has_the_same_bits(tmp_path: Path) -> None:
    """Wherever its weights lie."""
    model, ids = tiny("hybrid", torch.float32), tokens(1, LENGTH)
    model.save_pretrained(tmp_path)
    loaded = FastWeightsForCausalLM.from_pretrained(tmp_path)
    for weight in loaded.parameters():
        room = torch.empty(weight.numel() + 5)
        weight.data = room[5:].view_as(weight).copy_(weight.data)
    with batch_invariant(model), batch_invariant(loaded):
        assert torch.equal(read(loaded, ids), read(model, ids))


def test_the_forward_comes_back() -> None:
    model = tiny()
    with pytest.raises(RuntimeError, match="on purpose"), batch_invariant(model):
        raise RuntimeError("on purpose")
    assert "forward" not in vars(model)
    model.forward = before = model.forward
    with batch_invariant(model):
        pass
    assert vars(model)["forward"] is before


@torch.no_grad()
def filled() -> FastWeightsCache:
    return tiny()(input_ids=tokens(1, 3), use_cache=True).past_key_values


REFUSED = {
    "labels": (lambda: {"labels": tokens(1, 4)}, "labels cannot be asked"),
    "packed documents": (lambda: {"position_ids": torch.tensor([[0, 1, 0, 1]])}, "of its own"),
    "a cache from outside": (lambda: {"past_key_values": filled()}, "filled outside"),
    "a mask of another length": (lambda: {"attention_mask": torch.ones(1, 3)}, "does not fit"),
    "padding alone": (lambda: {"attention_mask": torch.zeros(1, 4)}, "no token but padding"),
    "no token ids": (lambda: {"input_ids": None}, "no input_ids"),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_is_refused(name: str) -> None:
    given, words = REFUSED[name]
    model = tiny()
    with batch_invariant(model), pytest.raises(ValueError, match=words):
        model(**{"input_ids": tokens(1, 4)} | given())


def test_what_a_cache_refuses() -> None:
    model, ids, unused = tiny(), tokens(1, 4), FastWeightsCache()
    with batch_invariant(model):
        with torch.no_grad():
            cache = model(input_ids=ids, past_key_values=unused).past_key_values
            with pytest.raises(ValueError, match="replaced by the one"):
                model(input_ids=ids, past_key_values=unused)
            with pytest.raises(ValueError, match="holds 1 sequences, the input 2"):
                model(input_ids=tokens(2, 4), past_key_values=cache)
            with pytest.raises(NotImplementedError, match="taken back"):
                cache.crop(-1)
        with pytest.raises(ValueError, match="whole texts only"):
            model(input_ids=ids, past_key_values=cache)


def test_a_model_without_a_cache_is_refused() -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=31, num_hidden_layers=1, **sizes))
    model.forward = lambda input_ids: input_ids
    with pytest.raises(TypeError, match=r"takes no .*past_key_values"), batch_invariant(model):
        pass
