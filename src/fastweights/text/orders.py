"""Endless orders of sequences: of one text, of a mixture of texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fastweights.text.shares import Shares
from fastweights.text.tokens import TokenText
from fastweights.text.windows import Windows


class Span(NamedTuple):
    """A sequence: tokens `start` … `stop - 1` of a text."""

    text: TokenText
    start: int
    stop: int


class Order(ABC):
    """An endless order of sequences of one length."""

    @property
    @abstractmethod
    def tokens(self) -> int | None:
        """Number of different tokens in it; None as long as that is not known."""

    @abstractmethod
    def span(self, number: int) -> Span:
        """Return where sequence `number` is, a function of this number alone."""


@dataclass(frozen=True, eq=False)
class Shuffled(Order):
    """A text over and over again, each time in another order, as `Windows` has it.

    Attributes:
        text: The text.
        length: Tokens per sequence.
        seed: Seed of the order.
    """

    text: TokenText
    length: int
    seed: int

    @property
    def tokens(self) -> int:
        return len(self.text)

    def span(self, number: int) -> Span:
        [start] = self._windows.starts(number, 1)
        return Span(self.text, start, start + self.length)

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self.text, self.length, self.seed)


@dataclass(frozen=True, eq=False)
class Mixture(Order):
    """Several orders in one; each goes through its own epochs, at its own speed.

    Attributes:
        orders: The orders, of sequences of one length.
        shares: How many of the sequences come from each.
    """

    orders: tuple[Order, ...]
    shares: Shares

    @property
    def tokens(self) -> int | None:
        counts = [order.tokens for order in self.orders]
        return None if None in counts else sum(count for count in counts if count is not None)

    def span(self, number: int) -> Span:
        source, own = self.shares.turn(number)
        return self.orders[source].span(own)
