"""Decoding on memory that stays where it is: all of a CUDA graph but its capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import fastweights.generate
from fastweights import FastWeightsCache, FastWeightsForCausalLM, stream
from fastweights.generate import Decoder, likeliest
from fastweights.linearize import LinearAttentionConfig
from fastweights.models.graph import (
    HostWaitError,
    StaticStep,
    refuse_graph,
    refuse_static,
    sizes_of,
    states_of,
)
from kinds import form_of, one_of_each
from pretrained import linear_llama, llama
from tiny import LAYERS, tiny, tokens

NEW = 12
GROWING = [n for n in LAYERS if n.startswith("softmax") or n in ("olmo2", "mla", "fox")]
each_form = pytest.mark.parametrize(
    "layers", one_of_each((n for n in LAYERS if n not in GROWING), form_of)
)
RULES = ["windowed", "gla", "metala", "gated_deltanet", "mesa", "supra"]


def eager(model: Any, ids: Tensor, count: int = NEW) -> Tensor:
    """Tokens by a pass of the model each."""
    decoder, found = Decoder(model), []
    logits = decoder.read(ids)
    for _ in range(count):
        found.append(likeliest(logits))
        logits = decoder.read(found[-1][:, None])
    return torch.stack(found, 1)


def streamed(model: Any, ids: Tensor, count: int = NEW) -> Tensor:
    return torch.stack(list(stream(model, ids, max_new_tokens=count, temperature=0)), 1)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU, but that a step is run again where a graph would be replayed; the entries count
    the steps that were read by one.
    """
    replays: list[int] = []

    def record(run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            replays.append(len(replays))
            run()

        run()
        return replay

    monkeypatch.setattr(fastweights.generate, "capture_graph", record)
    monkeypatch.setattr(fastweights.generate, "refuse_graph", refuse_static)
    return replays


def language_model(layers: str) -> FastWeightsForCausalLM:
    """One whose windows are soon full."""
    size = {"swa": "window", "lolcats": "window", "hyena": "length"}.get(layers)
    return tiny(layers, mixers=[{"name": layers, size: 4}] if size else LAYERS[layers])


def linearized(rule: str) -> Any:
    model = linear_llama(LinearAttentionConfig(window=0 if rule == "supra" else 4, rule=rule))
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.sampled
@each_form
def test_the_same_tokens_from_states_that_stay(layers: str, captured: list[int]) -> None:
    model, ids = language_model(layers), tokens(2, 5)
    assert torch.equal(streamed(model, ids), eager(model, ids))
    assert len(captured) == NEW - 2


@each_form
def test_states_stay_where_they_are(layers: str) -> None:
    model, ids = language_model(layers), tokens(2, 5)
    decoder = Decoder(model)
    logits = decoder.read(ids)
    step = StaticStep(model, decoder.cache, logits)
    places = [state.data_ptr() for state in states_of(decoder.cache)]
    sizes = sizes_of(decoder.cache)
    for count in range(1, 4):
        after = step(likeliest(step.logits))
        assert [state.data_ptr() for state in states_of(decoder.cache)] == places
        assert sizes_of(decoder.cache) == sizes
        assert after.data_ptr() == step.logits.data_ptr()
        assert decoder.cache.get_seq_length() == 5 + count


@pytest.mark.parametrize("rule", RULES)
def test_linearized_models(rule: str, captured: list[int]) -> None:
    """The position is counted on the device."""
    model, ids = linearized(rule), tokens(2, 5)
    assert torch.equal(streamed(model, ids), eager(model, ids))
    assert len(captured) == NEW - 2


def test_a_window_is_filled_first(captured: list[int]) -> None:
    model = linearized("windowed")
    ids = tokens(1, 1)
    assert torch.equal(streamed(model, ids), eager(model, ids))
    # three tokens fill it, the fourth shows that it grows no more
    assert len(captured) == NEW - 4


def test_a_capture_leaves_no_trace(captured: list[int]) -> None:
    """It runs steps, whose states, positions and counts are taken back."""
    del captured
    for model in (tiny("hybrid"), linearized("gla")):
        decoder = Decoder(model)
        logits = decoder.read(tokens(2, 9))
        step = StaticStep(model, decoder.cache, logits)
        before = [state.clone() for state in states_of(decoder.cache)]
        step.capture(lambda run: [run() for _ in range(3)] and run)
        for state, old in zip(states_of(decoder.cache), before, strict=True):
            assert torch.equal(state, old)
        assert torch.equal(step.logits, logits)
        assert decoder.cache.get_seq_length() == 9


def test_a_step_that_makes_the_host_wait_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        raise HostWaitError("it looks")

    monkeypatch.setattr(fastweights.generate, "capture_graph", record)
    monkeypatch.setattr(fastweights.generate, "refuse_graph", refuse_static)
    model, ids = tiny("metala"), tokens(2, 5)
    assert torch.equal(streamed(model, ids), eager(model, ids))
    decoder = Decoder(model)
    decoder.read_token(likeliest(decoder.read(ids)))
    assert decoder.step is None
    assert "makes the host wait for the device (it looks)" in str(decoder.refuse_graph())


def test_more_than_a_token_between_tokens(captured: list[int]) -> None:
    """Longer text is read past the graph, which then begins anew."""
    model, ids, more = tiny("hybrid"), tokens(2, 9), tokens(2, 3, seed=1)
    found, plain = Decoder(model), Decoder(model)
    for decoder, read in ((found, found.read_token), (plain, lambda t: plain.read(t[:, None]))):
        logits = decoder.read(ids)
        for _ in range(3):
            logits = read(likeliest(logits))
        decoder.read(more)
        for _ in range(3):
            logits = read(likeliest(logits))
        if decoder is found:
            got = logits.clone()
    assert torch.equal(got, logits)
    assert len(captured) == 4


def test_sequences_that_end_and_seeds(captured: list[int]) -> None:
    del captured
    model, ids = tiny("hybrid"), tokens(3, 9)
    free = eager(model, ids)
    model.generation_config.eos_token_id = [int(free[0, 4]), int(free[1, 2])]
    model.generation_config.pad_token_id = 0
    drawn = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        found = list(stream(model, ids, max_new_tokens=NEW, generator=generator))
        drawn.append((torch.stack(found, 1), generator.get_state()))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_what_cannot_be_captured_says_why() -> None:
    model = tiny("metala")
    assert refuse_static(model, FastWeightsCache()) is None
    assert refuse_graph(model, FastWeightsCache()) == (
        "its weights are on cpu, not on one CUDA device"
    )
    for name in GROWING:
        assert "softmax attention to all tokens" in str(
            refuse_static(tiny(name), FastWeightsCache())
        )
    model = linearized("gla")
    decoder = Decoder(model)
    decoder.read(tokens(1, 3))
    assert refuse_static(model, decoder.cache) is None
    softmax = llama()
    decoder = Decoder(softmax)
    decoder.read(tokens(1, 3))
    assert isinstance(decoder.cache, DynamicCache)
    assert "keys and values of all tokens" in str(refuse_static(softmax, decoder.cache))


def test_a_state_that_grows_is_refused() -> None:
    model = tiny("hybrid")
    decoder = Decoder(model)
    step = StaticStep(model, decoder.cache, decoder.read(tokens(1, 1)))
    with pytest.raises(ValueError, match=r"has become one of .*; only states that do not grow"):
        step(torch.zeros(1, dtype=torch.long))
