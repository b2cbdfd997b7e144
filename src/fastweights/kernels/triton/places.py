"""Where the kernels of one token write the state that they have read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

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
