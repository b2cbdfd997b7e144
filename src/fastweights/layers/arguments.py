"""Checks of arguments, with errors that name the values there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fastweights.recurrence.base import ShapeError

T = TypeVar("T")


def head_width(name: str, width: int, count: int) -> int:
    """width / count, or an error that lists the counts which divide it."""
    if count < 1 or width % count:
        divisors = [str(n) for n in range(1, width + 1) if width % n == 0]
        raise ShapeError(
            f"{name} = {width} is not divisible by heads = {count}; use {', '.join(divisors)}"
        )
    return width // count


def choose(argument: str, name: str, among: Mapping[str, T]) -> T:
    """What `name` means, or an error that lists the names there are."""
    if name not in among:
        raise ValueError(f"{argument} = {name!r}; use {', '.join(sorted(among))}")
    return among[name]


def require_fraction(argument: str, value: float) -> float:
    """`value`, or an error unless it lies in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{argument} = {value}; it must lie in [0, 1)")
    return value
