"""The measured numbers of an experiment, and confidence intervals of differences between
samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import comb, inf
from statistics import median
from typing import Self

SIGNIFICANCE = 0.05
"""The chance, on either side, that an interval misses the difference."""

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
    """The values of a quantity over seeds, or one `exact` value."""

    values: tuple[float, ...]
    exact: bool

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a difference, with a doubt of `SIGNIFICANCE` on either side.

    Attributes:
        low: Lower end; -∞ if it is not bounded.
        middle: The estimate.
        high: Upper end; ∞ if it is not bounded.
    """

    low: float
    middle: float
    high: float


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
            Sample(tuple(row.value for row in rows), all(row.seed is None for row in rows))
            if rows
            else None
        )


def hodges_lehmann(a: Sample, b: Sample) -> Interval:
    """Estimate how far `a` lies above `b`, with a confidence interval.

    The estimate is Hodges and Lehmann's, the interval that of the rank test: Mann and Whitney's
    between two samples, the sign test between a sample and an exact number. Nothing is assumed of
    the values' distribution, since they jump between a plateau and the solution.
    """
    differences = sorted(x - y for x, y in product(a.values, b.values))
    middle = median(differences)
    if a.exact and b.exact:
        return Interval(differences[0], middle, differences[-1])
    sizes = [len(sample.values) for sample in (a, b) if not sample.exact]
    depth = _depth(_signs(sizes[0]) if len(sizes) == 1 else _ranks(*sizes))
    if depth == 0:
        return Interval(-inf, middle, inf)
    return Interval(differences[depth - 1], middle, differences[-depth])


def _depth(counts: Sequence[int]) -> int:
    """How many of the smallest values of a statistic have together no more than `SIGNIFICANCE` of
    its null law.
    """
    depth, allowed = 0, SIGNIFICANCE * sum(counts)
    while sum(counts[: depth + 1]) <= allowed:
        depth += 1
    return depth


def _signs(n: int) -> list[int]:
    """In how many of 2ⁿ equally likely cases 0 … n differences are positive."""
    return [comb(n, k) for k in range(n + 1)]


@lru_cache
def _ranks(m: int, n: int) -> list[int]:
    """In how many orders of m + n values 0 … m n pairs have the one of the first sample above."""
    if m == 0 or n == 0:
        return [1]
    first, second = _ranks(m - 1, n), _ranks(m, n - 1)
    counts = [0] * (m * n + 1)
    for u, ways in enumerate(first):
        counts[u + n] += ways
    for u, ways in enumerate(second):
        counts[u] += ways
    return counts
