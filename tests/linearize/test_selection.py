"""Which layers stay softmax: each criterion against literal sums, budgets against caches as they
are, rankings that other runs use.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from families import teacher
from fastweights.errors import CheckpointError
from fastweights.linearize import (
    LinearAttentionConfig,
    Student,
    Teacher,
    branches,
    cache_bytes,
    linearize,
    use_mode,
)
from fastweights.linearize.distill.budget import CacheBudget, LayerBudget
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.evaluate.criteria import (
    CRITERIA,
    AloneLinear,
    AloneRestored,
    Candidates,
    Criterion,
    Divergence,
    LinearLayers,
    RecallLost,
    RestoredInTurn,
    name_of,
)
from fastweights.linearize.evaluate.logits import next_logits
from fastweights.linearize.evaluate.ranking import Ranking, read_ranking
from fastweights.render.units import bytes_from_words
from fastweights.training.data.sources import paths
from fastweights.training.data.tokenizers import Bytes
from planted import INDUCTION, planted_student, repeated_symbols
from pretrained import linear_llama, llama, stream
from tolerances import assert_close

pytestmark = pytest.mark.sampled

LAYERS = (0, 1, 2)


def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": stream(16).batch(0, 2)["input_ids"]}


def damage(criterion: Criterion, model: Any, batches: list[Any]) -> dict[int, float]:
    return criterion.damage(
        list(branches(model)),
        lambda choices: criterion.measure.losses(Candidates(model), batches, choices),
    )


# measures -----------------------------------------------------------------------------------------


def converted(layers: Collection[int]) -> torch.Tensor:
    """The logits of a model that has no other branches."""
    if not layers:
        return next_logits(llama(3), inputs()).detach()
    model = linear_llama(layers=3, chosen=list(layers))
    with torch.no_grad(), use_mode(model, Student()):
        return next_logits(model, inputs())


def divergence(layers: Collection[int]) -> float:
    """KL(softmax ‖ model) as sums over tokens and symbols."""
    p, q = (converted(some).double().log_softmax(-1).numpy() for some in ((), layers))
    rows = [sum(math.exp(a) * (a - b) for a, b in zip(p[i, t], q[i, t], strict=True))
            for i in range(p.shape[0]) for t in range(p.shape[1])]  # fmt: skip
    return sum(rows) / len(rows)


@pytest.mark.parametrize("layers", [(), (1,), (0, 2), LAYERS])
def test_some_layers_are_linear_and_the_others_softmax(layers: tuple[int, ...]) -> None:
    model = linear_llama(layers=3)
    with torch.no_grad(), use_mode(model, LinearLayers(layers)):
        assert_close(next_logits(model, inputs()), converted(layers), f"{layers} linear")


def test_divergence_is_the_mean_over_batches_and_tokens() -> None:
    choices = [(), (1,), (0, 2), LAYERS]
    model, labels = linear_llama(layers=3), {"labels": inputs()["input_ids"]}
    found = Divergence().losses(Candidates(model), [inputs(), {**inputs(), **labels}], choices)
    assert found == pytest.approx([divergence(layers) for layers in choices], abs=1e-12)
    first, second = ({"input_ids": x[None]} for x in inputs()["input_ids"])
    both = Divergence().losses(Candidates(model), [first, second], choices)
    assert both == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("linear", [(), (1,), (0, 2), LAYERS])
def test_softmax_layers_have_their_own_weights(linear: tuple[int, ...]) -> None:
    """Where a training has changed those of the attentions: the others' are changed."""
    model, built = linear_llama(layers=3), linear_llama(layers=3, chosen=list(linear) or [0])
    for layer in LAYERS:
        _change(model, layer)
    for layer in linear:
        _change(built, layer)
    before = {name: p.clone() for name, p in model.named_parameters()}
    mode = Student() if linear else Teacher()
    with torch.no_grad(), use_mode(built, mode):
        want = next_logits(built, inputs())
    models, softmax = Candidates(model, lambda: llama(3)), next_logits(llama(3), inputs())
    of_softmax, found = (read.next_logits() for read in models.read(inputs(), [linear]))
    assert_close(found, want, f"{linear} linear, and changed")
    assert_close(of_softmax, softmax.detach(), "the softmax model")
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_layers_before_the_first_linear_one_are_computed_once() -> None:
    model, choices = linear_llama(layers=3), [(), (0,), (2,), (1, 2)]
    calls = [0, 0, 0]
    for layer, block in enumerate(model.model.layers):
        count = partial(_count, calls, layer)
        block.self_attn.register_forward_pre_hook(count)
    _, *found = (read.next_logits() for read in Candidates(model).read(inputs(), choices))
    assert calls == [3, 4, 5]
    for linear, logits in zip(choices, found, strict=True):
        with torch.no_grad(), use_mode(model, LinearLayers(linear)):
            assert torch.equal(logits, next_logits(model, inputs()))


