"""The floors of tasks: what predictors reach that make next to nothing of a sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastweights.lab.reproduce.small import long_range
from fastweights.lab.tasks import MQAR, TASKS, Batch, ListOps, Protocol
from fastweights.lab.tasks.floors import (
    label_seen_most,
    linear_classifier,
    most_frequent_label,
    n_gram_labels,
    n_grams_of_sequence,
)
from fastweights.lab.tasks.listops import FIRST_DIGIT, FIRST_OPERATOR, NAMES

IGNORED = -100


def test_the_most_frequent_label() -> None:
    assert most_frequent_label(torch.tensor([3, 1, 3]), 2).tolist() == [3, 3]


def test_a_label_that_was_seen() -> None:
    tokens = torch.tensor([[7, 5, 6, 6, 0]])
    labels = torch.tensor([[6, IGNORED, IGNORED, 5, 5]])
    assert label_seen_most(torch.tensor([5, 6]), (tokens, labels)).tolist() == [5, 6, 6]


def test_n_grams_of_examples_are_cut_where_they_are_new() -> None:
    train = torch.tensor([[1, 2, 3], [4, 2, 3]]), torch.tensor([[2, 3, 8], [2, 9, 9]])
    test = torch.tensor([[1, 2, 3], [5, 2, 3]]), torch.tensor([[IGNORED, 0, 0], [IGNORED, 0, 0]])
    found = n_gram_labels(train, test, longest=2)
    assert found["1-grams"].tolist()[1::2] == found["2-grams"].tolist()[1::2]
    assert found["2-grams"].tolist()[:1] == [3]
    assert found["2-grams"].tolist()[2:3] == found["1-grams"].tolist()[2:3]


def test_n_grams_of_the_sequence_itself() -> None:
    tokens = torch.tensor([[1, 2, 1, 3, 2, 1]])
    labels = torch.tensor([[0, IGNORED, IGNORED, IGNORED, IGNORED, 0]])
    found = n_grams_of_sequence((tokens, labels), torch.tensor([9, 9]), longest=2)
    assert found["1-grams of the sequence"].tolist() == [9, 2]
    assert found["2-grams of the sequence"].tolist() == [9, 3]


def test_the_first_operator_on_all_digits() -> None:
    task = ListOps(10, 20)
    tokens = [FIRST_OPERATOR + NAMES.index("[MAX"), FIRST_DIGIT + 2, FIRST_DIGIT + 7]
    batch = Batch(torch.tensor([tokens]), torch.tensor([7]))
    assert task.guesses(batch, batch)["the first operator on all digits"].tolist() == [7]


def test_a_linear_classifier_separates_what_is_separable() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    assert (linear_classifier((x, y), x, 2) == y).float().mean() > 0.95


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("protocol", "predictor", "wanted"),
    [
        (TASKS["mqar-small-64x8"], "a label that was seen", 1 / 8),
        (TASKS["parity-small"], "5-grams", 0.5),
        (long_range(1)["ListOps"], "the first operator on all digits", 0.23),
    ],
)
def test_floors_of_protocols(protocol: Protocol, predictor: str, wanted: float) -> None:
    assert protocol.floors()[predictor] == pytest.approx(wanted, abs=0.04)


def test_floors_repeat() -> None:
    assert TASKS["mqar-small-32x4"].floors() == TASKS["mqar-small-32x4"].floors()


def test_guesses_are_of_all_targets() -> None:
    task = MQAR(vocabulary=64, length=32, pairs=4)
    train, test = (task.draw(np.random.default_rng(seed), 5) for seed in (0, 1))
    assert {len(guess) for guess in task.guesses(train, test).values()} == {20}
