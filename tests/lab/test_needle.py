"""Needles in haystacks, and questions that are answered by going on with a text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distributions import assert_frequencies, rng
from fastweights.lab.tasks.needle import HAY, MARK, HiddenNumber, Needle
from fastweights.lab.tasks.questions import RECALL, Question, recall, scrambling
from fastweights.models.loss import IGNORE_INDEX


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("depth", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("answer", [1, 3])
def test_the_needle_answers_the_question(answer: int, depth: float | None, others: int) -> None:
    task = Needle(vocabulary=64, length=100, answer=answer, others=others, depth=depth)
    batch = task.draw(rng(), 50)
    for tokens, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        marks = [i for i, token in enumerate(tokens) if token == MARK]
        assert len(marks) == others + 2
        asked = marks.pop()
        assert asked == 100 - answer - 1
        (found,) = [i for i in marks if tokens[i + 1] == tokens[asked + 1]]
        value = tokens[found + 2 : found + 2 + answer]
        assert labels == [IGNORE_INDEX] * (100 - answer) + value
        assert tokens[asked + 2 :] == value[:-1]
        assert depth is None or abs(found / (100 - answer - 1) - depth) < 0.1


def test_needles_lie_anywhere() -> None:
    task = Needle(length=32)
    place = (task.draw(rng(), 5_000).inputs == MARK).int().argmax(1).numpy() // 3
    assert_frequencies(
        np.bincount(place, minlength=task.places), np.full(task.places, 1 / task.places), "places"
    )


@pytest.mark.parametrize(
    ("sizes", "said"), [({"length": 4}, "at least 5"), ({"depth": 1.5}, "from 0 to 1")]
)
def test_needles_that_do_not_fit(sizes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Needle(**sizes)  # type: ignore[arg-type]


def test_a_hidden_number() -> None:
    hidden = HiddenNumber.draw(rng())
    question = hidden.hide([HAY] * 20, 0.5)
    assert question.text.count(HAY) == 20
    assert question.values == (hidden.number,)
    assert len(hidden.number) == 7
    assert question.text.count(hidden.number) == 1
    assert 0.4 < question.text.index(hidden.number) / len(question.text) < 0.6
    assert f"\nOne of the special magic numbers for {hidden.name} is:" in question.text
    assert question.text.endswith(
        f"? The special magic number for {hidden.name} mentioned in the provided text is"
    )
    assert HiddenNumber.draw(rng()) == hidden


def test_answers() -> None:
    question = Question("The capital of France is", ("Paris", "City of Paris"))
    assert question.has_value_in(" paris, of course")
    assert question.exact(" Paris ")
    assert RECALL.cut(" Paris\nThe capital") == " Paris"
    assert (RECALL.context, RECALL.tokens) == (2000, 48)


def test_files_of_questions(tmp_path: Path) -> None:
    lines = [{"text": "a is b, a is", "value": "b"}, {"text": "c", "value": ["d", "e"]}]
    (tmp_path / "recall.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert recall(tmp_path / "recall.jsonl") == [
        Question("a is b, a is", ("b",)),
        Question("c", ("d", "e")),
    ]
    with pytest.raises(ValueError, match=r"recall.jsonl, line 1, has no context, completion"):
        scrambling(tmp_path / "recall.jsonl")
