"""What softmax has read, handed over to linear layers and back: against softmax's own keys and
values in every layer, and against one forward that does both.
"""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from families import CONVOLVED, LAYERS, held_bytes, padded, positions, student, teacher
from fastweights.cli import main
from fastweights.cli.verbs.generate import encode_prompt
from fastweights.generate import stream
from fastweights.linearize import (
    RULES,
    AttentionCall,
    CannotLinearize,
    LinearAttentionConfig,
    Mode,
    Student,
    Teacher,
    branches,
    cache_bytes,
    convert_cache,
    linearize,
    read_by_softmax,
    restore_cache,
    use_mode,
)
from fastweights.models.cache_names import cache_argument
from fastweights.recurrence.streams import ShapeError
from fastweights.training.data.tokenizers import Bytes, TextStream
from pretrained import linear_llama
from tolerances import SAME, assert_close, error

pytestmark = pytest.mark.sampled

PROMPT = 15


class HandedOver(Mode):
    """The first tokens by softmax, the others by the recurrence of all."""

    constant = False

    def __init__(self, first: int) -> None:
        self.first = first

    def attend(self, call: AttentionCall) -> Tensor:
        return torch.cat([call.softmax()[:, : self.first], call.linear()[:, self.first :]], 1)


def read(model: Any, inputs: dict[str, Tensor], mode: Mode) -> DynamicCache:
    """The cache after a prompt, with the positions of generate()."""
    cache, places = DynamicCache(config=model.config), positions(inputs["attention_mask"])
    with use_mode(model, mode), torch.no_grad():
        model(**inputs, position_ids=places, past_key_values=cache)
    return cache


