"""Recurrences of any length in graphs, by chunks: one loop, and parallel within a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from fastweights.engines.exported.steps import with_loops
from fastweights.methods import Method
from fastweights.recurrence import Recurrence, Substeps, WindowedLinear
from fastweights.recurrence.base import CHUNK
from fastweights.recurrence.cached import CacheRule
from fastweights.recurrence.streams import State, pack_state


@dataclass(frozen=True)
class Chunks(Method):
    """Every chunk by `Recurrence.chunk`, in one loop over chunks that torch.export keeps as a loop.

    Behind the last token, the last chunk is filled with identity steps. Rules that keep the tokens
    themselves read all at once.

    Attributes:
        size: tokens of a chunk
    """

    size: int = CHUNK

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        if isinstance(recurrence, CacheRule | WindowedLinear):
            return recurrence.chunk(state)  # type: ignore[arg-type]
        if isinstance(recurrence, Substeps):
            return recurrence.read_tokens(self.evaluate(recurrence.inner, state))
        return _loop_chunks(with_loops(recurrence), state, self.size)


@dataclass(frozen=True)
class Step(Method):
    """The one token of a record by `Recurrence.step`."""

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        return with_loops(recurrence).step(state)


def _loop_chunks(recurrence: Recurrence, state: State, size: int) -> tuple[Tensor, State]:
    """(o, final state) by a loop of `chunk`."""
    batch, length, _ = recurrence.shape
    # graphs are of more than one chunk
    chunks = torch.sym_max((length + size - 1) // size, 2)
    places = torch.arange(chunks * size, device=recurrence.device)

    def fill(stream: Tensor) -> Tensor:
        """With the last token behind the last token, which a mask then takes out."""
        if stream.shape[1] == 1:
            return stream
        return stream.index_select(1, places.clamp(max=length - 1))

    filled = recurrence.map_streams(fill).keep((places < length)[None])
    streams: list[Tensor] = []
    filled.map_streams(lambda s: streams.append(s) or s)
    timed = [i for i, s in enumerate(streams) if s.shape[1] != 1]
    fixed = [i for i, s in enumerate(streams) if s.shape[1] == 1]
    start = state if isinstance(state, tuple) else (state,)

    def chunk(*given: Any) -> list[Tensor]:
        carried, rest = given[: len(start)], given[len(start) :]
        named = {i: tokens.transpose(0, 1) for i, tokens in zip(timed, rest, strict=False)}
        named |= dict(zip(fixed, rest[len(timed) :], strict=False))
        parts = (named[i] for i in range(len(streams)))
        o, after = filled.map_streams(lambda _: next(parts)).chunk(pack_state([*carried]))
        after = after if isinstance(after, tuple) else (after,)
        return [*(part.clone() for part in after), o.transpose(0, 1).clone()]

    over_time = [streams[i].transpose(0, 1).unflatten(0, (chunks, size)) for i in timed]
    # the compiler wants to be given the lengths that the output's shape is made of
    others = (*(streams[i] for i in fixed), length, batch)
    *after, outputs = scan_op(chunk, [part.clone() for part in start], over_time, others)
    return outputs.flatten(0, 1)[:length].transpose(0, 1), pack_state(after)
