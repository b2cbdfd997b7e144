"""Counts of tiles."""

from __future__ import annotations


def ceiling(length: int, size: int) -> int:
    """How many tiles of this size cover a length."""
    return -(-length // size)


def next_power(length: int) -> int:
    """The smallest power of two that is not below a length ≥ 1."""
    return 1 << (length - 1).bit_length()
