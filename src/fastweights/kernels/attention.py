"""Softmax attention by torch's fused kernels."""

from __future__ import annotations

from torch import Tensor

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.composed import only_takes
from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.softmax import Cache, Softmax

SMALLEST_BLOCK = 128


def fused_attention(recurrence: Softmax, state: Cache) -> tuple[Tensor, Cache]:
    """(o, cache), all tokens at once."""
    return recurrence.chunk(state)


def windowed_attention(recurrence: Softmax, state: State) -> tuple[Tensor, State]:
    """(o, cache), block by block: each sees itself and the cache of the window before it."""
    assert recurrence.window is not None
    return chunk_loop(recurrence, state, _block(recurrence.window))


def _block(window: int) -> int:
    """Queries per block: as many as the window has tokens, unless that is too few for a call."""
    return max(window, SMALLEST_BLOCK)


def refuses_window(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, Softmax):
        return f"it is a {type(recurrence).__name__}, not a Softmax"
    if recurrence.window is None:
        return "its queries see all tokens: it has no window"
    block = _block(recurrence.window)
    if len(recurrence) <= 2 * block:
        return f"its {len(recurrence)} tokens are no more than two blocks of {block}"
    return None


WINDOWED_ATTENTION = Kernel("windowed attention, block by block (torch)", refuses_window, windowed_attention)
FUSED_ATTENTION = Kernel("fused attention (torch)", only_takes(Softmax), fused_attention)
