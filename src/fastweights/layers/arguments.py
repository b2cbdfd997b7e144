"""Checks of arguments, with errors that name the values there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fastweights.recurrence.base import ShapeError

T = TypeVar("T")


def head_width(name: str, width: int, count: int) -> int:
    """Divide `width` channels among `count` heads.

    Args:
        name: What the width is called in the error.
        width: Channels.
        count: Heads.

    Raises:
        ShapeError: The heads do not divide the channels; the message lists the counts that do.
    """
    if count < 1 or width % count:
        divisors = [str(n) for n in range(1, width + 1) if width % n == 0]
        raise ShapeError(
            f"{name} = {width} is not divisible by heads = {count}; use {', '.join(divisors)}"
        )
    return width // count


def choose(argument: str, name: str, among: Mapping[str, T]) -> T:
    """Look `name` up.

    Args:
        argument: What the argument is called in the error.
        name: The name to look up.
        among: What there is, by name.

    Raises:
        ValueError: There is no such name; the message lists those that there are.
    """
    if name not in among:
        raise ValueError(f"{argument} = {name!r}; use {', '.join(sorted(among))}")
    return among[name]


def require_fraction(argument: str, value: float) -> float:
    """Return `value`, or raise ValueError unless it lies in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{argument} = {value}; it must lie in [0, 1)")
    return value
