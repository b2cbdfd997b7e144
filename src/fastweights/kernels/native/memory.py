"""Memory for large results: pages that are handed out again.

The system clears every page it hands out, which takes longer than a kernel takes to fill it: so a
training step writes its gradients to the pages of the step before, and decoding a new state to
those of the one before that. Pages in use and idle together are never more than were lately in use
at once, and the system may take idle ones back whenever memory is short.
"""

from __future__ import annotations

import math
import mmap
import sys
from weakref import ref

import torch
from torch import Tensor

LARGE = 1 << 21
"""Bytes from which on memory comes from here; below, the allocator of the system keeps what it was
given back.
"""
PERIOD = 1 << 12
"""Buffers lent between two looks at how many pages are needed: more than a training step takes."""


class _Lease(ref[memoryview]):
    """A buffer in use. Tensors hold on to it; it dies with the last."""

    __slots__ = ("pages",)
    pages: mmap.mmap


class PagePool:
    """Buffers of large pages, in use and idle."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._idle: dict[int, list[mmap.mmap]] = {}
        self._lent = 0
        self._most = self._most_before = 0

    def lend(self, size: int) -> memoryview:
        """A buffer of `size` bytes, with anything in it."""
        try:
            pages = self._idle[size].pop()
        except (KeyError, IndexError):
            self._make_room(size)
            pages = _new(size)
        buffer = memoryview(pages)
        lease = _Lease(buffer, self._take_back)
        lease.pages = pages
        self._leases[id(lease)] = lease
        self._count()
        return buffer

    def _count(self) -> None:
        """Remember the most that was in use in this period and the one before."""
        self._most, self._lent = max(self._most, self.in_use), self._lent + 1
        if self._lent % PERIOD == 0:
            self._most, self._most_before = self.in_use, self._most
            self._make_room(0)

    def _take_back(self, lease: _Lease) -> None:
        del self._leases[id(lease)]
        if not pooling.enabled:
            return
        _offer(lease.pages)
        self._idle.setdefault(len(lease.pages), []).append(lease.pages)

    def _make_room(self, size: int) -> None:
        """Drop idle buffers, the sizes unused for longest first, until `size` bytes fit."""
        room = max(self._most, self._most_before) - self.in_use - size
        while (idle := self.idle) and idle > room:
            self._drop()

    def drop_idle(self) -> None:
        """Give all idle buffers back to the system."""
        self._idle.clear()

    def _drop(self) -> None:
        for size in [size for size, spare in self._idle.items() if not spare]:
            del self._idle[size]
        next(iter(self._idle.values())).pop()

    @property
    def in_use(self) -> int:
        """Bytes that tensors hold."""
        return sum(len(lease.pages) for lease in list(self._leases.values()))

    @property
    def idle(self) -> int:
        """Bytes kept for the next to come."""
        return sum(size * len(spare) for size, spare in list(self._idle.items()))


def _new(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _offer(pages: mmap.mmap) -> None:
    """Let the system have them if it runs short; until then they stay as they are."""
    if sys.platform == "linux":
        pages.madvise(mmap.MADV_FREE)


PAGES = PagePool()


class pooling:  # noqa: N801, used as a function, as torch.set_grad_enabled is
    """Whether large results are written to pages that are used again, from now on.

    As a context manager it says so inside the block alone. The choice is the process's. Numbers do
    not depend on it: without the pool every result has memory of torch's allocator, and idle pages
    go back to the system at once.

    Args:
        enabled: False switches the pool off
    """

    enabled = True

    def __init__(self, enabled: bool) -> None:
        self._before = pooling.enabled
        self._switch(enabled)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._switch(self._before)

    @staticmethod
    def _switch(enabled: bool) -> None:
        pooling.enabled = enabled
        if not enabled:
            PAGES.drop_idle()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with anything in it"""
    size = dtype.itemsize * math.prod(shape)
    if size < LARGE or not pooling.enabled:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(PAGES.lend(size), dtype=dtype).view(shape)