def _count(calls: list[int], layer: int, *_: object) -> None:
    calls[layer] += 1


@torch.no_grad()
def _change(model: Any, layer: int) -> None:
    model.model.layers[layer].self_attn.q_proj.weight.mul_(1.5)


def test_recall_lost_is_counted_token_by_token() -> None:
    """The mean over octaves of distance; what lies within the window does not count."""
    model, generator = planted_student(), torch.Generator().manual_seed(3)
    ids = torch.cat([batch["input_ids"] for batch in repeated_symbols()])
    distance = torch.randint(0, 40, ids.shape, generator=generator)
    choices = [[], [1], [2], list(branches(model))]
    wanted, *found = (_likeliest(model, ids, layers) for layers in ([], *choices))
    counts = [{octave: [0, 0] for octave in range(2, 6)} for _ in choices]
    for i, t in ((i, t) for i in range(ids.shape[0]) for t in range(1, ids.shape[1])):
        d = int(distance[i, t])
        if d > 4 and wanted[i, t - 1] == ids[i, t]:
            for predicted, of_choice in zip(found, counts, strict=True):
                of_choice[int(math.log2(d))][0] += int(predicted[i, t - 1] != ids[i, t])
                of_choice[int(math.log2(d))][1] += 1
    want = [sum(lost / all for lost, all in of.values()) / len(of) for of in counts]
    batches = [
        {"input_ids": x[None], "distance": d[None]} for x, d in zip(ids, distance, strict=True)
    ]
    assert RecallLost().losses(Candidates(model), batches, choices) == pytest.approx(want)
    assert want[0] == 0
    assert want[1] < 0.2 < 0.7 < want[2] <= want[3]


def _likeliest(model: Any, ids: torch.Tensor, layers: list[int]) -> torch.Tensor:
    with torch.no_grad(), use_mode(model, LinearLayers(layers)):
        return model(ids).logits.argmax(-1)


@pytest.mark.parametrize(("length", "made_length"), [(256, 512), (2048, 2048)])
def test_recall_is_measured_on_far_text(length: int, made_length: int) -> None:
    """Of the words of the sequences that are held out, in texts no shorter than windows need."""
    tokenizer: Any = Bytes().build([])
    prose = gzip.decompress(paths("shakespeare")[0].read_bytes()).decode()[:6000]
    ids = torch.tensor(tokenizer.encode(prose, add_special_tokens=False))
    pieces = [{"input_ids": piece[None]} for piece in ids.split(512)]
    made = RecallLost().text(pieces, tokenizer, length)
    assert len(made) == round(len(ids) / made_length)
    for batch in made:
        assert batch["input_ids"].shape == batch["distance"].shape == (1, made_length)
        back = torch.arange(made_length) - batch["distance"]
        assert torch.equal(batch["input_ids"].gather(1, back), batch["input_ids"])
    assert max(int(batch["distance"].max()) for batch in made) > 128
    same = [inputs()]
    assert Divergence().text(same, tokenizer, length) == same


