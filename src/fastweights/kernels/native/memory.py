"""Memory for large results: pages that are handed out again.

The system clears every page it hands out, which takes longer than a kernel takes to fill it: so decoding, which
writes a new state per token and drops the old one, writes to the pages of the one before that. No more memory lies
idle than is in use.
"""

from __future__ import annotations

import math
import mmap
import sys
from weakref import ref

import torch
from torch import Tensor

LARGE = 1 << 22
"""Bytes from which on memory comes from here; below, the allocator of the system keeps what it was given back."""


class _Lease(ref[memoryview]):
    """A buffer in use. Tensors hold on to it; it dies with the last."""

    __slots__ = ("pages",)
    pages: mmap.mmap


class Pages:
    """Buffers of large pages, in use and idle."""

    def __init__(self) -> None:
        self._leases: dict[int, _Lease] = {}
        self._idle: dict[int, list[mmap.mmap]] = {}

    def lend(self, size: int) -> memoryview:
        """A buffer of `size` bytes, with anything in it."""
        try:
            pages = self._idle[size].pop()
        except (KeyError, IndexError):
            pages = _new(size)
        buffer = memoryview(pages)
        lease = _Lease(buffer, self._take_back)
        lease.pages = pages
        self._leases[id(lease)] = lease
        return buffer

    def _take_back(self, lease: _Lease) -> None:
        del self._leases[id(lease)]
        size = len(lease.pages)
        self._idle.setdefault(size, []).append(lease.pages)
        in_use = sum(len(other.pages) for other in list(self._leases.values()))
        while self.idle > in_use:
            self._drop()

    def _drop(self) -> None:
        for size in [size for size, spare in self._idle.items() if not spare]:
            del self._idle[size]
        next(iter(self._idle.values())).pop()

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


PAGES = Pages()


def empty(*shape: int) -> Tensor:
    """float32, with anything in it"""
    size = 4 * math.prod(shape)
    if size < LARGE:
        return torch.empty(shape, dtype=torch.float32)
    return torch.frombuffer(PAGES.lend(size), dtype=torch.float32).view(shape)
