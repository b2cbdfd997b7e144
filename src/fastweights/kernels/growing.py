"""Caches that grow by a token at a time in the memory that they have, with room behind them.

A state is never altered: what `append` returns begins with the numbers of what it was given, and
may share memory with it, as only the part behind both is written. Of two continuations of one
state, as of beams or of a state that is gone back to, the first takes the room; the other is copied
to memory of its own.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LEAST_ROOM = 64
"""Tokens for which there is room behind a cache of any length."""

SHARE = 4
"""The room is this part of the cache."""


class Room:
    """Memory of which the first part is taken.

    Attributes:
        whole: ``[b g n ·]``
        taken: how many of the n are; what is taken is not written again
    """

    def __init__(self, whole: Tensor, taken: int) -> None:
        self.whole, self.taken, self._lock = whole, taken, Lock()

    def take(self, place: int, count: int) -> bool:
        """Whether `count` more could be taken, from `place` on."""
        with self._lock:
            free = self.taken == place and place + count <= self.whole.shape[2]
            self.taken += count if free else 0
            return free

    @property
    def writable(self) -> bool:
        """Whether torch lets it be written here."""
        return torch.is_inference_mode_enabled() or not self.whole.is_inference()


class CachePart(NamedTuple):
    """The part of a room that a cache is."""

    room: Room
    begin: int
    end: int

    def view(self) -> Tensor:
        """The cache ``[b g s ·]``, whose place is known from then on."""
        seen = self.seen()
        _PLACES[seen] = self
        return seen

    def seen(self) -> Tensor:
        """The cache ``[b g s ·]``, for one who keeps its place; others copy it to go on."""
        return self.room.whole[:, :, self.begin : self.end]

    def without(self, count: int) -> CachePart:
        """The part without the first tokens of the cache."""
        return self._replace(begin=self.begin + count)


_PLACES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Where the caches lie that have room behind them."""


def append(cache: Tensor, new: Tensor) -> Tensor:
    """The cache ``[b g s ·]`` with new tokens ``[b g t ·]`` of its dtype behind it, without a
    gradient.
    """
    count = new.shape[2]
    longer = extend(cache, count)
    # `data`: a graph that keeps what was there before need not mind
    longer.room.whole.data[:, :, longer.end - count : longer.end] = new
    return longer.view()


def extend(cache: Tensor, count: int) -> CachePart:
    """Where the cache ``[b g s ·]`` is with so many tokens behind it, which are yet to be
    written.
    """
    return extend_at(_PLACES.get(cache), cache, count)


def extend_at(place: CachePart | None, cache: Tensor, count: int) -> CachePart:
    """`extend` of a cache whose place is known; None where it has none."""
    if place is None or not place.room.writable or not place.room.take(place.end, count):
        place = _place_with_room(cache, count)
    return CachePart(place.room, place.begin, place.end + count)


def _place_with_room(cache: Tensor, count: int) -> CachePart:
    """A copy of the cache, behind which so many tokens are taken."""
    b, g, s, width = cache.shape
    room = max(LEAST_ROOM, s // SHARE)
    whole = cache.new_empty(b, g, s + count + room, width)
    whole[:, :, :s] = cache
    return CachePart(Room(whole, s + count), 0, s)


def drop_oldest(cache: Tensor, count: int) -> Tensor:
    """The cache ``[b g s ·]`` without its first tokens, in the memory where it is."""
    if count == 0:
        return cache
    if (place := _PLACES.get(cache)) is None:
        return cache[:, :, count:]
    return place.without(count).view()
