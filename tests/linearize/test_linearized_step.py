"""Single tokens of linearized models without modules: the numbers of the modules."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from fastweights import kernels
from fastweights.generate import Decoder
from fastweights.kernels.native import library
from fastweights.linearize import LinearAttentionConfig, linearize, place_landmarks, use_mode
from fastweights.linearize.convert.modes import WindowOnly
from fastweights.models import quantize
from fastweights.models.cache_names import CACHE
from fastweights.models.token_reader import TokenReader
from pretrained import SIZES, VOCABULARY, linear_llama

pytestmark = pytest.mark.skipif(library.extension_missing(), reason="needs the compiled kernels")

IDS = torch.arange(24)[None] * 5 % VOCABULARY
LINEAR = {
    "lolcats": LinearAttentionConfig(window=3),
    "landmarks": LinearAttentionConfig("landmarks", 4, window=3, sinks=2),
    "by head": LinearAttentionConfig(window=3, head_windows=((5, 1), (3, 3), (1, 5))),
    "all of it": LinearAttentionConfig(
        "landmarks", 4, window=3, sinks=2, head_windows=((5, 12), (3, 3), (1, 12))
    ),
    "per query head": LinearAttentionConfig(window=3, per_query_head=True),
    "gated": LinearAttentionConfig(rule="gla", window=0),
    "convolved": LinearAttentionConfig(rule="gla", window=0, convolution=4),
}


CLOSE = partial(torch.allclose, rtol=1e-5, atol=1e-5)


def model_of(name: str, chosen: list[int] | None = None, **fields: Any) -> Any:
    config = LINEAR[name]
    model = linear_llama(config, 3, torch.float32, chosen, **fields)
    if config.features == "landmarks" and not config.head_windows:
        place_landmarks(model, [{"input_ids": IDS}])
    return model.eval()


def begin(model: Any, sequences: int = 1) -> Decoder:
    decoder = Decoder(model)
    decoder.read((IDS[:, :7] + torch.arange(sequences)[:, None]) % VOCABULARY)
    return decoder


def compare(
    model: Any,
    tokens: int = 20,
    same: Callable[[Tensor, Tensor], object] = torch.equal,
    sequences: int = 1,
) -> tuple[DynamicCache, DynamicCache]:
    """The caches of the step and of the modules, after tokens of which both have the numbers."""
    modules, decoder = begin(model, sequences), begin(model, sequences)
    assert decoder.refuse_native_step() is None
    for i in range(tokens):
        token = (torch.arange(sequences) + i) % VOCABULARY
        expected = modules.read(token[:, None])
        found = decoder.read(token[:, None]) if i % 7 == 3 else decoder.read_token(token)
        assert same(found, expected)
    assert decoder.cache.get_seq_length() == modules.cache.get_seq_length()
    return decoder.cache, modules.cache


@pytest.mark.parametrize("name", LINEAR)
def test_a_token_has_the_numbers_of_the_modules(name: str) -> None:
    compare(model_of(name))


@pytest.mark.parametrize("sequences", [3, 12])
@pytest.mark.parametrize("name", LINEAR)
def test_tokens_of_several_sequences_have_the_numbers_of_the_modules(
    name: str, sequences: int
) -> None:
    """But for the order of sums: modules make features of several tokens by torch."""
    caches = compare(model_of(name), same=CLOSE, sequences=sequences)
    for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(ours.state, theirs.state, rtol=1e-4, atol=1e-5)


def test_several_sequences_of_a_hybrid_have_them_too() -> None:
    compare(model_of("landmarks", [0, 2]), 5, CLOSE, sequences=2)


def test_tokens_behind_padding_are_those_of_the_modules() -> None:
    model, found = model_of("all of it"), []
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    for reads in (Decoder.read_token, lambda decoder, token: decoder.read(token[:, None])):
        with torch.inference_mode():
            read = model(IDS[:, :7].expand(2, -1), attention_mask=mask, use_cache=True)
        decoder = Decoder(model, getattr(read, CACHE))
        found.append(torch.stack([reads(decoder, torch.tensor([i, i])).clone() for i in range(9)]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["landmarks", "all of it"])
def test_weights_that_change_in_place_are_read_anew(name: str) -> None:
    model = model_of(name)
    modules, decoder = begin(model), begin(model)
    token = torch.tensor([3])
    for _ in range(3):
        assert torch.equal(decoder.read_token(token), modules.read(token[:, None]))
        with torch.no_grad():
            for layer in model.model.layers:
                for weight in layer.self_attn.linear_branch.parameters():
                    weight.mul_(1.5)


def test_states_before_a_token_stay_as_they_were() -> None:
    decoder = begin(model_of("all of it"))
    decoder.read_token(torch.tensor([3]))
    before = decoder.cache.layers[0].state
    expected = [part.clone() for part in before]
    for _ in range(3):
        decoder.read_token(torch.tensor([3]))
    assert all(map(torch.equal, before, expected))


@pytest.mark.parametrize("chosen", [None, [0, 2]])
def test_a_copy_of_a_cache_goes_on_by_itself(chosen: list[int] | None) -> None:
    model = model_of("all of it", chosen)
    decoder, modules = begin(model), begin(model)
    for token in IDS[:, :3].T:
        decoder.read_token(token)
        modules.read(token[:, None])
    other = Decoder(model, deepcopy(decoder.cache))
    for token in IDS[:, 3:6].T:
        wanted = modules.read(token[:, None])
        assert torch.equal(decoder.read_token(token).clone(), wanted)
        assert torch.equal(other.read_token(token), wanted)


def test_caches_that_one_reader_reads_in_turn_keep_their_own_states() -> None:
    model = model_of("all of it")
    reader, caches = TokenReader(model), [begin(model).cache, begin(model).cache]
    modules = [begin(model), begin(model)]
    for i, token in enumerate(IDS[:, :8].T):
        with torch.inference_mode():
            assert reader.refuse(caches[i % 2], 1) is None
            found = reader.step(token, caches[i % 2])
        assert torch.equal(found, modules[i % 2].read(token[:, None]))
    for cache, own in zip(caches, modules, strict=True):
        for ours, theirs in zip(cache.layers, own.cache.layers, strict=True):
            assert all(map(torch.equal, ours.state, theirs.state))


def test_a_cache_that_is_to_go_back_is_read_by_modules() -> None:
    decoder = begin(model_of("landmarks"))
    decoder.read_token(torch.tensor([3]))
    decoder.cache.activate_past_recording()
    assert "can go back" in str(decoder.refuse_native_step())


def test_so_has_one_of_a_hybrid_with_softmax_layers() -> None:
    """More tokens than their caches have room for at first."""
    compare(model_of("landmarks", [0, 2]), tokens=90)


def test_softmax_layers_of_few_bits_read_their_caches_as_modules_do() -> None:
    model = quantize(model_of("landmarks", [0, 2]))
    compare(model, 90, lambda found, wanted: torch.allclose(found, wanted, 5e-4, 5e-4))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["lolcats", "all of it"])
def test_so_have_weights_of_few_bits_but_for_rounding(name: str, bits: int) -> None:
    model = quantize(model_of(name, attention_bias=True), bits)
    compare(model, same=lambda found, wanted: torch.allclose(found, wanted, 5e-4, 5e-4))


def test_weights_of_few_bits_do_not_hide_that_modules_compute_more() -> None:
    model = quantize(model_of("lolcats"))
    layer = model.model.layers[1].mlp
    layer.act_fn = Scaled(layer.act_fn)
    assert begin(model).refuse_native_step() is None
    layer.down_proj = Scaled(layer.down_proj)
    assert "not ours" in str(begin(model).refuse_native_step())
    model = quantize(model_of("lolcats"))
    model.model.layers[1].input_layernorm = Doubled(model.model.layers[1].input_layernorm)
    assert "compute more" in str(begin(model).refuse_native_step())


def test_a_module_of_another_class_is_tried_out_anew() -> None:
    model = model_of("lolcats")
    assert begin(model).refuse_native_step() is None
    model.model.norm = Doubled(model.model.norm)
    assert "compute more" in str(begin(model).refuse_native_step())


def test_projections_of_other_sizes_are_read_by_modules() -> None:
    model = model_of("lolcats")
    mlp = model.model.layers[1].mlp
    mlp.gate_proj = type(mlp.gate_proj)(16, mlp.gate_proj.out_features + 8)
    assert "do not fit" in str(begin_cache(model).refuse_native_step())


def begin_cache(model: Any) -> Decoder:
    """Behind a prompt that another model of the same cache has read."""
    return Decoder(model, begin(model_of("lolcats")).cache)


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * self.inner(x)


class Doubled(nn.Module):
    """What looks like Llama's norm, and is not."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = inner.weight, inner.variance_epsilon
        self.__dict__["inner"] = inner

    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * self.inner(x)


