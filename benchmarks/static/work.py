"""The work of launches, in numbers that a GPU's rates divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Counts(NamedTuple):
    """The work of one launch.

    Attributes:
        loaded: bytes of the sectors that each program reads, as if it shared no cache with others,
            and its own held what it has read last
        stored: bytes that are written
        touched: bytes of all sectors that were read, and of those that were written, once each
        half_products, tf32_products: floating-point operations of matrix products of 16-bit
            numbers, and of float32 ones, in which each product counts three times
        special: results of special-function units
    """

    loaded: float
    stored: float
    touched: float
    half_products: float
    tf32_products: float
    special: float


class CountedLaunch(NamedTuple):
    """A launch by its kernel's name, its grid, and its work.

    Attributes:
        passed: how often all programs passed each loop, by its line, and ended early, as of
            `fastweights.lab.bench.disassembly.Code.issued`
    """

    name: str
    grid: tuple[int, ...]
    counts: Counts
    passed: Mapping[str, float]


class Work(NamedTuple):
    """Of a problem's launches, in order; phases as of `fastweights.lab.bench.problems.Program`."""

    forward: list[CountedLaunch]
    backward: list[CountedLaunch]
