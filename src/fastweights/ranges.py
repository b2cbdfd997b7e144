"""Ranges of numbers: what a setting may be, and how an error says it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

from fastweights.errors import TrainingError

_LIMIT = 2**63


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be.

    Attributes:
        words: What the number must be; the end of a sentence.
        whole: Whether it must be a whole number.
        holds: Whether a finite number lies in the range.
    """

    words: str
    whole: bool
    holds: Callable[[float], bool]

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Integral if self.whole else Real):
            return False
        return abs(value) < math.inf and self.holds(value)  # type: ignore[operator]

    def require(self, **values: object) -> None:
        """Check numbers, each given under its name.

        Raises:
            TrainingError: If one of them lies outside; the message names it.
        """
        for name, value in values.items():
            if value not in self:
                raise TrainingError(f"{name} = {value!r}; it must be {self.words}")

    def require_all(self, **values: object) -> None:
        """Check several numbers under each name, a list or tuple.

        Raises:
            TrainingError: If a value is no list, or one of its numbers lies outside.
        """
        for name, several in values.items():
            if not isinstance(several, list | tuple):
                raise TrainingError(f"{name} = {several!r}; it must be a list of numbers")
            for value in several:
                self.require(**{name: value})

    def read(self, text: str) -> int | float:
        """Read a number of this range from its digits.

        Raises:
            ValueError: If it is none.
        """
        value = int(text) if self.whole else float(text)
        if value not in self:
            raise ValueError(f"{text} must be {self.words}")
        return value


def divide_batch(batch: int, devices: int, accumulate: int) -> int:
    """Return the number of sequences in each part of a device's share of a batch.

    Raises:
        TrainingError: If the batch cannot be divided evenly.
    """
    if batch % (devices * accumulate):
        raise TrainingError(
            f"batch = {batch} is not divisible by devices · accumulate = {devices * accumulate};"
            " change one of them"
        )
    return batch // (devices * accumulate)


POSITIVE_INTEGER = Range("1 or more, a whole number below 2^63", True, lambda n: 1 <= n < _LIMIT)
NON_NEGATIVE_INTEGER = Range(
    "0 or more, a whole number below 2^63", True, lambda n: 0 <= n < _LIMIT
)
SEQUENCE_LENGTH = Range(
    "2 or more, a whole number below 2^63, since one token predicts the next",
    True,
    lambda n: 2 <= n < _LIMIT,
)
DEPTHS = Range(
    "2 or more, a whole number below 2^63, for the beginning and the end",
    True,
    lambda n: 2 <= n < _LIMIT,
)
POSITIVE_NUMBER = Range("above 0 and finite", False, lambda x: x > 0)
NON_NEGATIVE_NUMBER = Range("0 or more and finite", False, lambda x: x >= 0)
FRACTION = Range("at least 0 and below 1", False, lambda x: 0 <= x < 1)
PROBABILITY = Range("from 0 to 1", False, lambda x: 0 <= x <= 1)
