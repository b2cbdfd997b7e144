"""RegBench: automata, their words, the oracle that knows them and the n-grams that do not."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from distributions import assert_frequencies, rng
from fastweights.lab.tasks.regbench import BAR, DEAD, DFA, LETTERS, PAD, RegBench, Words
from fastweights.models.loss import IGNORE_INDEX


def language(dfa: DFA, letters: range, longest: int) -> set[tuple[int, ...]]:
    return {
        word for n in range(longest + 1) for word in product(letters, repeat=n) if dfa.accepts(word)
    }


def random_dfa(generator: np.random.Generator, states: int, letters: int) -> DFA:
    return DFA(
        tuple(
            tuple(
                (a, int(generator.integers(states)))
                for a in range(letters)
                if generator.random() < 0.6
            )
            for _ in range(states)
        )
    )


@pytest.mark.parametrize("seed", range(30))
def test_minimal_automaton_has_the_same_language_and_no_state_too_many(seed: int) -> None:
    generator = rng(seed)
    dfa = random_dfa(generator, int(generator.integers(1, 7)), 2)
    small = dfa.minimal()
    words = language(dfa, range(2), 9)
    assert language(small, range(2), 9) == words
    assert len(small.edges) <= len(dfa.edges)
    for first, second in combinations(range(len(small.edges)), 2):
        a, b = (language(started(small, state), range(2), 7) for state in (first, second))
        assert a != b, f"states {first} and {second} of {small}"


def started(dfa: DFA, state: int) -> DFA:
    """The automaton that starts in `state`: it and state 0 exchange their numbers."""
    new = {0: state, state: 0}
    old = [new.get(other, other) for other in range(len(dfa.edges))]
    return DFA(
        tuple(tuple((letter, new.get(s, s)) for letter, s in dfa.edges[other]) for other in old)
    )


def test_equal_languages_have_equal_minimal_automata() -> None:
    split = DFA((((0, 1), (1, 2)), ((0, 0),), ((0, 0),), ((1, 3),)))
    merged = DFA((((1, 1), (0, 1)), ((0, 0),)))
    assert split.minimal() == merged.minimal()
    assert hash(split.minimal()) == hash(merged.minimal())
    assert len(split.minimal().edges) == 2
    renumbered = DFA((((0, 2), (1, 1)), ((0, 0),), ((0, 0),)))
    assert renumbered.minimal() == split.minimal()


@pytest.fixture(scope="module")
def words() -> Words:
    return RegBench().draw(rng(), 400)


def test_law_of_languages() -> None:
    """Sizes and out-degrees as the reference's: uniform over 4 … 12 and over 1, 2, 3."""
    follow = RegBench().languages(rng(), 4_000).follow
    degree = (follow != DEAD).sum(2)
    assert_frequencies(
        np.bincount(degree[degree > 0], minlength=4)[1:], np.full(3, 1 / 3), "out-degrees"
    )
    assert_frequencies(
        np.bincount((degree > 0).sum(1), minlength=13)[4:], np.full(9, 1 / 9), "states"
    )
    for row, automaton in enumerate(follow[:50]):
        for state in range(12):
            after = automaton[state][automaton[state] != DEAD]
            assert len(set(after)) == len(after), f"language {row}"
            assert state not in after
            assert (degree[row, after] > 0).all()
    small = [len(RegBench().languages(rng(1), 100)[row].minimal().edges) for row in range(100)]
    assert min(small) >= 2
    assert max(small) <= 12


def test_law_of_sequences(words: Words) -> None:
    """Mean and extremes of the length as measured on the reference."""
    lengths = (words.inputs != PAD).sum(1) + 1
    assert lengths.double().mean().item() == pytest.approx(373, abs=15)
    assert 130 <= int(lengths.min()) < 230
    assert 520 < int(lengths.max()) <= RegBench().length + 1
    count = (words.inputs == BAR).sum(1) + 1
    assert_frequencies(np.bincount(count.numpy(), minlength=20)[10:], np.full(10, 0.1), "words")


def test_words_belong_to_their_language() -> None:
    task = RegBench(words=(3, 6), letters=(1, 8))
    batch, languages = task.draw(rng(5), 20), task.languages(rng(5), 20)
    for row in range(20):
        text = [*batch.inputs[row].tolist(), 0]
        real = text[: text.index(0)] if 0 in text else text
        for word in "".join(chr(96 + token) if token < BAR else "|" for token in real).split("|"):
            assert languages[row].accepts([ord(letter) - 97 for letter in word])


def test_oracle_and_labels(words: Words) -> None:
    task = RegBench()
    after = words.inputs[:, 1:]
    wanted = after.masked_fill((after == PAD) | (after == BAR), IGNORE_INDEX)
    real = (after != PAD) | (words.labels[:, :-1] == IGNORE_INDEX)
    assert torch.equal(words.labels[:, :-1][real], wanted[real])
    score = task.score(words.oracle.log(), words)
    assert score.accuracy == 1
    assert score.loss == pytest.approx(
        float(words.oracle.gather(1, words.targets[:, None]).log().mean().neg()), rel=1e-6
    )
    chance = task.score(
        torch.randn(len(words.targets), 20, generator=torch.Generator().manual_seed(0)), words
    )
    assert 0.05 < chance.accuracy < 0.2
    assert not words.allowed[..., [PAD, BAR]].any()


def test_the_longer_the_context_the_better_the_guess(words: Words) -> None:
    found = RegBench().guesses(words, words)
    right = [
        words.allowed[words.labels != IGNORE_INDEX].gather(1, guess[:, None]).double().mean()
        for guess in (found[f"{order}-grams of the sequence"] for order in (1, 2))
    ]
    assert 0.6 < right[0] < right[1] < 1


def test_score_counts_words_that_go_on(words: Words) -> None:
    only_a = F.one_hot(torch.ones(len(words.targets), dtype=torch.long), 20).float()
    expected = words.allowed[words.labels != IGNORE_INDEX][:, 1].double().mean().item()
    assert RegBench().score(only_a, words).accuracy == pytest.approx(expected)
    assert LETTERS == 18
