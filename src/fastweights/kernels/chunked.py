"""The kernels that take every rule: `step` for one token, `chunk` on one chunk after the other;
under autograd. A rule that has chunks of its own goes by these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.ttt import TTT

SIZE = 64


def chunk_loop(recurrence: Recurrence, state: State, size: int = SIZE) -> tuple[Tensor, State]:
    """(o, final state), `size` tokens at a time: time and memory O(T·size)."""
    outputs = []
    for chunk in recurrence.split(size):
        o, state = chunk.chunk(state)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


def _minibatches(recurrence: TTT, state: tuple[Tensor, ...]) -> tuple[Tensor, State]:
    """(o, final state), one minibatch after the other: time and memory O(T·size) as they are."""
    return recurrence.chunk(state)


MINIBATCHES = Kernel("minibatches in turn (torch)", TTT, _minibatches)

CHUNK_LOOP = Kernel("chunk loop (torch)", Recurrence, chunk_loop)


def _refuses_step(recurrence: Recurrence) -> str | None:
    return None if len(recurrence) == 1 else f"it has {len(recurrence)} tokens, not one"


def _step(recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
    return recurrence.step(state)


STEP = Kernel("step (torch)", Recurrence, _step, _refuses_step)
