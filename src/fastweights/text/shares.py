"""Which source of a mixture a sequence comes from, as a function of the sequence's number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from heapq import heappop, heappush
from pathlib import PurePath
from typing import NamedTuple

from fastweights.runs.errors import DataError
from fastweights.runs.ranges import POSITIVE_NUMBER

PERIOD = 1 << 16
"""Most sequences after which the order of the sources repeats."""
_PATTERN = "*?["


class Turn(NamedTuple):
    """The origin of a sequence of a mixture.

    Attributes:
        source: Number of the source.
        number: Number of the sequence among those of its source.
    """

    source: int
    number: int


@dataclass(frozen=True)
class Shares:
    """How many of every `period` sequences come from each source.

    They take turns as evenly as can be: among the first n sequences, for every n, the number of
    those from a source with a share of s differs from s n by less than 1.

    Attributes:
        counts: Sequences of each source, in a period.
    """

    counts: tuple[int, ...]

    @classmethod
    def of(cls, weights: Sequence[float]) -> Shares:
        """Return the shares that are in proportion to `weights`.

        They are exact if they have a common denominator of at most `PERIOD`, as those of decimal
        weights have; others are rounded to multiples of 1 / `PERIOD`.

        Raises:
            DataError: If a weight is too small beside the others.
            TrainingError: If a weight is not above 0 and finite.
        """
        for number, weight in enumerate(weights):
            POSITIVE_NUMBER.require(**{f"weights[{number}]": weight})
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        period = min(PERIOD, math.lcm(*(share.denominator for share in shares)))
        counts = _apportion(shares, period)
        if 0 in counts:
            least = counts.index(0)
            raise DataError(
                f"weights[{least}] = {weights[least]} is less than one {PERIOD:,}th of all weights,"
                " so that its source would never come; leave the source out, or give it more"
            )
        return cls(counts)

    @property
    def period(self) -> int:
        """Number of sequences after which the order of the sources repeats."""
        return sum(self.counts)

    def turn(self, number: int) -> Turn:
        """Return where sequence `number` of the endless mixture comes from."""
        period, place = divmod(number, self.period)
        source, before = self._turns[place]
        return Turn(source, period * self.counts[source] + before)

    @cached_property
    def _turns(self) -> list[Turn]:
        before, turns = [0] * len(self.counts), list[Turn]()
        for source in _take_turns(self.counts):
            turns.append(Turn(source, before[source]))
            before[source] += 1
        return turns


def name_sources(sources: Sequence[str]) -> tuple[str, ...]:
    """Name each source of a mixture after its file or folder; names that come again are
    numbered."""
    names = list[str]()
    for source in sources:
        name = _name(source)
        same = sum(other == name or other.rpartition("-")[0] == name for other in names)
        names.append(f"{name}-{same + 1}" if same else name)
    return tuple(names)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of a source before what is wrong with it; "" names nothing."""
    try:
        yield
    except DataError as error:
        if not name:
            raise
        raise DataError(f"{name}: {error}") from error


def _name(source: str) -> str:
    parts = PurePath(source.removeprefix("hub:")).parts
    plain = [part for part in parts if not any(letter in part for letter in _PATTERN)]
    return (plain[-1].split(".")[0] if plain else "") or "text"


def _apportion(shares: Sequence[Fraction], period: int) -> tuple[int, ...]:
    """Whole numbers that add up to `period`, by largest remainders."""
    counts = [math.floor(share * period) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * period)
    for source in by_rest[: period - sum(counts)]:
        counts[source] += 1
    return tuple(counts)


def _take_turns(counts: Sequence[int]) -> Iterator[int]:
    """The sources of a period in order, by Tijdeman's solution of the chairman assignment problem
    (Discrete Mathematics 32, 1980): of the sources whose next turn may come, the one whose turn is
    due first.

    With k sources no count ever differs from its share by more than 1 - 1/(2k - 2).
    """
    period, slack = sum(counts), max(1, 2 * len(counts) - 2)
    waiting, ready = list[tuple[int, int, int]](), list[tuple[int, int]]()

    def plan(source: int, before: int) -> None:
        """The first turn at which the source may come again, and the last."""
        wide = slack * counts[source]
        first = -(-period * (1 + slack * before) // wide)
        last = period * (slack - 1 + slack * before) // wide + 1
        heappush(waiting, (first, last, source))

    taken = [0] * len(counts)
    for source in range(len(counts)):
        plan(source, 0)
    for turn in range(1, period + 1):
        while waiting and waiting[0][0] <= turn:
            _, last, source = heappop(waiting)
            heappush(ready, (last, source))
        _, source = heappop(ready)
        yield source
        taken[source] += 1
        plan(source, taken[source])