FAMILIES: dict[str, Any] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 4}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 4,
            "query_pre_attn_scalar": 9,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def family(name: str, layers: list[int] | None) -> Any:
    torch.manual_seed(0)
    kind, config, settings = FAMILIES[name]
    model = kind(config(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=3, **settings)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.rand_like(weight))
    return linearize(model, LINEAR["lolcats"], layers).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_so_have_other_families_of_such_layers(name: str) -> None:
    compare(family(name, [1]))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmo2"])
def test_so_have_other_families_whose_layers_are_all_linear(name: str) -> None:
    compare(family(name, None))


@pytest.mark.parametrize("name", FAMILIES)
def test_so_have_those_of_few_bits_but_for_rounding(name: str) -> None:
    compare(
        quantize(family(name, [1]), 8),
        same=lambda found, wanted: torch.allclose(found, wanted, 1e-3, 1e-3),
    )


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_norms_that_change_in_place_are_read_anew(name: str) -> None:
    model = quantize(family(name, [1]), 8)
    modules, decoder, token = begin(model), begin(model), torch.tensor([3])
    for _ in range(3):
        found, wanted = decoder.read_token(token), modules.read(token[:, None])
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        with torch.no_grad():
            model.model.layers[0].input_layernorm.weight.mul_(3.0)
            model.model.layers[0].self_attn.q_norm.weight.mul_(3.0)