def longer(inputs: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The prompt and some more tokens."""
    more = torch.arange(7, 7 + 2 * tokens).view(2, tokens) % 50 + 3
    parts = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    return {name: torch.cat([x, parts[name]], 1) for name, x in inputs.items()}


def one_by_one(model: Any, inputs: dict[str, Tensor], cache: DynamicCache) -> Tensor:
    """The logits of the tokens behind those in the cache, each fed by itself."""
    found, places = [], positions(inputs["attention_mask"])
    for t in range(cache.get_seq_length(), inputs["input_ids"].shape[1]):
        with torch.no_grad():
            out = model(
                inputs["input_ids"][:, t : t + 1],
                attention_mask=inputs["attention_mask"][:, : t + 1],
                position_ids=places[:, t : t + 1],
                past_key_values=cache,
            )
        found.append(out.logits)
    return torch.cat(found, 1)


def at_once(model: Any, inputs: dict[str, Tensor], mode: Mode) -> Tensor:
    with use_mode(model, mode), torch.no_grad():
        places = positions(inputs["attention_mask"])
        return model(**inputs, position_ids=places, use_cache=False).logits


# the states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "granite", "mixtral"])
@pytest.mark.parametrize("rule", RULES)
def test_the_first_layer_has_what_it_would_have_read(family: str, rule: str) -> None:
    """And the layers above have something else, as softmax is below them."""
    analog = LinearAttentionConfig(window=0 if rule == "supra" else 4, rule=rule)
    model, inputs = student(family, analog), padded()
    own = read(model, inputs, Student())
    handed = convert_cache(model, read(model, inputs, Teacher()), inputs["attention_mask"])
    first, *others = branches(model)
    assert all(map(torch.equal, handed.layers[first].state, own.layers[first].state))
    for layer in others:
        pairs = zip(handed.layers[layer].state, own.layers[layer].state, strict=True)
        assert any(error(a, b) > SAME for a, b in pairs if a.is_floating_point() and a.numel())
    assert handed.get_seq_length() == own.get_seq_length() == PROMPT


ANALOGS = {
    **{f"window-{w}": LinearAttentionConfig(window=w) for w in (0, 1, 4)},
    "two": LinearAttentionConfig(window=3, shared=False),
    "heads": LinearAttentionConfig(window=3, per_query_head=True),
    "landmarks": LinearAttentionConfig("landmarks", window=3),
    "landmarks-sinks": LinearAttentionConfig("landmarks", window=3, sinks=2),
    **{rule: LinearAttentionConfig(window=0, rule=rule) for rule in RULES if rule != "windowed"},
    **{f"{rule}-window-3": LinearAttentionConfig(window=3, rule=rule) for rule in ("gla", "mesa")},
}


@pytest.mark.parametrize("analog", ANALOGS.values(), ids=ANALOGS)
def test_tokens_behind_it_see_what_softmax_has_read(analog: LinearAttentionConfig) -> None:
    model, inputs = student(analog=analog), padded()
    cache = convert_cache(model, read(model, inputs, Teacher()), inputs["attention_mask"])
    whole = longer(inputs, 6)
    got = one_by_one(model, whole, cache)
    want = at_once(model, whole, HandedOver(PROMPT))[:, PROMPT:]
    assert error(got, want) <= SAME
    assert error(want, at_once(model, whole, Student())[:, PROMPT:]) > SAME


@pytest.mark.parametrize(
    ("family", "layers", "fields"),
    [("llama", [1], {}), ("gemma2", None, {"sliding_window": 6}), ("llama", [0, 2], {})],
)
def test_layers_that_stay_softmax_keep_what_they_have(family, layers, fields) -> None:
    model, inputs = student(family, layers=layers, **fields), padded()
    cache = read(model, inputs, Teacher())
    before = list(cache.layers)
    convert_cache(model, cache, inputs["attention_mask"])
    kept = [new is old for new, old in zip(cache.layers, before, strict=True)]
    assert kept == [index not in branches(model) for index in range(LAYERS)]
    whole = longer(inputs, 5)
    want = at_once(model, whole, HandedOver(PROMPT))[:, PROMPT:]
    assert error(one_by_one(model, whole, cache), want) <= SAME


def test_within_the_window_all_tokens_are_softmax_s() -> None:
    model = student(analog=LinearAttentionConfig(window=64))
    inputs = padded()
    whole = longer(inputs, 10)
    cache = convert_cache(model, read(model, inputs, Teacher()), inputs["attention_mask"])
    assert error(one_by_one(model, whole, cache), at_once(model, whole, Teacher())[:, PROMPT:]) <= (
        SAME
    )


@pytest.mark.parametrize("piece", [1, 4, 14])
def test_pieces_of_a_prompt_make_the_same_state(piece: int) -> None:
    model, inputs = student(), padded()
    cache = read(model, inputs, Teacher())
    whole = convert_cache(model, copy.deepcopy(cache), inputs["attention_mask"])
    parts = convert_cache(model, cache, inputs["attention_mask"], piece=piece)
    for one, other in zip(whole.layers, parts.layers, strict=True):
        for a, b in zip(one.state, other.state, strict=True):
            torch.testing.assert_close(b, a)
        assert one.tokens == other.tokens


def test_the_original_model_may_have_read() -> None:
    """Its cache is that of the teacher."""
    model, inputs = student(), padded()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        places = positions(inputs["attention_mask"])
        teacher()(**inputs, position_ids=places, **cache_argument(cache))
    handed = convert_cache(model, cache, inputs["attention_mask"])
    own = convert_cache(model, read(model, inputs, Teacher()), inputs["attention_mask"])
    pairs = zip(handed.layers[2].state, own.layers[2].state, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_low_precision_keeps_states_in_float32() -> None:
    model, inputs = student().to(torch.bfloat16), padded()
    cache = convert_cache(model, read(model, inputs, Teacher()), inputs["attention_mask"])
    keys, values, memory, _ = cache.layers[0].state
    assert (keys.dtype, values.dtype, memory.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    whole = longer(inputs, 5)
    want = at_once(model, whole, HandedOver(PROMPT))[:, PROMPT:]
    got = one_by_one(model, whole, cache)
    assert_close(got.float(), want.float(), "logits", torch.bfloat16)


def test_memory_is_given_up() -> None:
    model, inputs = student(), padded(pad=0, t=100)
    cache = read(model, inputs, Teacher())
    before, keys = cache_bytes(cache), [weakref.ref(layer.keys) for layer in cache.layers]
    convert_cache(model, cache)
    gc.collect()
    assert all(key() is None for key in keys)
    assert cache_bytes(cache) < before / 8
    assert held_bytes(cache) == cache_bytes(cache)


# generation ---------------------------------------------------------------------------------------

LENGTHS: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_goes_on_from_it(beams: int) -> None:
    """Padded prompts, read by softmax up to their first new token."""
    model, inputs = student(), padded()
    options = {**LENGTHS, "num_beams": beams, "return_dict_in_generate": True}
    with use_mode(model, Teacher()):
        first = model.generate(
            **inputs, max_new_tokens=1, do_sample=False, return_dict_in_generate=True
        )
    cache = convert_cache(model, first.past_key_values, inputs["attention_mask"])
    cache.batch_repeat_interleave(beams)
    ids = first.sequences
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    got = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    with use_mode(model, HandedOver(PROMPT)):
        want = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(got.sequences, want.sequences)


def test_stream_goes_on_from_a_prompt_that_softmax_has_read() -> None:
    model, ids = student(), padded(pad=0)["input_ids"]
    cache = read_by_softmax(model, ids[:, :-1], piece=4)
    settings: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0}
    got = torch.stack(list(stream(model, ids[:, -1:], cache=cache, **settings)), 1)
    with use_mode(model, HandedOver(PROMPT - 1)):
        want = model.generate(ids, use_cache=False, **LENGTHS)
    assert torch.equal(got, want[:, PROMPT:])
    assert cache.get_seq_length() == PROMPT + 4


# refusals -----------------------------------------------------------------------------------------


def sliding_model() -> Any:
    """A sliding layer that was asked for."""
    return linearize(
        teacher("gemma2", sliding_window=6), LinearAttentionConfig(window=4), list(range(LAYERS))
    )


REFUSALS = {
    "already": (
        student,
        lambda model, inputs: convert_cache(model, read(model, inputs, Teacher())),
        "it holds a linear state, and not the keys and values of softmax",
    ),
    "empty": (
        student,
        lambda model, inputs: DynamicCache(config=model.config),
        "it holds no token, and not the keys and values of softmax",
    ),
    "latent": (
        lambda: student("deepseek_v3"),
        lambda model, inputs: read(model, inputs, Teacher()),
        "1 heads of 16 and 8 channels, and attention reads 4 heads of 16 and 12 channels",
    ),
    "convolved": (
        lambda: student(analog=CONVOLVED["gla, convolved"]),
        lambda model, inputs: read(model, inputs, Teacher()),
        "it goes on from the last queries, which its convolution reads",
    ),
    "slides": (
        sliding_model,
        lambda model, inputs: read(model, inputs, Teacher()),
        "it slides, and has 5 of 15 tokens",
    ),
    "static": (
        student,
        lambda model, inputs: StaticCache(model.config, max_cache_len=32),
        "a StaticCache: a linearized layer keeps a state of constant size",
    ),
}


@pytest.mark.parametrize(("make", "cached", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_handed_over_is_refused(make, cached, message) -> None:
    model, inputs = make(), padded()
    cache = cached(model, inputs)
    layers = list(cache.layers)
    with pytest.raises(CannotLinearize, match=message):
        convert_cache(model, cache, inputs["attention_mask"])
    assert all(new is old for new, old in zip(cache.layers, layers, strict=True))


def test_a_mask_of_fewer_tokens_is_refused() -> None:
    model, inputs = student(), padded()
    cache = read(model, inputs, Teacher())
    with pytest.raises(ShapeError, match="has 14 columns, must be one for each of the 15 tokens"):
        convert_cache(model, cache, inputs["attention_mask"][:, 1:])
    assert cache.layers[0].keys is not None


def test_a_softmax_cache_is_told_how_to_go_on() -> None:
    model, inputs = student(), padded()
    cache = read(model, inputs, Teacher())
    with pytest.raises(CannotLinearize, match=r"convert it by .*linearize\.convert_cache"):
        model(inputs["input_ids"][:, :1], past_key_values=cache)


# the way back -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"window": 16},
        {"window": 11, "per_query_head": True},
        {"window": 16, "features": "landmarks"},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_within_the_window_the_way_back_is_exact(family: str, config: dict[str, Any]) -> None:
    """The padded one of two sequences has 10 tokens, the other 15."""
    rows = slice(0, 2 if config["window"] > PROMPT else 1)
    inputs = {name: x[rows] for name, x in padded().items()}
    model = student(family, LinearAttentionConfig(**config))
    cache = read(model, inputs, Teacher())
    want = copy.deepcopy(cache)
    convert_cache(model, cache, inputs["attention_mask"])
    found = restore_cache(model, cache, inputs["attention_mask"])
    keep = inputs["attention_mask"].bool()
    for layer, other in zip(found.layers, want.layers, strict=True):
        assert type(layer) is type(other)
        for a, b in ((layer.keys, other.keys), (layer.values, other.values)):
            assert torch.equal(a.transpose(1, 2)[keep], b.transpose(1, 2)[keep])
    turn = torch.full((len(keep), 1), 7)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(turn)], 1)
    with use_mode(model, Teacher()), torch.no_grad():
        got, exact = (
            model(
                turn,
                attention_mask=mask,
                position_ids=positions(mask)[:, -1:],
                past_key_values=some,
            ).logits
            for some in (found, want)
        )
    assert torch.equal(got, exact)


@pytest.mark.parametrize(
    ("analog", "kept"),
    [
        (LinearAttentionConfig(window=15), 14),
        (LinearAttentionConfig(window=1), 0),
        (LinearAttentionConfig(window=0, rule="gla"), 0),
        (LinearAttentionConfig(window=8, rule="gla"), 8),
    ],
)
def test_what_has_left_the_window_does_not_come_back(analog, kept: int) -> None:
    model, inputs = student(analog=analog), padded()
    cache = convert_cache(model, read(model, inputs, Teacher()), inputs["attention_mask"])
    layers = list(cache.layers)
    with pytest.raises(
        CannotLinearize, match=f"it has read 15 tokens and keeps keys and values of {kept};"
    ):
        restore_cache(model, cache, inputs["attention_mask"])
    assert all(new is old for new, old in zip(cache.layers, layers, strict=True))


def test_there_is_no_way_back_from_softmax() -> None:
    model, inputs = student(), padded()
    with pytest.raises(CannotLinearize, match="it holds no linear state"):
        restore_cache(model, read(model, inputs, Teacher()))


def test_the_command_may_read_a_prompt_by_softmax(tmp_path, capsys) -> None:
    """Its words are those that the handed-over model takes to be the likeliest."""
    model = linear_llama(dtype=torch.float32, vocab_size=258)
    tokenizer: Any = Bytes().build([])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = ["--tokens", "6", "--temperature", "0", "--device", "cpu"]
    capsys.readouterr()
    said = {}
    for prompt, reader in itertools.product(("a longer prompt", "a"), ("linear", "softmax")):
        command = ["linearize", "generate", str(tmp_path), prompt, "--prompt-by", reader]
        assert main([*command, *options]) == 0
        said[prompt, reader] = capsys.readouterr().out
    ids = torch.tensor([encode_prompt("a longer prompt", tokenizer)])
    with use_mode(model, HandedOver(ids.shape[1] - 1)):
        want = model.generate(ids, use_cache=False, max_new_tokens=6, do_sample=False)
    text = TextStream(tokenizer)
    assert said["a longer prompt", "softmax"] == (
        "".join(text.push(int(token)) for token in want[0]) + text.close() + "\n"
    )
    assert said["a longer prompt", "softmax"] != said["a longer prompt", "linear"]
    assert said["a", "softmax"].startswith("a")
