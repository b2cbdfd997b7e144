"""Checks of arguments, with errors that name the values there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isqrt
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fastweights.ranges import (
    NON_NEGATIVE_INTEGER,
    NON_NEGATIVE_NUMBER,
    POSITIVE_INTEGER,
    POSITIVE_NUMBER,
    Range,
)
from fastweights.recurrence.base import ShapeError

T = TypeVar("T")
Count = Annotated[int, POSITIVE_INTEGER]
CountOrZero = Annotated[int, NON_NEGATIVE_INTEGER]
Positive = Annotated[float, POSITIVE_NUMBER]
NonNegative = Annotated[float, NON_NEGATIVE_NUMBER]
Share = Annotated[float, Range("above 0 and at most 1", False, lambda x: 0 < x <= 1)]
AtLeastOne = Annotated[float, Range("finite, at least 1", False, lambda x: x >= 1)]


def head_width(name: str, width: int, count: int) -> int:
    """Divide `width` channels among `count` heads.

    Args:
        name: What the width is called in the error.
        width: Channels.
        count: Heads.

    Raises:
        ShapeError: The heads do not divide the channels; the message lists the counts that do.
            Or there are none.
    """
    if width < 1:
        raise ShapeError(f"{name} = {width}; there must be at least one channel: make it larger")
    if count < 1 or width % count:
        raise ShapeError(
            f"{name} = {width} is not divisible by heads = {count}; use"
            f" {', '.join(map(str, _divisors(width)))}"
        )
    return width // count


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


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


_WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "a text",
    NoneType: "None",
}
"""The types of arguments that are checked, and how an error names them."""


def require_annotated(
    owner: str, function: Callable[..., Any], arguments: Mapping[str, object]
) -> None:
    """Check arguments by the annotations of the function that takes them.

    Numbers (`Count` and its like by their ranges), texts, truth values and None are checked; any
    other annotation allows everything.

    Args:
        owner: What the function is called in the error.
        function: What the arguments are for.
        arguments: Values by name.

    Raises:
        ValueError: One is of another type; the message names it, and what it must be.
    """
    for name, hint in _hints(function).items():
        union = get_origin(hint) in (Union, UnionType)
        kinds = get_args(hint) if union else (hint,)
        checked = all(_words(kind) for kind in kinds)
        if checked and name in arguments and not any(_is_a(arguments[name], k) for k in kinds):
            words = ", or ".join(map(_words, kinds))
            raise ValueError(f"{name} = {arguments[name]!r}; for {owner} it must be {words}")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that can be read: names imported for type checkers alone cannot."""
    try:
        return get_type_hints(function, include_extras=True)
    except NameError:
        return {}


def _words(kind: Any) -> str:
    """How an error names a type; nothing for one that is not checked."""
    if get_origin(kind) is not Annotated:
        return _WORDS.get(kind, "")
    base, note = get_args(kind)[:2]
    return note.words if isinstance(note, Range) else _words(base)


def _is_a(value: object, kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        base, note = get_args(kind)[:2]
        return value in note if isinstance(note, Range) else _is_a(value, base)
    if kind in (int, float) and not isinstance(value, bool):
        number = isinstance(value, Integral if kind is int else Real)
        return number and abs(value) < inf  # type: ignore[arg-type]
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
