"""Exact tests of how far one sample lies above another: by pairs, by ranks, or by signs.

Nothing is assumed of the values' distribution, since they jump between a plateau and the solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement, product
from math import comb, inf
from statistics import median

from fastweights.lab.reproduce.measures import Sample

SIGNIFICANCE = 0.05
"""The chance, on either side, of a verdict that is not true."""


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

    @property
    def visible(self) -> float:
        """The smallest difference that values as scattered as these would have shown."""
        return max(self.high - self.middle, self.middle - self.low)


@dataclass(frozen=True)
class ExactTest:
    """The test of a difference by how many elementary differences exceed a bound.

    Attributes:
        differences: The elementary differences, ascending: their median is the estimate of Hodges
            and Lehmann.
        law: In how many of equally likely cases 0, 1, … elementary differences are positive where
            there is no difference; empty for a difference of exact numbers.
    """

    differences: tuple[float, ...]
    law: tuple[int, ...]

    @property
    def interval(self) -> Interval:
        """The values that the difference may have."""
        middle = median(self.differences)
        if not self.law:
            return Interval(middle, middle, middle)
        depth = self._depth()
        if depth == 0:
            return Interval(-inf, middle, inf)
        return Interval(self.differences[depth - 1], middle, self.differences[-depth])

    def doubt_above(self, bound: float) -> float:
        """Return the chance of so many elementary differences above `bound` if it is not
        exceeded."""
        return self._doubt(sum(x > bound for x in self.differences))

    def doubt_below(self, bound: float) -> float:
        """Return the chance of so many elementary differences below `bound` if it is exceeded."""
        return self._doubt(sum(x < bound for x in self.differences))

    def _doubt(self, count: int) -> float:
        if not self.law:
            return 0.0 if count else 1.0
        return sum(self.law[count:]) / sum(self.law)

    def _depth(self) -> int:
        """How many of the smallest counts have together no more than `SIGNIFICANCE`."""
        depth, allowed = 0, SIGNIFICANCE * sum(self.law)
        while sum(self.law[: depth + 1]) <= allowed:
            depth += 1
        return depth


def exact_test(a: Sample, b: Sample, significance: float = SIGNIFICANCE) -> ExactTest:
    """Return the test of how far `a` lies above `b`.

    Values of the same seed are compared with each other, by Wilcoxon's signed ranks, where there
    are enough of them for a doubt of `significance`; otherwise all values of one sample with all of
    the other, by Mann and Whitney's ranks, which errs on the side of doubt if seeds have something
    in common. A sample and an exact number are compared by the signs of its differences.
    """
    if a.exact or b.exact:
        differences = tuple(sorted(x - y for x, y in product(a.values, b.values)))
        law = () if a.exact and b.exact else _signs(len(differences))
        return ExactTest(differences, law)
    pairs = a.paired_differences(b)
    if 2.0 ** -len(pairs) <= significance:
        means = ((x + y) / 2 for x, y in combinations_with_replacement(pairs, 2))
        return ExactTest(tuple(sorted(means)), _signed_ranks(len(pairs)))
    differences = tuple(sorted(x - y for x, y in product(a.values, b.values)))
    return ExactTest(differences, _ranks(len(a.values), len(b.values)))


def correct_for_parts(doubts: Sequence[float]) -> list[float]:
    """Return doubts of several parts such that any of them is undercut by chance no more often than
    it says (Holm, 1979)."""
    order = sorted(range(len(doubts)), key=doubts.__getitem__)
    corrected, largest = [0.0] * len(doubts), 0.0
    for rank, part in enumerate(order):
        largest = max(largest, min(1.0, (len(doubts) - rank) * doubts[part]))
        corrected[part] = largest
    return corrected


def _signs(n: int) -> tuple[int, ...]:
    """In how many of 2ⁿ equally likely cases 0 … n differences are positive."""
    return tuple(comb(n, k) for k in range(n + 1))


@lru_cache
def _signed_ranks(n: int) -> tuple[int, ...]:
    """In how many of 2ⁿ equally likely cases 0 … n (n + 1) / 2 means of two differences are
    positive: as many as the positive differences' ranks have together."""
    if n == 0:
        return (1,)
    without = _signed_ranks(n - 1)
    counts = [*without, *(0 for _ in range(n))]
    for total, ways in enumerate(without):
        counts[total + n] += ways
    return tuple(counts)


@lru_cache
def _ranks(m: int, n: int) -> tuple[int, ...]:
    """In how many orders of m + n values 0 … m n pairs have the one of the first sample above."""
    if m == 0 or n == 0:
        return (1,)
    first, second = _ranks(m - 1, n), _ranks(m, n - 1)
    counts = [0] * (m * n + 1)
    for u, ways in enumerate(first):
        counts[u + n] += ways
    for u, ways in enumerate(second):
        counts[u] += ways
    return tuple(counts)
