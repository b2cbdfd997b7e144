"""The judgement of a conversion: its share with an interval, recall by distance, memory,
samples."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from conversions import write_source
from families import teacher
from fastweights.generate import Decoder, likeliest
from fastweights.linearize import (
    LinearAttentionConfig,
    Student,
    Teacher,
    cache_bytes,
    linearize,
    use_mode,
)
from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.modes import Mode
from fastweights.linearize.distill.adapt import LoRA, prepare_adaptation
from fastweights.linearize.distill.plan import LENGTHS, cache_memory, plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.evaluate.comparison import (
    SINKS,
    ModeComparison,
    StreamingSoftmax,
    ablations,
    compare_with_softmax,
    modes_in,
)
from fastweights.linearize.evaluate.generation import generate_samples
from fastweights.linearize.evaluate.judgement import share_in_words
from fastweights.linearize.evaluate.logits import next_logits
from fastweights.linearize.evaluate.recall import (
    CUE,
    PASSAGE,
    choose_distances,
    distances_to,
    measure_recall,
    repeated_passages,
    sequences_at,
    why_not,
)
from fastweights.linearize.evaluate.share import (
    RESAMPLES,
    ROUNDING,
    Share,
    share_by_octave,
    share_of,
)
from pretrained import linear_llama, llama, sequences, stream
from tolerances import assert_close

CLOSED = 0.7
SEQUENCES, TOKENS = 40, 20


def judged(losses: np.ndarray) -> ModeComparison:
    return ModeComparison(losses, losses < 1, 0.0, 0.0)


@cache
def made(
    lost: float = 0.5, count: int = SEQUENCES, noise: float = 0.2
) -> dict[str, ModeComparison]:
    """A window that loses so much, and a conversion that closes 70 % of it."""
    random = np.random.default_rng(3)
    softmax = random.gamma(2.0, 1.0, (count, TOKENS))
    gap = lost + noise * random.standard_normal((count, TOKENS))
    window = softmax + gap
    linear = window - CLOSED * gap + noise * random.standard_normal((count, TOKENS))
    return {
        name: judged(losses)
        for name, losses in {"softmax": softmax, "linear": linear, "window only": window}.items()
    }


def nats(
    found: dict[str, ModeComparison], first: int = 0, after: int | None = None
) -> dict[str, float]:
    return {name: float(c.losses[:, first:after].mean()) for name, c in found.items()}


def share_in(n: dict[str, float]) -> float:
    return (n["window only"] - n["linear"]) / (n["window only"] - n["softmax"])


def test_the_share_is_that_of_the_losses() -> None:
    share, n = share_of(made()), nats(made())
    assert share.value == pytest.approx(share_in(n))
    assert share.window_loses == pytest.approx(n["window only"] - n["softmax"])
    assert share.undefined is None
    rows = {name: compared.row()["nats_per_token"] for name, compared in made().items()}
    assert share.value == pytest.approx(share_in(rows))


def test_the_interval_is_that_of_resampled_sequences() -> None:
    found = made()
    random = np.random.default_rng(11)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = random.integers(0, SEQUENCES, SEQUENCES)
        drawn.append(share_in({name: c.losses[chosen].mean() for name, c in found.items()}))
    low, high = share_of(found).interval  # type: ignore[misc]
    assert [low, high] == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=0.01)
    assert low < CLOSED < high
    assert share_of(found).interval == (low, high)
    wide = share_of(made(noise=0.6)).interval
    assert wide[1] - wide[0] > 2 * (high - low)  # type: ignore[index, operator]


def test_the_standard_error_is_over_sequences() -> None:
    found = made()
    lost = (found["window only"].losses - found["softmax"].losses).mean(1)
    mean = sum(lost) / len(lost)
    variance = sum((x - mean) ** 2 for x in lost) / (len(lost) - 1)
    assert share_of(found).standard_error == pytest.approx((variance / len(lost)) ** 0.5)


def test_the_share_by_position_has_every_token_once() -> None:
    found, parts = made(), share_by_octave(made())
    assert list(parts) == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 20)]
    for (first, last), share in parts.items():
        assert share.value == pytest.approx(share_in(nats(found, first - 1, last)))


@pytest.mark.parametrize("lost", [0.0, -0.5, 0.005, ROUNDING / 2])
def test_what_is_too_little_is_not_divided_by(lost: float) -> None:
    found = made(lost, noise=0.0 if lost == ROUNDING / 2 else 0.2)
    share = share_of(found)
    assert (share.value, share.interval) == (None, None)
    assert share.undefined is not None
    assert "a share takes more than" in share.undefined
    assert share.window_loses == pytest.approx(nats(found)["window only"] - nats(found)["softmax"])


def test_one_sequence_has_a_share_without_an_interval() -> None:
    share = share_of(made(count=1))
    assert share.value == pytest.approx(share_in(nats(made(count=1))))
    assert share.interval is None


def test_an_end_without_a_bound_is_none() -> None:
    """What the window loses is just enough to divide by: some resamples have nothing of it."""
    losses = 0.5 + 0.3 * np.random.default_rng(0).standard_normal((60, 1))
    losses[7] = -9.3
    found = {"softmax": judged(0 * losses), "linear": judged(-1 - losses)}
    share = share_of({**found, "window only": judged(losses)})
    assert share.value is not None
    assert share.interval is not None
    assert share.interval[0] is not None
    assert share.interval[1] is None


def test_without_a_window_there_is_no_share() -> None:
    found = {name: made()[name] for name in ("softmax", "linear")}
    assert share_of(found) == Share(undefined="the linear attention has no window beside it")
    assert {share.value for share in share_by_octave(found).values()} == {None}


def test_modes_are_told_from_other_entries() -> None:
    rows = {name: compared.row() for name, compared in made().items()}
    assert modes_in({**rows, "share": 0.7, "recall": []}) == rows


def test_a_passage_is_repeated_at_its_distance() -> None:
    text = sequences(400)
    for distance in (64, 128, 368):
        ids = repeated_passages(text, distance, 800)
        assert ids.shape[1] == distance + PASSAGE
        assert torch.equal(ids[:, distance:], ids[:, :PASSAGE])
        whole = text[:].tolist()
        starts = [
            next(n for n in range(400) if whole[n : n + distance] == row[:distance].tolist())
            for row in ids
        ]
        assert starts[0] == 0
        assert starts[-1] == 400 - distance
        assert len(starts) == 800 // (distance + PASSAGE)
        assert len(repeated_passages(text, distance, 1)) == 1


def test_recall_is_that_of_the_second_copy() -> None:
    model = linear_llama(LinearAttentionConfig(window=3))
    text, modes = sequences(200), ablations(model)
    found = measure_recall(model, text, 64, modes, trained=16, most=300)
    ids = repeated_passages(text, 64, 300)
    for name, mode in modes.items():
        with use_mode(model, mode), torch.no_grad():
            logits = next_logits(model, {"input_ids": ids}).log_softmax(-1)
        places = range(64 + CUE, 64 + PASSAGE)
        losses = [[-float(logits[n, t - 1, ids[n, t]]) for t in places] for n in range(len(ids))]
        right = [
            [int(logits[n, t - 1].argmax()) == ids[n, t] for t in places] for n in range(len(ids))
        ]
        assert found.found[name].losses == pytest.approx(np.array(losses), abs=1e-5)
        assert found.row()[name]["accuracy"] == pytest.approx(np.mean(right))
    assert found.share == share_of(found.found)
    assert found.beyond_training
    linear = {"linear": Student()}
    assert not measure_recall(model, text, 64, linear, trained=96, most=300).beyond_training
    assert found.row()["tokens"] == len(ids) * (PASSAGE - CUE)


def test_distances_reach_as_far_as_is_asked() -> None:
    assert distances_to(24) == [64, 128, 256, 512, 1024, 2048]
    assert distances_to(10_000) == [64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert why_not(64, None, 96, 96) is None
    assert why_not(64, 96, 96, 96) is None
    assert "has 95 positions" in str(why_not(64, 95, 96, 96))
    assert "has 95 tokens" in str(why_not(64, 96, 95, 96))


def test_recall_reads_no_more_than_there_is_room_for() -> None:
    chosen, left_out = choose_distances(256, None, 2048, modes=4, room=2048)
    assert list(chosen) == [64, 128]
    assert "1,152 tokens in 4 modes" in left_out[256]
    assert "and this takes 2,112" in left_out[1024]
    takes = sum(4 * (64 * n + PASSAGE) * sequences_at(64 * n, 2048, chosen[64]) for n in (1, 2))
    assert takes == 4 * (96 + 160)
    assert list(choose_distances(256, None, 2048, modes=4, room=1 << 20)[0]) == [64, 128, 256, 512]


def test_a_mode_that_has_read_less_is_judged_beside_softmax() -> None:
    model = linear_llama(LinearAttentionConfig(window=3))
    every, modes = stream(20).sequential_batches(2), ablations(model)
    whole = compare_with_softmax(model, every, modes)
    found = compare_with_softmax(model, every, modes, most={"window only": 3})
    few, softmax = found["window only"], found["softmax"]
    assert len(few.losses) == 4 < len(softmax.losses)
    assert np.array_equal(few.losses, whole["window only"].losses[:4])
    row, lost = few.row(softmax), few.losses.mean() - softmax.losses[:4].mean()
    assert row["nats_per_token"] == pytest.approx(softmax.loss.mean + lost)
    assert row["tokens"] == few.losses.size
    assert found["linear"].row(softmax) == whole["linear"].row()
    first = {name: replace(own, losses=own.losses[:4]) for name, own in found.items()}
    assert share_of(found) == share_of(first)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("gpt2", {}), ("gemma2", {"sliding_window": 16})],
)
def test_memory_is_that_of_the_caches(family: str, fields: dict, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fastweights.linearize.distill.plan.LENGTHS", (2, 8, 64, *LENGTHS))
    model, recipe = teacher(family, **fields), LinearizationRecipe(LinearAttentionConfig(window=4))
    model.config.save_pretrained(tmp_path)
    planned = plan(str(tmp_path), recipe, layers=[1])
    found = cache_memory(str(tmp_path), planned, window=4)
    assert [size.tokens for size in found] == [8, 64, 128]
    converted = linearize(model, recipe.analog, [1])
    for size in found:
        for name, mode in (("softmax", Teacher()), ("linear", Student())):
            decoder = Decoder(converted)
            with use_mode(converted, mode):
                decoder.read(torch.ones(1, size.tokens, dtype=torch.int64))
            assert getattr(size, name) == cache_bytes(decoder.cache)
    last = planned.cache_per_token * (planned.break_even - 1)
    assert last < planned.state <= last + planned.cache_per_token


def _greedy(model: Any, prompt: torch.Tensor) -> list[int]:
    """With all that follows an end."""
    decoder = Decoder(model)
    found = decoder.decode(decoder.read(prompt), likeliest)
    return [int(token) for token in islice(found, 9)]


def test_samples_are_of_both_models(tmp_path) -> None:
    source = write_source(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(source / "model")
    prompts = torch.tensor([[*range(40, 52)], [*range(60, 72)]])
    original = llama(3, torch.float32, vocab_size=258)
    model = linearize(llama(3, torch.float32, vocab_size=258), LinearAttentionConfig(window=4))
    adapted = prepare_adaptation(model, LoRA())
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    found = generate_samples(adapted, None, tokenizer, prompts, 9)
    assert [sample.prompt for sample in found] == 2 * [tokenizer.decode(p) for p in prompts]
    assert [sample.drawn for sample in found] == [False, False, True, True]
    whole = []
    for sample, prompt in zip(found[:2], prompts, strict=True):
        for got, one in ((sample.softmax, original), (sample.linear, adapted.get_base_model())):
            whole.append(tokenizer.decode(_greedy(one, prompt[None])))
            assert got == whole[-1].partition(tokenizer.eos_token)[0]
    assert any(tokenizer.eos_token in text for text in whole)
    assert found == generate_samples(adapted, None, tokenizer, prompts, 9)
    assert len({sample.softmax for sample in found}) > 2
    aside = generate_samples(adapted, original, tokenizer, prompts, 9)
    assert [s.softmax for s in aside] == [s.softmax for s in found]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("tokens", [5, 9, 40])
def test_a_window_of_equal_state_is_softmax_under_a_mask(tokens, padding) -> None:
    model = linear_llama(LinearAttentionConfig(window=3)).double()
    mode = StreamingSoftmax(dict.fromkeys(branches(model), tokens))
    ids = sequences(40)[:].reshape(2, 20)
    ids = torch.from_numpy(ids.astype(np.int64))
    keep = torch.ones_like(ids)
    keep[1, :padding] = 0
    with use_mode(model, mode), torch.no_grad():
        given = {"attention_mask": keep} if padding else {}
        found = model(input_ids=ids, **given).logits
    query, key = torch.arange(20)[:, None], torch.arange(20)
    for row, begins in enumerate((0, padding)):
        near = query - key < tokens - SINKS
        seen = (key <= query) & (near | (key < begins + SINKS)) & (key >= begins)
        hidden = torch.zeros(20, 20).double().masked_fill(~seen, -torch.inf)
        hidden[:begins] = 0
        with use_mode(model, Dense(hidden)), torch.no_grad():
            wanted = model(input_ids=ids[row : row + 1], attention_mask=keep[row : row + 1]).logits
        assert_close(found[row, begins:], wanted[0, begins:], "logits")


@pytest.mark.parametrize("padding", [0, 3])
def test_a_window_of_equal_state_goes_on_from_a_cache(padding) -> None:
    model = linear_llama(LinearAttentionConfig(window=3)).double()
    mode = StreamingSoftmax(dict.fromkeys(branches(model), 9))
    ids = torch.from_numpy(sequences(40)[:].reshape(2, 20).astype(np.int64))
    keep = torch.ones_like(ids)
    keep[1, :padding] = 0
    with use_mode(model, mode), torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=keep).logits
        cache, found = None, []
        for begin, end in ((0, 11), (11, 16), (16, 17), (17, 20)):
            out = model(
                input_ids=ids[:, begin:end],
                attention_mask=keep[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            found.append(out.logits)
    for row, begins in enumerate((0, padding)):
        assert_close(torch.cat(found, 1)[row, begins:], wanted[row, begins:], "logits")


class Dense(Mode):
    """Softmax under a mask that is added to scores."""

    constant = False

    def __init__(self, mask) -> None:
        self.mask = mask

    def attend(self, call):
        groups = call.q.shape[2] // call.k.shape[2]
        q = call.q.transpose(1, 2)
        k, v = (s.transpose(1, 2).repeat_interleave(groups, 1) for s in (call.k, call.v))
        weights = (call.branch.attention.scaling * q @ k.mT + self.mask).softmax(-1)
        return (weights @ v).transpose(1, 2)


def test_the_share_of_an_equal_state_has_its_own_words() -> None:
    found = {**made(), "window of equal state": made()["window only"]}
    share = share_of(found, "window of equal state")
    assert share.value == share_of(found).value
    words = share_in_words(
        {"share": None, "share_details": {"undefined": "x"}, "share_of_equal_state": share.row()}
    )
    assert "is better than a window with 4 sinks that takes as many bytes" in words
