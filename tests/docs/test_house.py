"""Figures of structure do not rise: whoever lowers one lowers its ceiling."""

from __future__ import annotations

import pytest

from house import House

CEILINGS = {
    "type_tests": 11,
    "twins": 1,
    "short_files": 32,
    "circles": 0,
}
LONGEST_FUNCTION = 80


@pytest.fixture(scope="module")
def house() -> House:
    return House()


@pytest.mark.parametrize("figure", CEILINGS)
def test_a_figure_stays_below_its_ceiling(house: House, figure: str) -> None:
    found = getattr(house, figure)
    assert len(found) <= CEILINGS[figure], f"{figure}: {found}"


def test_no_function_is_longer_than_the_longest(house: House) -> None:
    length, name = house.functions[0]
    assert length <= LONGEST_FUNCTION, name
