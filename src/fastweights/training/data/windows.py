"""Sequences of one length that cover a text, in an order that is a function of seed and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from fastweights.errors import DataError
from fastweights.ranges import SEQUENCE_LENGTH
from fastweights.training.data.tokens import TokenText
from fastweights.training.loop.report import Follow, unfollowed

SHUFFLED = 1 << 22
"""Most sequences of an epoch whose order lies in memory; of more it is computed one by one."""
_ROUNDS = 6


@dataclass(frozen=True)
class Windows:
    """Sequences of `length` tokens; each epoch is a shuffled cover of the corpus with its own
    offset.

    Neighbours share one token, so that every token is a target once in an epoch.

    Attributes:
        tokens: ``[n]``, n ≥ length: an array, or a text that is read by ranges.
        length: Tokens per sequence.
        seed: Seed of order and offsets.

    Raises:
        DataError: If there are fewer tokens than one sequence needs.
        TrainingError: If `length` is below 2.
    """

    tokens: np.ndarray | TokenText
    length: int
    seed: int

    def __post_init__(self) -> None:
        SEQUENCE_LENGTH.require(length=self.length)
        if len(self.tokens) < self.length:
            raise DataError(
                f"the training text has {len(self.tokens)} tokens, fewer than one sequence of"
                f" {self.length}; add text or use a length of at most {len(self.tokens)}"
            )

    @property
    def epoch(self) -> int:
        """Number of sequences in an epoch."""
        return max(1, (len(self.tokens) - self.length + 1) // (self.length - 1))

    def starts(self, first: int, count: int) -> list[int]:
        """Return where sequences `first` … `first + count - 1` of the endless stream begin."""
        return [self._start(index) for index in range(first, first + count)]

    def batch(self, first: int, count: int) -> Tensor:
        """Return sequences `first` … `first + count - 1` of the endless stream, ``[count length]``
        int64."""
        return _stack(self.tokens, self.starts(first, count), self.length)

    def _start(self, index: int) -> int:
        epoch, position = divmod(index, self.epoch)
        stride = self.length - 1
        shifts = min(stride, len(self.tokens) - self.length - (self.epoch - 1) * stride + 1)
        shift, order = self._order(epoch, shifts)
        return shift + stride * int(order[position])

    @cached_property
    def _order(self) -> Callable[[int, int], tuple[int, np.ndarray | _Bijection]]:
        """Of two epochs, as a batch may have sequences of both."""
        return lru_cache(2)(partial(_epoch_order, self.seed, self.epoch))


def sequential_spans(tokens: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of contiguous sequences of at most `length` tokens.

    Neighbours share one token, so that all tokens but the first are targets once.
    """
    for start in range(0, tokens - 1, length - 1):
        yield start, min(start + length, tokens)


def sequential_windows(
    tokens: np.ndarray | TokenText, length: int, count: int, follow: Follow = unfollowed
) -> Iterator[Tensor]:
    """Yield batches ``[≤ count, ≤ length]`` int64 of contiguous sequences, and tell `follow` of
    each.

    All tokens but the first are targets once.
    """
    batches = list(batch_spans(sequential_spans(len(tokens), length), count))
    for spans in follow(batches, "reading the text"):
        (start, stop), *_ = spans
        yield _stack(tokens, [first for first, _ in spans], stop - start)


def batch_spans(spans: Iterator[tuple[int, int]], count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield lists of at most `count` spans of one length."""
    batch = list[tuple[int, int]]()
    for start, stop in spans:
        if batch and (len(batch) == count or stop - start != batch[0][1] - batch[0][0]):
            yield batch
            batch = []
        batch.append((start, stop))
    if batch:
        yield batch


def _stack(tokens: np.ndarray | TokenText, starts: Sequence[int], length: int) -> Tensor:
    return torch.from_numpy(np.stack([tokens[s : s + length] for s in starts]).astype(np.int64))


def _epoch_order(
    seed: int, count: int, epoch: int, shifts: int
) -> tuple[int, np.ndarray | _Bijection]:
    """The shift of an epoch, and the order of its sequences."""
    generator = np.random.default_rng([seed, epoch])
    shift = int(generator.integers(shifts))
    if count <= SHUFFLED:
        return shift, generator.permutation(count).astype(np.uint32)
    return shift, _Bijection(count, tuple(map(int, generator.integers(1 << 63, size=_ROUNDS))))


@dataclass(frozen=True)
class _Bijection:
    """A permutation of 0 … count - 1 that takes no memory: a Feistel network over the next power
    of four, repeated until it lands below `count` (Black and Rogaway, 2002).
    """

    count: int
    keys: tuple[int, ...]

    def __getitem__(self, place: int) -> int:
        while (place := self._scramble(place)) >= self.count:
            pass
        return place

    def _scramble(self, place: int) -> int:
        half = ((self.count - 1).bit_length() + 1) // 2
        mask = (1 << half) - 1
        left, right = place >> half, place & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return left << half | right


def _mix(x: int) -> int:
    """SplitMix64's finaliser, in which every bit depends on all."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31
