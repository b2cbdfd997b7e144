"""Quantities in words."""

from __future__ import annotations

import pytest

from fastweights.render.units import bytes_in_words


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
