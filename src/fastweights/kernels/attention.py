"""Softmax attention by torch's fused kernels, and normalised recurrences by the kernel of what they normalise."""

from __future__ import annotations

from torch import Tensor

from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.composed import Normalized
from fastweights.recurrence.softmax import Softmax


def fused_attention(recurrence: Softmax, state: State) -> tuple[Tensor, State]:
    """(o, cache), all tokens at once."""
    return recurrence.chunk(state)


def normalized(recurrence: Normalized, state: State) -> tuple[Tensor, State]:
    """(o, state) from the inner record with its column of ones."""
    return recurrence.divided(run_fastest(recurrence.extended(), state))


def _only(kind: type[Recurrence]):
    return lambda recurrence: (
        None if isinstance(recurrence, kind) else f"it is a {type(recurrence).__name__}, not a {kind.__name__}"
    )


FUSED_ATTENTION = Kernel("fused attention (torch)", _only(Softmax), fused_attention)
NORMALIZED = Kernel("normalised: the inner record's kernel", _only(Normalized), normalized)