def test_a_text_that_shows_no_recall_is_refused() -> None:
    model, text = planted_student(window=20), repeated_symbols()
    with pytest.raises(ValueError, match="recalls no token from beyond the window of 20"):
        RecallLost().require_text(lambda: model, text)
    RecallLost().require_text(planted_student, text)
    Divergence().require_text(lambda: pytest.fail("it asks for no model"), text)


# criteria -----------------------------------------------------------------------------------------


def test_damage_of_a_layer_alone() -> None:
    found = damage(AloneLinear(), linear_llama(layers=3), [inputs()])
    want = {layer: divergence([layer]) for layer in LAYERS}
    assert found == pytest.approx(want)
    assert list(found) == sorted(want, key=lambda layer: -want[layer])


def test_gain_of_a_layer_restored() -> None:
    found = damage(AloneRestored(), linear_llama(layers=3), [inputs()])
    whole = divergence(LAYERS)
    want = {one: whole - divergence([n for n in LAYERS if n != one]) for one in LAYERS}
    assert found == pytest.approx(want)
    assert list(found) == sorted(want, key=lambda layer: -want[layer])


def test_layers_restored_in_turn() -> None:
    found = damage(RestoredInTurn(), linear_llama(layers=3), [inputs()])
    left, before, want = list(LAYERS), divergence(LAYERS), {}
    while left:
        losses = {one: divergence([n for n in left if n != one]) for one in left}
        best = min(losses, key=lambda layer: losses[layer])
        left.remove(best)
        want[best], before = before - losses[best], losses[best]
    assert list(found) == list(want)
    assert found == pytest.approx(want, abs=1e-12)


def test_turns_see_layers_that_only_help_together() -> None:
    """0 and 1 do nothing alone, and all together; 2 does a little alone."""
    lost = lambda linear: 1.0 - 0.1 * (2 not in linear) - 0.8 * (not {0, 1} & set(linear))  # noqa: E731
    losses = lambda choices: [lost(choice) for choice in choices]  # noqa: E731
    assert next(iter(AloneRestored().damage(LAYERS, losses))) == 2
    assert next(iter(AloneLinear().damage(LAYERS, losses))) == 0
    found = RestoredInTurn().damage(LAYERS, losses)
    assert list(found) == [2, 0, 1]
    assert found == pytest.approx({2: 0.1, 0: 0.0, 1: 0.8})


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_finds_the_layer_that_recalls(name: str) -> None:
    model = planted_student()
    found = damage(CRITERIA[name], model, repeated_symbols())
    first, second = list(found.values())[:2]
    assert next(iter(found)) == INDUCTION
    assert first > 10 * second
    assert sorted(found) == list(branches(model))


def test_criteria_have_names() -> None:
    assert [name_of(criterion) for criterion in CRITERIA.values()] == list(CRITERIA)
    assert name_of(AloneRestored(RecallLost())) == "AloneRestored"


# budgets ------------------------------------------------------------------------------------------


def test_a_number_of_layers() -> None:
    assert LayerBudget(2).choose([2, 0, 1], ()) == [0, 2]
    assert LayerBudget().choose([2, 0, 1], ()) == []
    with pytest.raises(ValueError, match=r"cannot keep 3 of 3 layers softmax; keep 0 to 2 of them"):
        LayerBudget(3).choose([2, 0, 1], ())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["windowed", "gla"])
