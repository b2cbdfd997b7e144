"""Recurrences of any length in graphs, by chunks: one loop, and parallel within a chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.engines.exported.steps import Pieces, loop, with_loops
from fastweights.methods import Method
from fastweights.recurrence import DPLR, LongConvolution, Recurrence, Substeps, WindowedLinear
from fastweights.recurrence.base import CHUNK
from fastweights.recurrence.cached import CacheRule
from fastweights.recurrence.head_groups import HeadGroups
from fastweights.recurrence.mapped import Mapped
from fastweights.recurrence.streams import State, state_parts


@dataclass(frozen=True)
class LoopedChunks(Method):
    """Every chunk by `Recurrence.chunk`, in one loop over chunks that torch.export keeps as a loop.

    Behind the last token, the last chunk is filled with identity steps. Windows are full from the
    start (`Recurrence.settle`); softmax attention without a window reads all tokens at once. `DPLR`
    of complex streams goes step by step, as its chunks solve systems for which there is no operator
    on pairs of real numbers; a long convolution multiplies its filter out, as a graph holds the
    lengths of Fourier transforms.

    Attributes:
        size: tokens of a chunk
    """

    size: int = CHUNK

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        batch, tokens, _ = recurrence.shape
        return self._evaluate(recurrence, state, (tokens, batch))

    def _evaluate(self, recurrence: Recurrence, state: State, lengths: Any) -> tuple[Tensor, State]:
        if isinstance(recurrence, CacheRule) and recurrence.span is None:
            return recurrence.chunk(state)  # type: ignore[arg-type]
        if isinstance(recurrence, Substeps | HeadGroups):
            return recurrence.evaluate_with(partial(self._evaluate, lengths=lengths), state)  # type: ignore[arg-type]
        if isinstance(getattr(recurrence, "fk", None), Mapped):
            return self._with_features(recurrence, state, lengths)
        if isinstance(recurrence, DPLR) and recurrence.accumulator.is_complex:
            return _loop(recurrence, state, 1, DPLR.step, lengths)
        if isinstance(recurrence, LongConvolution):
            return _loop(recurrence, state, self.size, LongConvolution.step, lengths)
        return _loop(with_loops(recurrence), state, self.size, type(recurrence).chunk, lengths)

    def _with_features(self, recurrence: Any, state: State, lengths: Any) -> tuple[Tensor, State]:
        """A loop over features that are made before it, also of the keys in the state."""
        keys, values, nothing, *memory = state_parts(state)
        before = (keys, values, recurrence.cached_features(keys, nothing), *memory)
        o, after = _loop(recurrence, before, self.size, WindowedLinear.chunk, lengths)
        keys, values, _, *memory = state_parts(after)
        return o, (keys, values, nothing, *memory)


@dataclass(frozen=True)
class Step(Method):
    """The one token of a record by `Recurrence.step`."""

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        return with_loops(recurrence).step(state)


def _loop(
    recurrence: Recurrence,
    state: State,
    size: int,
    read: Callable[[Any, Any], Any],
    lengths: tuple[Any, ...],
) -> tuple[Tensor, State]:
    """(o, final state) by a loop of `read`, `step` or `chunk`, over pieces of so many tokens.

    The compiler wants to be given the lengths that the output's shape is made of, not multiples.
    """
    length = recurrence.shape[1]
    # graphs are of more than one chunk
    chunks: Any = torch.sym_max((length + size - 1) // size, 2)
    places = torch.arange(chunks * size, device=recurrence.device)

    def fill(stream: Tensor) -> Tensor:
        """With the last token behind the last token, which a mask then takes out."""
        if stream.shape[1] == 1:
            return stream
        return stream.index_select(1, places.clamp(max=length - 1))

    pieces = Pieces(
        cut=lambda s: s.transpose(0, 1).unflatten(0, (chunks, size)),
        read=lambda s: s.transpose(0, 1),
        join=lambda o: o.transpose(0, 1),
    )
    filled = recurrence.map_streams(fill).keep((places < length)[None])
    outputs, after = loop(filled, state, read, pieces, lengths)
    return outputs.flatten(0, 1)[:length].transpose(0, 1), after
