"""What is held out to validate: ranges of a text, spread over it and capped."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fastweights.errors import DataError
from fastweights.training.data.holdout import RUNS, hold_out, measure, thin_out
from fastweights.training.data.tokenizers import BPE
from fastweights.training.data.tokens import Sequences
from stored import BYTES

LETTERS = np.frombuffer(b"a text of letters, " * 1000, np.uint8).astype(np.uint16)


def documents(*lengths: int, prompts: bool = False) -> Sequences:
    """Documents of these numbers of tokens; half of every one a prompt, if there are prompts."""
    number = np.repeat(np.arange(len(lengths)), lengths)
    place = np.concatenate([np.arange(length) / length for length in lengths])
    response = place >= 0.5 if prompts else np.ones(len(number), bool)
    return Sequences(np.resize(LETTERS, len(number)), response, number, begins_are_targets=True)


def ranges(text: Sequences, most: int) -> tuple[list[list[int]], list[list[int]]]:
    train, held = hold_out(text, most, BYTES)
    return train.ranges.tolist(), held.ranges.tolist()


def test_of_one_document_the_end_is_held_out():
    assert ranges(documents(1000), 1 << 17) == ([[0, 900]], [[900, 1000]])
    assert ranges(documents(1000), 30) == ([[0, 970]], [[970, 1000]])
    assert ranges(documents(400, 600), 30) == ([[0, 970]], [[970, 1000]])


@pytest.mark.parametrize("most", [1 << 17, 5000, 700])
@pytest.mark.parametrize("count", [41, 60, 1000, 5000])
def test_of_many_documents_whole_ones_are_held_out_from_all_over(count, most):
    generator = np.random.default_rng(0)
    text = documents(*generator.integers(5, 60, count))
    train, held = ranges(text, most)
    budget = min(len(text) - int(0.9 * len(text)), most)
    tokens = sum(last - first for first, last in held)
    assert budget / 2 < tokens <= budget
    begins = {*text.begins(0, len(text)).tolist(), len(text)}
    assert begins.issuperset(place for one in held for place in one)
    together = sorted(train + held)
    assert together[0][0] == 0
    assert together[-1][1] == len(text)
    assert all(one[1] == other[0] for one, other in pairwise(together))
    places = [first / len(text) for first, _ in held]
    assert len(held) <= RUNS
    assert max(np.diff([0, *places, 1])) < 2.5 / len(held)


def test_of_documents_too_long_to_be_held_out_the_end_is():
    text = documents(*[10] * 19, 5000)
    assert ranges(text, 1 << 17)[1] == [[int(0.9 * len(text)), len(text)]]


def test_records_with_prompts_are_not_cut():
    with pytest.raises(DataError, match="fewer than 20 records cannot be split"):
        hold_out(documents(*[10] * 19, prompts=True), 100, BYTES)
    with pytest.raises(DataError, match=r"no record has at most 9 tokens.*files for validation"):
        hold_out(documents(*[10] * 30, prompts=True), 9, BYTES)


def test_no_character_is_cut_in_two():
    raw = ("é" * 500).encode()
    text = Sequences.plain(np.frombuffer(raw, np.uint8).astype(np.uint16))
    for most in range(40, 50):
        train, held = hold_out(text, most, BYTES)
        assert set(BYTES.decode(train[:]) + BYTES.decode(held[:])) == {"é"}


def test_too_short_a_text_cannot_be_split():
    with pytest.raises(DataError, match="1 tokens are too few to split"):
        hold_out(documents(1), 100, BYTES)


def test_parts_are_read_through_their_ranges():
    text = documents(*[7] * 200)
    train, held = hold_out(text, 100, BYTES)
    for part in (train, held):
        places = np.concatenate([np.arange(*one) for one in part.ranges])
        for start, stop in ((0, len(part)), (3, 40), (len(part) - 9, len(part)), (5, 5)):
            assert part[start:stop].tolist() == text.tokens[places[start:stop]].tolist()
            begins = part.read(start, stop).begins
            assert begins.tolist() == (places[start:stop] % 7 == 0).tolist()


def test_a_long_text_is_thinned_out_to_stretches_of_their_own():
    thin = thin_out(documents(1000), 10, 50)
    assert thin.ranges.tolist() == [[n, n + 10] for n in range(0, 1000, 200)]
    assert not thin.begins_are_targets
    assert len(thin_out(documents(1000), 10, 1000)) == 1000


def test_bytes_are_those_of_what_is_predicted():
    """The end-of-text tokens count as tokens, and stand for no bytes."""
    learnt = BPE(300).build(["né à Zürich, né ici " * 50])
    texts = ["né à Zürich", "né ici", "sheep"]
    ids = [np.array(learnt.encode(text)) for text in texts]
    end = np.array([learnt.eos_token_id])
    tokens = np.concatenate([ids[0], end, ids[1], end, ids[2]])
    number = np.repeat([0, 1, 2], [len(ids[0]), len(ids[1]) + 1, len(ids[2]) + 1])
    text = Sequences(tokens, np.ones(len(tokens), bool), number, begins_are_targets=True)
    assert measure(text, learnt) == (len(tokens), sum(len(text.encode()) for text in texts))
    masked = Sequences(tokens, text.response, number, begins_are_targets=False)
    assert measure(masked, learnt)[0] == len(tokens) - 2
