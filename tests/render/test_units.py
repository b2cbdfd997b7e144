"""Quantities in words."""

from __future__ import annotations

import pytest

from fastweights.render.units import bytes_in_words, layers_by_reason, layers_in_words, significant


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (25_280_000_000, "25.28 GB"),
        (3e18, "3,000 PB"),
    ],
)
def test_bytes_have_units(count, words):
    assert bytes_in_words(count) == words


@pytest.mark.parametrize(
    ("number", "written"),
    [(12_345.6, "12,350"), (0.33284, "0.3328"), (2.0, "2"), (3e11, f"{300_000_000_000:,}")],
)
def test_numbers_have_digits_and_no_exponents(number, written):
    assert significant(number, 4) == written


def test_layers_in_a_row_are_a_range() -> None:
    assert layers_in_words([5]) == "layer 5"
    assert layers_in_words(range(30)) == "layers 0–29"
    assert layers_in_words([7, 6, 0, 1, 2, 12]) == "layers 0–2, 6, 7, 12"
    assert layers_by_reason([(0, "a"), (2, "b"), (1, "a")]) == ["layers 0, 1: a", "layer 2: b"]
