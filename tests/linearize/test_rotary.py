"""Rotary positions of any family, found by moving a text, and landmarks without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Generator
from transformers import AutoModelForCausalLM

from families import VOCABULARY, logits, padded, teacher
from fastweights.linearize import (
    LinearAttentionConfig,
    branches,
    linearize,
    place_landmarks,
    share_windows,
    use_mode,
)
from fastweights.linearize.convert.rotary import find_turnings
from pretrained import Recorded
from tolerances import error

IDS = torch.randint(3, VOCABULARY, (1, 40), generator=Generator().manual_seed(3))
ANALOG = LinearAttentionConfig("landmarks", 4, window=4, sinks=2)
HALVES = ("llama", "phi", "gpt_neox", "gemma3_text")
"""Of these, the second and the third turn some channels alone."""
NEIGHBOURS = ("glm", "cohere", "deepseek_v3")
"""Of these, the first turns half of the channels, and the last those at the end."""


def keys_at(model: Any, first: int) -> dict[int, torch.Tensor]:
    mode = Recorded()
    places = first + torch.arange(IDS.shape[1])[None]
    with torch.no_grad(), use_mode(model, mode):
        model(IDS, position_ids=places)
    return {layer: call.k for layer, (call, _) in mode.calls.items()}


@pytest.mark.parametrize("family", [*HALVES, *NEIGHBOURS])
def test_keys_are_what_they_were_at_any_position(family: str) -> None:
    model = linearize(teacher(family), ANALOG)
    turnings, places = find_turnings(model), torch.arange(IDS.shape[1])[None]
    here, there = (keys_at(model, first) for first in (0, 80))
    for layer, turning in turnings.items():
        assert turning.speeds.any()
        assert error(there[layer], here[layer]) > 0.1
        before = (turning.undo(k, places + m) for k, m in ((here[layer], 0), (there[layer], 80)))
        one, other = before
        assert error(other, one) < 1e-4


def test_positions_that_turn_nothing_are_left_alone() -> None:
    for turning in find_turnings(linearize(teacher("gpt2"), ANALOG)).values():
        assert not turning.speeds.any()


def test_keys_of_zeros_are_not_turned() -> None:
    model = linearize(teacher(), ANALOG)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()
    turnings = find_turnings(model)
    assert [bool(turning.speeds.any()) for turning in turnings.values()] == [False, True, True]


def test_landmarks_are_the_same_wherever_they_are_placed() -> None:
    models = [linearize(teacher(), ANALOG) for _ in range(2)]
    for model, first in zip(models, (0, 70), strict=True):
        places = first + torch.arange(IDS.shape[1])[None]
        place_landmarks(model, [{"input_ids": IDS, "position_ids": places}])
    one, other = (branches(model) for model in models)
    for layer in one:
        assert error(other[layer].phi_q.W, one[layer].phi_q.W) < 1e-3
        assert torch.equal(other[layer].phi_q.turning, one[layer].phi_q.turning)


@pytest.mark.parametrize("by_head", [False, True])
def test_positions_may_begin_anywhere(by_head: bool) -> None:
    """A text at other positions, or behind padding that positions count."""
    model = linearize(teacher(), replace(ANALOG, windows_by_head=by_head))
    place_landmarks(model, [{"input_ids": IDS}])
    if by_head:
        assert len(set(share_windows(model, [{"input_ids": IDS}], (2, 4, 8))[0])) > 1
    inputs = padded(pad=6, t=30)
    want, mask = logits(model, inputs), inputs["attention_mask"][..., None]
    with torch.no_grad():
        places = 50 + torch.arange(30)[None]
        assert error(model(**inputs, position_ids=places).logits * mask, want) < 1e-4
        cache, found = None, []
        for t in range(30):
            given = {
                "input_ids": inputs["input_ids"][:, t : t + 1],
                "attention_mask": inputs["attention_mask"][:, : t + 1],
            }
            step = model(**given, past_key_values=cache, use_cache=True)
            cache, found = step.past_key_values, [*found, step.logits]
        assert error(torch.cat(found, 1) * mask, want) < 1e-4


def test_landmarks_that_say_nothing_of_positions_read_keys_as_they_are(tmp_path: Path) -> None:
    model = linearize(teacher(), ANALOG)
    place_landmarks(model, [{"input_ids": IDS}])
    model.save_pretrained(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    stored = {name: x for name, x in load_file(file).items() if not name.endswith("turning")}
    save_file(stored, file, {"format": "pt"})
    loaded = branches(AutoModelForCausalLM.from_pretrained(tmp_path))
    for layer, branch in branches(model).items():
        assert not loaded[layer].phi_k.turning[:, 1].any()
        assert torch.equal(loaded[layer].phi_k.W, branch.phi_k.W)