def test_a_family_that_turns_only_some_channels_is_read_by_its_modules() -> None:
    config = StableLmConfig(**SIZES, vocab_size=VOCABULARY, num_hidden_layers=2)
    decoder = begin(linearize(StableLmForCausalLM(config).eval(), LINEAR["lolcats"]).eval())
    assert "more than" in str(decoder.refuse_native_step())
    decoder.read_token(torch.tensor([3]))


def test_a_vocabulary_of_few_tokens_is_tried_too() -> None:
    decoder = Decoder(linear_llama(LINEAR["lolcats"], 2, torch.float32, vocab_size=3).eval())
    decoder.read(torch.tensor([[0, 1, 2]]))
    assert decoder.refuse_native_step() is None


def test_what_the_parts_hide_is_found_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("lolcats")
    plain = type(model.model.layers[0]).forward
    monkeypatch.setattr(
        type(model.model.layers[0]), "forward", lambda *a, **k: 1.5 * plain(*a, **k)
    )
    assert "more than" in str(begin(model).refuse_native_step())


def test_modules_read_what_a_step_does_not() -> None:
    decoder = begin(model_of("lolcats"))
    assert decoder.refuse_native_step() is None
    with use_mode(decoder.model, WindowOnly()):
        assert "something else" in str(decoder.refuse_native_step())
    with kernels.only("product (torch)"):
        assert decoder.refuse_native_step() is not None
    assert decoder.refuse_native_step() is None
    decoder.cache.layers[0].activate_past_recording()
    assert "can go back" in str(decoder.refuse_native_step())
    few = begin(decoder.model, 2)
    assert few.refuse_native_step() is None
    few.model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    assert "hooks" in str(few.refuse_native_step())


@pytest.mark.parametrize("name", ["lolcats", "all of it"])
def test_layers_that_hold_their_states_are_one_call(name: str, monkeypatch) -> None:
    """Once no sink is in a window: of all layers, and of the head."""
    decoder = begin(quantize(model_of(name), 4))
    made, call = list[object](), library.PreparedCall.__call__

    def counted(self: library.PreparedCall) -> None:
        made.append(self)
        call(self)

    monkeypatch.setattr(library.PreparedCall, "__call__", counted)
    counts = []
    for i in range(14):
        made.clear()
        decoder.read_token(torch.tensor([i]))
        counts.append(len(made))
    assert counts[0] > 6
    assert counts[-1] == 2
