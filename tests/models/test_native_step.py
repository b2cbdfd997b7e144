"""Single tokens through softmax layers without modules: the numbers of the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import kernels
from fastweights.generate import Decoder
from fastweights.kernels.native import library
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, quantize
from fastweights.ops.product import MOST_ROWS

pytestmark = pytest.mark.skipif(library.extension_missing(), reason="needs the compiled kernels")

GROUPED = {"name": "softmax", "heads": 6, "kv_heads": 2}
ATTENTIONS = {
    "grouped": GROUPED,
    "biased": {"name": "softmax", "heads": 3, "bias": True},
    "part turns": {"name": "softmax", "heads": 2, "rope": {"fraction": 2 / 3}},
    "nothing turns": {"name": "softmax", "heads": 2, "rope": {"fraction": 0.0}},
    "norms of heads": {**GROUPED, "qk_norm": 1e-6},
    "norms of all heads": {"name": "olmo2", "heads": 3},
    "a window": {**GROUPED, "window": 4},
    "sliding": {"name": "swa", "heads": 3, "window": 30},
}
BLOCKS = {
    "norms on both sides": {"sandwich_norms": True},
    "norms behind": {"post_norm": [True]},
    "scaled": {"embedding_scale": 6.0, "logit_cap": 3.0},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "erf": {"hidden_act": "gelu"},
}


def model_of(*mixers: dict[str, Any], **settings: Any) -> FastWeightsForCausalLM:
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=41, hidden_size=36, num_hidden_layers=3, mixers=list(mixers), **settings
    )
    return FastWeightsForCausalLM(config).eval()


def begin(model: FastWeightsForCausalLM, batch: int = 1) -> Decoder:
    decoder = Decoder(model)
    decoder.read(torch.arange(5).expand(batch, -1))
    return decoder


def states_of(decoder: Decoder) -> list[Tensor]:
    found: list[Tensor] = []
    decoder.cache.apply(lambda s: found.append(s) or s)
    return found


def compare(
    model: FastWeightsForCausalLM,
    tokens: int = 80,
    batch: int = 1,
    same: Callable[[Tensor, Tensor], object] = torch.equal,
) -> None:
    """More tokens than a cache has room for, some of them by modules in between."""
    modules, decoder = begin(model, batch), begin(model, batch)
    assert decoder.refuse_native_step() is None
    for i in range(tokens):
        token = (torch.arange(batch) + i) % 41
        expected = modules.read(token[:, None])
        found = decoder.read(token[:, None]) if i % 7 == 3 else decoder.read_token(token)
        assert same(found, expected)
    assert decoder.cache.tokens == modules.cache.tokens
    for found, expected in zip(states_of(decoder), states_of(modules), strict=True):
        assert same(found, expected)


def almost(found: Tensor, expected: Tensor) -> bool:
    """But for what rounds to the other side of 2⁻¹⁵ of a group's largest."""
    return torch.allclose(found, expected, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_token_has_the_numbers_of_the_modules(attention: str) -> None:
    compare(model_of(ATTENTIONS[attention]))


@pytest.mark.parametrize("block", BLOCKS)
def test_so_have_layers_with_other_norms_and_gates(block: str) -> None:
    compare(model_of(GROUPED, **BLOCKS[block]))


def test_so_have_layers_that_see_different_numbers_of_tokens() -> None:
    compare(model_of(ATTENTIONS["sliding"], GROUPED, ATTENTIONS["a window"]))


@pytest.mark.parametrize("sequences", [3, 20])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_so_have_those_of_several_sequences(attention: str, sequences: int) -> None:
    compare(model_of(ATTENTIONS[attention]), tokens=20, batch=sequences)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("padded", [[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]])
def test_so_have_those_behind_padding(attention: str, padded: list[int]) -> None:
    model, ids = model_of(ATTENTIONS[attention]), torch.arange(6).view(1, 6).expand(2, -1)
    mask = torch.tensor([padded, [1] * 6])
    modules, decoder = Decoder(model), Decoder(model)
    for one in (modules, decoder):
        one.read(ids, mask)
    assert decoder.refuse_native_step() is None
    for i in range(20):
        token = torch.tensor([3, 4]) + i
        expected = modules.read(token[:, None])
        found = decoder.read(token[:, None]) if i % 7 == 3 else decoder.read_token(token)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", BLOCKS)
def test_so_have_weights_of_few_bits_but_for_rounding(bits: int, block: str) -> None:
    mixers = GROUPED, ATTENTIONS["norms of heads"], ATTENTIONS["a window"]
    model = model_of(*mixers, tie_word_embeddings=False, **BLOCKS[block])
    compare(quantize(model, bits), same=almost)


@pytest.mark.parametrize("bits", [8, 4])
def test_so_have_they_of_more_sequences_than_a_matrix_is_worth(bits: int) -> None:
    model = quantize(model_of(GROUPED, tie_word_embeddings=False), bits)
    compare(model, tokens=10, batch=2 * MOST_ROWS, same=almost)


def test_a_decoder_can_go_on_from_a_copy_of_an_earlier_state() -> None:
    decoder, token = begin(model_of(GROUPED)), torch.tensor([3])
    decoder.read_token(token)
    before = decoder.cache.states
    first = decoder.read_token(token)
    decoder.cache.states = before
    assert torch.equal(decoder.read_token(token), first)


def test_weights_that_are_replaced_are_seen() -> None:
    model, token = model_of(GROUPED), torch.tensor([3])
    decoder, modules = begin(model), begin(model)
    decoder.read_token(token)
    modules.read(token[:, None])
    quantize(model)
    assert almost(decoder.read_token(token), modules.read(token[:, None]))
    calls: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    decoder.read_token(token)
    assert calls


def test_it_says_why_modules_read() -> None:
    assert "MetaLA" in str(begin(model_of({"name": "metala", "heads": 2})).refuse_native_step())
    assert "gate" in str(begin(model_of({**GROUPED, "gated": True})).refuse_native_step())
    assert "not float32" in str(begin(model_of(GROUPED).bfloat16()).refuse_native_step())
    decoder = begin(model_of(GROUPED))
    with kernels.only("product (torch)"):
        assert decoder.refuse_native_step() is not None
    assert decoder.refuse_native_step() is None
