"""What is known of a model on a text is not computed again, and is never that of another state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from families import SOME_FAMILIES, padded, student
from fastweights.linearize.convert.attention import branches
from fastweights.linearize.distill.adapt import prepare_adaptation
from fastweights.linearize.evaluate.known import KnownText
from fastweights.linearize.evaluate.logits import next_logits, read_out, teacher_logits
from fastweights.training.language.adapters import LoRA
from pretrained import disturbed, linear_llama
from tolerances import assert_close

IDS = {"input_ids": torch.arange(3, 27).view(2, 12)}


class Counted:
    """How often a model reads tokens."""

    def __init__(self, model: Any) -> None:
        self.calls = 0
        model.base_model.layers[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("family", SOME_FAMILIES)
@torch.no_grad()
def test_logits_are_made_of_what_is_read(family) -> None:
    model, inputs = student(family), padded()
    assert_close(read_out(model, inputs).next_logits(), next_logits(model, inputs), family)


@torch.no_grad()
def test_a_state_reads_a_text_once() -> None:
    model, known = linear_llama(), KnownText()
    counted, wanted = Counted(model), next_logits(model, IDS)
    softmax = teacher_logits(model, IDS)
    before = counted.calls
    for _ in range(2):
        assert torch.equal(known.student(model, IDS).next_logits(), wanted)
        assert torch.equal(known.softmax(model, IDS).next_logits(), softmax)
    assert counted.calls == before + 2
    known.student(model, {"input_ids": IDS["input_ids"] + 1})
    assert counted.calls == before + 3


@torch.no_grad()
def test_another_state_is_read_anew_and_the_first_again_is_known() -> None:
    model, known = linear_llama(), KnownText()
    wanted, own = known.student(model, IDS).next_logits(), next(iter(branches(model).values()))
    before = own.phi_q.W.clone()
    own.phi_q.W.add_(1)
    assert torch.equal(known.student(model, IDS).next_logits(), next_logits(model, IDS))
    own.phi_q.W.copy_(before)
    counted = Counted(model)
    assert torch.equal(known.student(model, IDS).next_logits(), wanted)
    assert not counted.calls
    model.lm_head.weight.add_(1)
    assert torch.equal(known.student(model, IDS).next_logits(), next_logits(model, IDS))


@torch.no_grad()
def test_new_adapters_change_nothing_and_trained_ones_do() -> None:
    model, known = linear_llama(), KnownText()
    wanted, softmax = known.student(model, IDS).next_logits(), known.softmax(model, IDS)
    wrapped = prepare_adaptation(model, LoRA(rank=2)).eval()
    counted = Counted(model)
    assert torch.equal(known.student(wrapped, IDS).next_logits(), wanted)
    assert not counted.calls
    disturbed(wrapped)
    assert_close(known.student(wrapped, IDS).next_logits(), next_logits(wrapped, IDS), "adapted")
    assert counted.calls
    assert torch.equal(known.softmax(wrapped, IDS).states, softmax.states)


def test_no_more_is_kept_than_there_is_room_for() -> None:
    model, known = linear_llama(), KnownText(0)
    counted = Counted(model)
    known.student(model, IDS), known.student(model, IDS)
    assert counted.calls == 2


def test_distances_are_known_of_all_layers_or_of_none() -> None:
    layers, known = branches(linear_llama()), KnownText()
    found: dict[int, Tensor] = {layer: torch.tensor(0.5) for layer in layers}
    known.keep_distances("kind", layers, IDS, found)
    assert known.distances("kind", layers, IDS) == found
    assert known.distances("another kind", layers, IDS) is None
    with torch.no_grad():
        layers[0].phi_q.W.add_(1)
    assert known.distances("kind", layers, IDS) is None
