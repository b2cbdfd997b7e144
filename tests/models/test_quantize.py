"""Models whose weights are bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastweights import MIXERS
from fastweights.models import Int8Linear, quantize
from fastweights.models.cache_names import CACHE, cache_argument
from kinds import form_of, one_of_each
from pretrained import linear_llama, llama
from tiny import tiny, tokens

LENGTH, PROMPT = 10, 4


def layers_of(model: nn.Module) -> list[Int8Linear]:
    return [part for part in model.modules() if isinstance(part, Int8Linear)]


@torch.no_grad()
def compare(model) -> None:
    """Quantized, it computes what it computes with the rounded weights as floats; from its cache
    what it computes at once.
    """
    ids, rounded = tokens(2, LENGTH), [part for part in model.modules() if is_plain(part)]
    before = model(input_ids=ids).logits
    for part in rounded:
        stored = Int8Linear(part)
        part.weight.copy_(stored.codes * stored.scale[:, None])
    expected = model(input_ids=ids).logits
    assert quantize(model) is model
    assert len(layers_of(model)) == len(rounded) > 0
    found = model(input_ids=ids).logits
    largest = expected.abs().max()
    assert (found - expected).abs().max() <= 1e-4 * largest
    assert not torch.equal(expected, before)
    cache, parts = None, []
    for piece in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1)):
        read = model(input_ids=piece, use_cache=True, **cache_argument(cache))
        cache, parts = getattr(read, CACHE), [*parts, read.logits]
    assert (torch.cat(parts, 1) - found).abs().max() <= 1e-4 * largest


def is_plain(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear)


@pytest.mark.parametrize("name", one_of_each([*MIXERS, "hybrid"], form_of))
def test_ours(name: str) -> None:
    compare(tiny(name, torch.float32))


@pytest.mark.parametrize("make", [llama, linear_llama])
def test_models_of_transformers(make) -> None:
    compare(make(dtype=torch.float32))


def test_a_weight_is_rounded_to_the_nearest() -> None:
    layer = nn.Linear(5, 4)
    with torch.no_grad():
        layer.weight[2] = 0
        layer.weight[3] = 1e-40
    stored = Int8Linear(layer)
    error = (stored.codes * stored.scale[:, None] - layer.weight).abs()
    assert (error <= stored.scale[:, None] / 2 * (1 + 1e-6)).all()
    assert (stored.codes.abs().amax(1)[[0, 1]] == 127).all()


def test_a_shared_head_stays() -> None:
    model = quantize(tiny("metala", torch.float32, tie_word_embeddings=True))
    assert isinstance(model.lm_head, nn.Linear)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_it_takes_a_quarter() -> None:
    model = tiny("metala", torch.float32, hidden_size=256, num_hidden_layers=4)
    before = sum(p.nbytes for p in model.parameters())
    quantize(model)
    after = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    assert after < 0.3 * before


def test_it_is_not_saved(tmp_path) -> None:
    with pytest.raises(ValueError, match="save the model before quantizing it"):
        quantize(tiny("metala", torch.float32)).save_pretrained(tmp_path)


def test_twice_is_refused() -> None:
    model = quantize(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(ValueError, match="is it quantized already"):
        quantize(model)
