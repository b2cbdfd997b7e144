"""The type checker of the tests themselves: what it finds, and that it can be put away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

import beartype_hook
from fastweights.layers import TokenContext
from fastweights.methods import evaluate
from fastweights.mixers import MIXERS
from fastweights.recurrence import Decay

pytestmark = pytest.mark.usefixtures("every_call")
STREAMS = [torch.zeros(1, 3, 2, width) for width in (4, 4, 5)]


@pytest.fixture
def every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of functions that have been called often, too."""
    monkeypatch.setattr(beartype_hook, "EVERY", 1)


def test_streams_of_a_record_have_the_sizes_of_each_other() -> None:
    q, k, v = STREAMS
    Decay(q, k, v, None)
    with pytest.raises(TypeCheckError):
        Decay(q, v, v, None)


def test_tensors_have_the_rank_and_type_that_are_declared() -> None:
    mixer, x = MIXERS["metala"](d=16), torch.zeros(1, 3, 16)
    wrongs: list[Any] = [x[0], x.int(), x.numpy()]
    for wrong in wrongs:
        with pytest.raises(TypeCheckError):
            mixer.project(wrong, TokenContext.start(x))
    with pytest.raises(TypeCheckError):
        mixer(x, keep=torch.ones(1, 3))


def test_sizes_agree_within_a_call_and_not_between_calls() -> None:
    mixer = MIXERS["metala"](d=16)
    for length in (3, 4):
        x = torch.zeros(1, length, 16)
        mixer(x, keep=torch.ones(1, length, dtype=torch.bool))
    with pytest.raises(TypeCheckError):
        mixer(x, keep=torch.ones(1, 3, dtype=torch.bool))


def test_what_is_no_tensor_is_checked_too() -> None:
    with pytest.raises(TypeCheckError):
        evaluate("no record")


@pytest.mark.usefixtures("unchecked")
def test_without_it_the_librarys_own_errors_come_through() -> None:
    with pytest.raises(AttributeError):
        evaluate("no record")
