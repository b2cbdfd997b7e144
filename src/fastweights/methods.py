"""How a recurrence is evaluated: token by token, chunk by chunk, all at once, or as seems best."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.kernels import select
from fastweights.kernels.chunked import chunk_loop
from fastweights.recurrence.base import CHUNK, Recurrence
from fastweights.recurrence.streams import State, disable_autocast


class Method(ABC):
    """A way to evaluate any recurrence; all ways agree, gradients included."""

    @abstractmethod
    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        """(o, final state) of a record with at least one token."""


@dataclass(frozen=True)
class Recurrent(Method):
    """One token after the other by `step`: the definition."""

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        outputs = []
        for token in recurrence.split(1):
            o, state = token.step(state)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state


@dataclass(frozen=True)
class Chunkwise(Method):
    """Parallel inside chunks of `size` tokens, the state handed from one to the next: time and
    memory O(T·size).
    """

    size: int = CHUNK

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Chunkwise(size={self.size}): a chunk has at least one token")

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        return chunk_loop(recurrence, state, self.size)


@dataclass(frozen=True)
class Parallel(Method):
    """All tokens in one chunk, through the attention map: quadratic in T."""

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        return recurrence.chunk(state)


@dataclass(frozen=True)
class Auto(Method):
    """The first kernel of the table that takes the record (`kernels.explain`)."""

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        return select(recurrence).compute(recurrence, state)


def evaluate(
    recurrence: Recurrence, state: State | None = None, method: Method = Auto()
) -> tuple[Tensor, State]:
    """(o ``[b t h v]``, final state) of `recurrence`, continuing from `state` (None: the empty
    one).

    Raises ShapeError if the state is not one of this recurrence.
    """
    start: State = recurrence.initial_state() if state is None else recurrence.adopt(state)
    if len(recurrence) == 0:
        return recurrence.empty_output(), start
    with disable_autocast(recurrence.device):
        return method.evaluate(recurrence, start)