def test_a_budget_is_what_the_cache_takes(family: str, dtype: torch.dtype, rule: str) -> None:
    """Of every choice, one byte less than its cache excludes it."""
    analog, length = LinearAttentionConfig(window=5, rule=rule), 60
    sliding = {"sliding_window": 16} if family == "gemma2" else {}
    planned = plan(teacher(family, **sliding).to(dtype), LinearizationRecipe(analog))
    layers = [attention.layer for attention in planned.converted]
    sizes = []
    for count in range(len(layers)):
        kept = layers[:count]
        model = linearize(
            teacher(family, **sliding).to(dtype),
            analog,
            [layer for layer in layers if layer not in kept],
        )
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.arange(3, 3 + length)[None] % 50, past_key_values=cache)
        sizes.append(cache_bytes(cache))
        assert CacheBudget(sizes[-1], length).choose(layers, planned.caches) == kept
    assert sizes == sorted(set(sizes))
    for count, size in enumerate(sizes[1:]):
        budget = CacheBudget(size - 1, length)
        assert len(budget.choose(layers, planned.caches)) == count
    with pytest.raises(ValueError, match=r"cannot be met: with all .* layers linear it takes"):
        CacheBudget(sizes[0] - 1, length).choose(layers, planned.caches)
    assert len(CacheBudget(10**12, length).choose(layers, planned.caches)) == len(layers) - 1


def test_a_layer_that_does_not_fit_leaves_room_for_the_next() -> None:
    caches = plan(llama(3), LinearizationRecipe(LinearAttentionConfig(window=2))).caches
    large, *rest = caches
    caches = (replace(large, token=100 * large.token), *rest)
    states = sum(cache.after(64) for cache in caches)
    room = caches[1].as_softmax(64) - caches[1].after(64)
    assert CacheBudget(states + room, 64).choose([0, 1, 2], caches) == [1]


@pytest.mark.parametrize(
    ("text", "count"),
    [("65536", 65536), ("64MiB", 64 << 20), ("64 MB", 64 * 10**6), ("1.5GB", 15 * 10**8),
     ("2k", 2000), ("1Ki", 1024), ("7 bytes", 7), ("9B", 9), ("0.5KiB", 512)],
)  # fmt: skip
def test_sizes_are_read(text: str, count: int) -> None:
    assert bytes_from_words(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 MiB extra", "0", "0.1B", "1e9", "64MX"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no number of bytes|is less than a byte"):
        bytes_from_words(text)


# rankings -----------------------------------------------------------------------------------------

RANKING = Ranking("damage", "KL", {0: 0.5, 1: 2.0, 2: 1.0}, (1, 2, 0), "ab" * 32, "a text")


def test_a_ranking_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "ranking.json"
    path.write_text(json.dumps({**RANKING.record(), "softmax": [1]}))
    assert read_ranking(path) == RANKING


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "TypeError"),
        ('{"damage": {"0": 1.0}, "softmax": []}', "KeyError: 'criterion'"),
        (json.dumps({**RANKING.record(), "order": [0, 1]}), "have each of them once"),
        (json.dumps({**RANKING.record(), "order": [0, 1, 2, 2]}), "have each of them once"),
        (json.dumps({**RANKING.record(), "damage": {}, "order": []}), "and one at least"),
        (json.dumps({**RANKING.record(), "damage": {"0": "x"}}), "could not convert"),
        (json.dumps({**RANKING.record(), "damage": [1.0]}), "AttributeError"),
        (
            json.dumps({**RANKING.record(), "damage": {"0": 1, "1": 1, "2": math.nan}}),
            "which is not finite",
        ),
    ],
)
def test_what_is_no_ranking_is_refused(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "ranking.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=message) as refused:
        read_ranking(path)
    assert str(path) in str(refused.value)
    assert "give the ranking.json that" in str(refused.value)


def test_a_ranking_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_ranking(tmp_path / "ranking.json")


def test_a_ranking_belongs_to_its_model() -> None:
    RANKING.require(RANKING.model, [0, 2])
    with pytest.raises(ValueError, match=r"another model: of the weights abab.*, and .* has cdcd"):
        RANKING.require("cd" * 32, [0])
    with pytest.raises(ValueError, match=r"has no layers \[3, 5\]"):
        RANKING.require("ab" * 32, [0, 3, 5])
