"""Tensors as kernels read them, where they write the next state, and counts of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of streams that kernels read; they accumulate in float32."""


class Strided(NamedTuple):
    """A stream ``[b t h ·]`` whose last axis lies side by side in memory.

    A kernel takes it as one argument: `data` is its pointer there, the rest are numbers of
    elements, 0 along an axis that is shared.
    """

    data: Tensor
    batch: int
    time: int
    head: int

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """``[b t h ·]`` as it lies in memory."""
        return cls(x, x.stride(0), x.stride(1), x.stride(2))

    @classmethod
    def or_none(cls, x: Tensor | None) -> Strided | None:
        """None where there is no stream: kernels are compiled without it."""
        return None if x is None else cls.of(x)


def strided(*streams: Tensor | None) -> list[Strided | None]:
    """Each as a kernel takes it."""
    return [Strided.or_none(x) for x in streams]


def side_by_side(x: Tensor) -> Tensor:
    """`x` with the last axis side by side in memory, as it is wherever it already lies so."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


_in_place: ContextVar[bool] = ContextVar("in_place", default=False)


@contextmanager
def in_place() -> Iterator[None]:
    """Inside the block the kernels of one token write the new state where the old one was, and
    return the tensors that they were given.

    The caller promises that nobody else holds these states. Kernels of torch make new ones all the
    same.
    """
    token = _in_place.set(True)
    try:
        yield
    finally:
        _in_place.reset(token)


def place_of_next(state: Tensor) -> Tensor:
    """Room for the state after a token: new, or inside `in_place` that of the `state` before it."""
    if _in_place.get() and state.is_contiguous():
        return state
    return torch.empty_like(state, memory_format=torch.contiguous_format)


def ceiling(length: int, size: int) -> int:
    """How many tiles of this size cover a length."""
    return -(-length // size)


def next_power(length: int) -> int:
    """The smallest power of two that is not below a length ≥ 1."""
    return 1 << (length - 1).bit_length()
