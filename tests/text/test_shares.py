"""Which source of a mixture has its turn."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.runs.errors import DataError, TrainingError
from fastweights.text.shares import PERIOD, Shares, name_sources

TENTHS = st.integers(1, 30).map(lambda tenths: tenths / 10)
WEIGHTS = st.lists(TENTHS | st.integers(1, 40), min_size=1, max_size=7)


@given(WEIGHTS)
@settings(max_examples=40, deadline=None)
def test_every_prefix_has_each_share_to_within_one_sequence(weights):
    shares, exact = Shares.of(weights), [Fraction(str(weight)) for weight in weights]
    parts, taken = [weight / sum(exact) for weight in exact], [0] * len(weights)
    for number in range(min(2 * shares.period + 1, 600)):
        source, own = shares.turn(number)
        assert own == taken[source]
        taken[source] += 1
        for count, part in zip(taken, parts, strict=True):
            assert abs(count - part * (number + 1)) < 1


@given(WEIGHTS, st.lists(st.integers(0, 10**15), max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_turn_is_a_function_of_its_number(weights, numbers):
    shares = Shares.of(weights)
    again = Shares.of(weights)
    for number in numbers:
        turn = shares.turn(number)
        periods, rest = divmod(turn.number, shares.counts[turn.source])
        assert periods == number // shares.period
        assert again.turn(number % shares.period) == (turn.source, rest)


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=6))
@settings(deadline=None)
def test_weights_without_a_small_common_denominator_are_rounded(weights):
    try:
        shares = Shares.of(weights)
    except DataError:
        assert min(weights) * PERIOD < sum(weights)
        return
    for count, weight in zip(shares.counts, weights, strict=True):
        assert abs(Fraction(count, shares.period) - Fraction(weight, sum(weights))) < 1 / PERIOD


@pytest.mark.parametrize("weight", [0, -0.5, float("nan"), float("inf")])
def test_weights_are_positive_and_finite(weight):
    with pytest.raises(TrainingError, match=r"weights\[1\]"):
        Shares.of([1.0, weight])


def test_a_source_that_would_never_come_is_refused():
    with pytest.raises(DataError, match=r"weights\[1\] = 1e-09 .* would never come"):
        Shares.of([1.0, 1e-9])


def test_sources_are_named_after_files_and_folders():
    sources = ("web/*.jsonl.zst", "books/", "a/code.parquet", "hub:allenai/c4", "old/books", "*")
    assert name_sources(sources) == ("web", "books", "code", "c4", "books-2", "text")
