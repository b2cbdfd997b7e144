"""The measured numbers of an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Self

At = float | str | None
"""Where on a curve a number stands, or in which column of a table."""


@dataclass(frozen=True)
class Measure:
    """One measured number.

    Attributes:
        series: The curve of a figure, or row of a table, that it belongs to.
        value: The number.
        x: Place on the curve, or name of the column; None if there is only one number.
        quantity: What was measured; "" for the experiment's main quantity.
        seed: Seed of the run, or number of the repetition; None for a number that comes out the
            same every time.
    """

    series: str
    value: float
    x: At = None
    quantity: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class Sample:
    """The values of a quantity over seeds, or exact values.

    Attributes:
        values: The values.
        seeds: The seed of each; None for a number that comes out the same every time.
    """

    values: tuple[float, ...]
    seeds: tuple[int | None, ...]

    @classmethod
    def constant(cls, value: float) -> Self:
        """Return the sample of a number that is given."""
        return cls((value,), (None,))

    @property
    def exact(self) -> bool:
        """Whether no seed decides the values."""
        return all(seed is None for seed in self.seeds)

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def paired_differences(self, other: Sample) -> list[float]:
        """Return the differences from the values of `other` with the same seeds."""
        theirs = dict(zip(other.seeds, other.values, strict=True))
        return [
            value - theirs[seed]
            for seed, value in zip(self.seeds, self.values, strict=True)
            if seed is not None and seed in theirs
        ]


class Measures:
    """Measured numbers, grouped by series, quantity and place in the order of their first
    appearance."""

    def __init__(self, rows: Iterable[Measure]) -> None:
        self.rows = list(rows)

    def __iter__(self) -> Iterator[Measure]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, quantity: str) -> Self:
        """Select the measures of one quantity."""
        return type(self)(row for row in self.rows if row.quantity == quantity)

    @property
    def quantities(self) -> list[str]:
        return list(dict.fromkeys(row.quantity for row in self.rows))

    @property
    def series(self) -> list[str]:
        return list(dict.fromkeys(row.series for row in self.rows))

    def places(self, series: str | None = None) -> list[At]:
        """Return the places where `series`, or any series, was measured: numbers ascending, names
        in order."""
        found = dict.fromkeys(row.x for row in self.rows if series in (None, row.series))
        numbers = sorted(x for x in found if isinstance(x, int | float))
        return [*numbers, *(x for x in found if not isinstance(x, int | float))]

    def sample(self, series: str, x: At) -> Sample | None:
        """Return the values measured there; None if there are none."""
        rows = [row for row in self.rows if (row.series, row.x) == (series, x)]
        return (
            Sample(tuple(row.value for row in rows), tuple(row.seed for row in rows))
            if rows
            else None
        )
