"""Windows of key heads' own: found by what softmax loses, at the bytes of one window for all."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from transformers import AutoModelForCausalLM

from conversions import conversion
from families import LAYERS, VOCABULARY, logits, padded, student, teacher
from fastweights.linearize import (
    LinearAttentionConfig,
    branches,
    linearize,
    place_landmarks,
    share_windows,
)
from fastweights.linearize.convert.attention import attend_all
from fastweights.linearize.convert.cache import cache_bytes
from fastweights.linearize.convert.landmarks import read_keys
from fastweights.linearize.convert.window_budget import (
    HeadSizes,
    _MeasureSizes,
    divide,
    head_bytes,
    set_sizes,
    share_state,
)
from fastweights.linearize.distill import student as student_module
from fastweights.linearize.distill.pipeline import run_conversion
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.methods import Auto, Chunkwise, Parallel, Recurrent, evaluate
from fastweights.recurrence import Decay, HeadGroups, NoFiniteFormError, ShapeError, Softmax
from killable_runs import Heard
from tolerances import SAME, error

ANALOG = LinearAttentionConfig("landmarks", 4, window=4, sinks=1, windows_by_head=True)
IDS = torch.randint(3, VOCABULARY, (2, 40), generator=Generator().manual_seed(3))
METHODS = Recurrent(), Chunkwise(3), Parallel(), Auto()


def placed():
    model = linearize(teacher(), ANALOG)
    place_landmarks(model, [{"input_ids": IDS}])
    return model


def test_the_best_of_few_choices_is_found() -> None:
    """Errors that fall ever slower per token, as they do, are divided as well as can be."""
    windows, g = (1, 2, 4, 8), Generator().manual_seed(0)
    for budget in (4, 9, 13, 32, 40):
        scale = torch.rand(4, generator=g)
        errors = [[float(s / window) for window in windows] for s in scale]
        chosen = [windows[place] for place in divide(errors, windows, budget)]
        assert sum(chosen) <= budget
        found = sum(row[windows.index(w)] for row, w in zip(errors, chosen, strict=True))
        costs = {
            tuple(w): sum(row[windows.index(x)] for row, x in zip(errors, w, strict=True))
            for w in product(windows, repeat=4)
        }
        # greedy steps are best for the budget that they use up
        assert found <= min(c for w, c in costs.items() if sum(w) <= sum(chosen)) + 1e-6


def test_what_no_error_asks_for_goes_to_the_shortest() -> None:
    assert divide([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]], (2, 4), 10) == [1, 1, 0]
    assert divide([[3.0, 1.0, 2.0, 0.0]], (10, 20, 21, 40), 25) == [1]  # no error rises


def measured(model: Any, window: int) -> _MeasureSizes:
    mode = _MeasureSizes([(window, 4)], {4: branches(model)})
    attend_all(model, {"input_ids": IDS}, mode)
    return mode


def test_heads_lose_less_at_the_same_bytes() -> None:
    model = placed()
    mode = measured(model, ANALOG.window)
    uniform = sum(float(found.sum()) for found in mode.errors.values())
    windows = share_windows(model, [{"input_ids": IDS}])
    assert sum(map(sum, windows.values())) <= LAYERS * 2 * ANALOG.window
    assert len({w for row in windows.values() for w in row}) > 1
    found = 0.0
    for layer, row in windows.items():
        for head, window in enumerate(row):
            own = measured(placed(), window)
            found += float(own.errors[layer][0, head])
    assert found < uniform


def test_each_head_is_that_of_a_model_with_its_window() -> None:
    model, windows = placed(), dict.fromkeys(range(LAYERS), (2, 9))
    inputs = padded(t=24)
    q, k, v = (torch.randn(2, 24, h, 8, generator=Generator().manual_seed(h)) for h in (4, 2, 2))
    want = []
    for window in (2, 9):
        set_sizes(other := placed(), HeadSizes(dict.fromkeys(windows, (window, window))))
        want.append(branches(other)[1](q, k, v, None, None, None))
    before = logits(model, inputs)
    set_sizes(model, HeadSizes(windows))
    found = branches(model)[1](q, k, v, None, None, None)
    assert error(found[:, :, :2], want[0][:, :, :2]) < SAME
    assert error(found[:, :, 2:], want[1][:, :, 2:]) < SAME
    set_sizes(same := placed(), HeadSizes(dict.fromkeys(windows, (4, 4))))
    assert torch.equal(logits(same, inputs), before)


def shared() -> tuple[Any, HeadSizes, int]:
    """A model whose heads have windows and landmarks of their own, and the bytes for them."""
    model, texts = linearize(teacher(), ANALOG), [{"input_ids": IDS}]
    attention = branches(model)[0].attention
    size = LAYERS * 2 * head_bytes(attention, 16, 3, model.dtype.itemsize)
    return model, share_state(model, texts, read_keys(model, texts), size, columns=(1, 2, 4)), size


def test_windows_and_landmarks_share_one_budget_of_bytes() -> None:
    model, sizes, size = shared()
    taken, counts = 0, set[int]()
    for layer, branch in branches(model).items():
        own = list(zip(sizes.windows[layer], sizes.columns[layer], strict=True))
        taken += sum(head_bytes(branch.attention, *one, model.dtype.itemsize) for one in own)
        counts |= {columns for _, columns in own}
        assert branch.config.heads_of(branch.attention) == tuple(own) or len(set(own)) == 1
    assert taken <= size
    assert len(counts) > 1
    with pytest.raises(ValueError, match=r"the smallest .* of 6 key heads take .*allow more"):
        divide([[1.0, 0.0]] * 6, (16, 32), 90)


def test_heads_of_several_sizes_are_saved_and_decode(tmp_path: Path) -> None:
    (model, _, _), inputs = shared(), padded(t=40)
    model.save_pretrained(tmp_path)
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path), inputs["input_ids"][1:]
    assert torch.equal(logits(loaded, inputs), logits(model, inputs))
    with torch.no_grad():
        cache, found = None, list[Tensor]()
        for token in ids.split(1, 1):
            step = loaded(input_ids=token, past_key_values=cache, use_cache=True)
            cache, found = step.past_key_values, [*found, step.logits]
        assert error(torch.cat(found, 1), loaded(input_ids=ids).logits) < SAME


def test_what_has_no_window_to_divide_is_refused() -> None:
    for analog in (LinearAttentionConfig(), LinearAttentionConfig("landmarks", 4, window=0)):
        with pytest.raises(ValueError, match="have landmarks and one window for all heads"):
            share_windows(student(analog=analog), [{"input_ids": IDS}])
    model = placed()
    share_windows(model, [{"input_ids": IDS}])
    with pytest.raises(ValueError, match="share_windows of a LinearizedLlamaForCausalLM"):
        share_windows(model, [{"input_ids": IDS}])
    for windows in ((0, 4), (-1, 8), (5, 9)):
        with pytest.raises(ValueError, match=r"share_windows\(windows="):
            share_windows(placed(), [{"input_ids": IDS}], windows)
    with pytest.raises(ValueError, match="key heads; give each of them one number"):
        student(analog=LinearAttentionConfig("landmarks", 4, window=3, head_windows=((2,),)))


def groups() -> HeadGroups:
    def draw(*sizes: int) -> Tensor:
        return torch.randn(2, 7, *sizes, dtype=torch.float64, generator=Generator().manual_seed(1))

    decay = Decay(draw(2, 3), draw(2, 3), draw(2, 4), -draw(2, 1).abs())
    window = Softmax(draw(1, 5), draw(1, 5), draw(1, 4), window=3)
    return HeadGroups((decay, window), (1, 2, 0))


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_groups_are_what_they_are_alone(method) -> None:
    record = groups()
    alone = [evaluate(group, method=method) for group in record.groups]
    want = torch.cat([o for o, _ in alone], 2)[:, :, [1, 2, 0]]
    o, state = evaluate(record, method=method)
    assert torch.equal(o, want)
    parts = record.states_of(state)
    first, last = evaluate(record[:3], method=method), record[3:]
    assert error(torch.cat([first[0], evaluate(last, first[1], method)[0]], 1), want) < 1e-12
    for part, (_, own) in zip(parts, alone, strict=True):
        for one, other in zip(_tensors(part), _tensors(own), strict=True):
            assert torch.equal(one, other)


def test_their_map_padding_and_documents_are_theirs() -> None:
    record = groups()
    values = [group.streams["v"].expand(2, 7, -1, -1) for group in record.groups]
    v = torch.cat(values, 2)[:, :, [1, 2, 0]]
    o = torch.einsum("bhts,bshv->bthv", record.attention_map(), v)
    assert error(o, evaluate(record)[0]) < 1e-12
    keep, ids = torch.ones(2, 7, dtype=torch.bool), torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    keep[0, 2] = False
    changed = record.keep(keep).segments(ids)
    for found, group in zip(changed.groups, record.groups, strict=True):
        own = group.keep(keep).segments(ids)
        assert torch.equal(evaluate(found)[0], evaluate(own)[0])


def test_groups_that_do_not_fit_are_refused() -> None:
    record = groups()
    with pytest.raises(ShapeError, match="each is named once"):
        HeadGroups(record.groups, (0, 0, 1))
    with pytest.raises(ShapeError, match="the same tokens and values"):
        HeadGroups((record.groups[0], record.groups[1][:2]), (0, 1, 2))
    with pytest.raises(ShapeError, match="tensors in its state"):
        record.adopt(record.groups[0].initial_state())
    with pytest.raises(NoFiniteFormError, match="for each group"):
        record.ltv()


def _tensors(state) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def test_a_run_divides_a_budget_of_bytes(source: Path, tmp_path: Path, monkeypatch) -> None:
    """Windows are divided in no more than it, and are there after a restart."""
    monkeypatch.setattr(student_module, "LANDMARK_TOKENS", 480)
    analog = replace(RECIPES["landmarks"].analog, window=16, feature_dim=4)
    recipe = LinearizationRecipe(analog, ())
    size = 2 * plan(str(source / "model"), recipe, length=24).state
    whole, heard = conversion(source, recipe=recipe, state_budget=size), Heard()
    assert run_conversion(whole, tmp_path / "out", until="convert", reporter=heard)
    assert any(note.startswith("windows of 6 key heads: 16 in ") for note in heard.notes)
    assert run_conversion(whole, tmp_path / "out")
    page = (tmp_path / "out" / "report" / "report.html").read_text(encoding="utf-8")
    assert "<th>windows</th>" in page
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert len({n for row in model.config.linearize["analog"]["head_windows"] for n in row}) > 1
    with torch.no_grad():
        cache = model(input_ids=torch.ones(1, 1100).long(), use_cache=True).past_key_values
    assert cache_bytes(cache) <= size
    with pytest.raises(ValueError, match="a state of 100 bytes per sequence cannot be"):
        run_conversion(replace(whole, state_budget=100), tmp_path / "small")
