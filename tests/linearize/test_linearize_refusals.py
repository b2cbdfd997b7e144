"""What cannot be linearized says so, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

from families import SIZES, padded, student, teacher
from fastweights.linearize import (
    RULES,
    CannotLinearize,
    LinearAttentionConfig,
    StateLayer,
    Teacher,
    linearize,
    use_mode,
)
from fastweights.linearize.convert.config import RULE_PAPERS
from fastweights.recurrence import ShapeError


def tiny(family: str, **fields: Any) -> Any:
    standard = AutoConfig.for_model(family)
    sizes = {name: size for name, size in SIZES.items() if name in vars(standard)}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**sizes, **fields})
    ).eval()


CHUNKED = {"layer_types": ["chunked_attention"] * 2 + ["full_attention"], "num_local_experts": 2}
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "sinks": (lambda: tiny("gpt_oss"), {}, "layers 0–2: attention sinks"),
    "chunks": (
        lambda: tiny("llama4_text", **CHUNKED),
        {"layers": [1]},
        "layer 1: chunked attention",
    ),
    "no interface": (
        lambda: tiny("bloom"),
        {},
        (
            "none of its layers calls transformers' attention interface; use a family that does,"
            " such as llama"
        ),
    ),
    "sliding": (
        lambda: tiny("mistral"),
        {},
        "its sliding window of 4096 tokens .* name the layers to convert",
    ),
    "two calls": (lambda: tiny("diffllama"), {}, "it attends 2 times, with one cache"),
    "own mask": (lambda: tiny("doge"), {}, "its mask is not transformers' own"),
    "both ways": (lambda: tiny("bert"), {}, "tokens also see those after them"),
    "no such layer": (
        teacher,
        {"layers": [1, 7]},
        r"layers \[7\]: .* has no such layers; choose some of 0–2",
    ),
    "no layer": (teacher, {"layers": []}, "choose some of 0–2"),
    "twice": (student, {}, "it is linearized already"),
    "flash": (
        lambda: under("flex_attention"),
        {},
        "load the model with attn_implementation='sdpa'",
    ),
}


def under(implementation: str) -> Any:
    model = teacher()
    model.config._attn_implementation = implementation
    return model


@pytest.mark.parametrize(("make", "options", "message"), MODELS.values(), ids=MODELS)
def test_models_that_cannot_be_converted(
    make: Callable[[], Any], options: dict[str, Any], message: str
) -> None:
    model = make()
    kind, names = type(model), set(model.state_dict())
    with pytest.raises(CannotLinearize, match=message):
        linearize(model, **options)
    assert (type(model), set(model.state_dict())) == (kind, names)


def test_layers_beside_refused_ones_are_converted() -> None:
    assert [
        s["layer"] for s in linearize(tiny("llama4_text", **CHUNKED)).config.linearize["sites"]
    ] == [2]


def full_mask() -> torch.Tensor:
    return torch.ones(2, 1, 15, 15, dtype=torch.bool).tril()


IDS = padded()["input_ids"]
CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "static": (
        lambda m: m(IDS, past_key_values=StaticCache(config=m.config, max_cache_len=32)),
        CannotLinearize,
        r"a StaticCache: .* pass no cache, or a plain transformers.DynamicCache\(\)",
    ),
    "offloaded": (
        lambda m: m(IDS, past_key_values=offloaded()),
        CannotLinearize,
        "an offloaded cache: .* pass no cache",
    ),
    "static generation": (
        lambda m: m.generate(IDS, max_new_tokens=2, cache_implementation="static"),
        CannotLinearize,
        "cache_implementation='static': .* leave it out",
    ),
    "quantized generation": (
        lambda m: m.generate(IDS, max_new_tokens=2, cache_implementation="quantized"),
        CannotLinearize,
        "cache_implementation='quantized'",
    ),
    "offloaded generation": (
        lambda m: m.generate(IDS, max_new_tokens=2, cache_implementation="offloaded"),
        CannotLinearize,
        "cache_implementation='offloaded'",
    ),
    "softmax cache": (
        lambda m: m(IDS, past_key_values=read_by_softmax(m)),
        CannotLinearize,
        "begin a new cache",
    ),
    "4-D mask": (
        lambda m: m(IDS, attention_mask=full_mask()),
        CannotLinearize,
        r"a mask of shape \[2, 1, 15, 15\]: .* pass attention_mask \[batch, time\]",
    ),
    "short mask": (
        lambda m: m(IDS, attention_mask=torch.ones(2, 9)),
        ShapeError,
        (
            "attention_mask has 9 columns, must be one for each of the 0 tokens in the cache and of"
            " the 15 given"
        ),
    ),
    "crop": (
        lambda m: read(m).crop(-1),
        NotImplementedError,
        "cannot forget its last tokens.*copy.deepcopy",
    ),
    "implementation": (
        lambda m: m.set_attn_implementation("flash_attention_2"),
        CannotLinearize,
        "softmax layers beside linear ones go through sdpa or eager",
    ),
}


def offloaded() -> DynamicCache:
    """As a machine with an accelerator makes it."""
    cache = DynamicCache()
    cache.offloading = True
    return cache


def read(model: Any) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    return cache


def read_by_softmax(model: Any) -> DynamicCache:
    with use_mode(model, Teacher()):
        return read(model)


@pytest.mark.parametrize(("call", "error", "message"), CALLS.values(), ids=CALLS)
def test_calls_that_cannot_be_served(
    call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        call(student())


def test_a_quantized_cache_is_refused() -> None:
    class Quantized(QuantizedCache):
        def __init__(self) -> None:
            self.layers, self.offloading = [], False

    with pytest.raises(CannotLinearize, match="a Quantized: "):
        student()(IDS, past_key_values=Quantized())


def test_the_teacher_cannot_go_on_from_a_state() -> None:
    model = student()
    cache = read(model)
    assert isinstance(cache.layers[0], StateLayer)
    with use_mode(model, Teacher()), pytest.raises(CannotLinearize, match="begin a new cache"):
        model(IDS, past_key_values=cache)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"features": "gelu"},
            "features = 'gelu'; use elu, elu-skip, exp, exp-skip, hedgehog, landmarks",
        ),
        (
            {"rule": "rnn"},
            "rule = 'rnn'; use gated_deltanet, gla, kda, lightning, mesa, metala, supra, windowed",
        ),
        ({"feature_dim": 0}, "feature_dim = 0; use a number of columns, or None"),
        ({"window": -1}, "window = -1; a number of tokens, 0 for linear attention alone"),
        ({"rule": "supra"}, "take window = 0, or rule = 'lightning'"),
        ({"window": 0, "sinks": 1}, "seen by the softmax of a window, or"),
        ({"sinks": 1, "per_query_head": True}, "have no sinks"),
        ({"sinks": -1}, "sinks"),
        ({"gates": "pooled"}, "which has no gates; take one of gla"),
        ({"gates": "zz"}, "learnt"),
        ({"window": 4, "convolution": 4}, "a window sees keys as they are"),
        ({"window": 0, "convolution": 4, "per_query_head": True}, "have no convolutions"),
        ({"window": 0, "convolution": 1}, "take 2 or more taps"),
        ({"window": 0, "convolution": -1}, "convolution"),
        ({"log_scale": 500}, "it is the base of a logarithm"),
        ({"positions": "linear", "log_scale": 1}, "it is the base of a logarithm"),
        ({"windows_by_head": True}, "windows_by_head with features = 'hedgehog'"),
        *(
            ({"features": "landmarks", **fields}, "landmarks stand for the keys of a key head")
            for fields in ({"rule": "gla"}, {"shared": False}, {"per_query_head": True})
        ),
    ],
)
def test_analogs_that_do_not_exist(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearAttentionConfig(**fields)


def test_every_rule_of_a_configuration_has_its_module() -> None:
    assert list(RULES) == list(RULE_PAPERS)
