"""Recurrences of any length in graphs: their steps in a loop that the graph holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from fastweights.methods import Method
from fastweights.recurrence import Recurrence, Softmax, Substeps, WindowedLinear
from fastweights.recurrence.head_groups import HeadGroups
from fastweights.recurrence.solvers import Chebyshev, ConjugateGradient, Parts, Solver
from fastweights.recurrence.streams import State, pack_state, state_parts


@dataclass(frozen=True)
class Steps(Method):
    """Every token by `Recurrence.step`, in one loop over time that torch.export keeps as a loop.

    Softmax attention, whose state grows, reads all tokens at once.
    """

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        if isinstance(recurrence, Softmax | WindowedLinear):
            return recurrence.chunk(state)  # type: ignore[arg-type]
        if isinstance(recurrence, Substeps | HeadGroups):
            return recurrence.evaluate_with(self.evaluate, state)  # type: ignore[arg-type]
        return loop_steps(with_loops(recurrence), state)


def loop_steps(recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
    """(o, final state) by a loop of `step`."""
    cut = Pieces(lambda s: s.transpose(0, 1), lambda s: s.unsqueeze(1), lambda o: o.squeeze(1))
    outputs, after = loop(recurrence, state, type(recurrence).step, cut)
    return outputs.transpose(0, 1), after


class Pieces(NamedTuple):
    """How a loop goes through streams ``[b t …]``.

    Attributes:
        cut: makes the pieces of a stream, one after another on the first axis
        read: makes the stream ``[b s …]`` of a piece
        join: makes a piece of such a stream
    """

    cut: Callable[[Tensor], Tensor]
    read: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]


def loop(
    recurrence: Recurrence,
    state: State,
    evaluate: Callable[[Any, Any], Any],
    pieces: Pieces,
    lengths: tuple[Any, ...] = (),
) -> tuple[Tensor, State]:
    """(the pieces of o, final state) by a loop of the graph.

    Args:
        recurrence: streams of length 1 are those of all tokens
        state: before the first token
        evaluate: (o, state after) of the record of a piece and the state before it
        pieces: what the loop goes through
        lengths: numbers of the graph that the shape of o is made of
    """
    streams: list[Tensor] = []
    recurrence.map_streams(lambda s: streams.append(s) or s)
    timed = [i for i, s in enumerate(streams) if s.shape[1] != 1]
    fixed = [i for i, s in enumerate(streams) if s.shape[1] == 1]
    before = _copies(state_parts(state))

    def once(*given: Any) -> list[Tensor]:
        carried, rest = given[: len(before)], given[len(before) :]
        named = {i: pieces.read(s) for i, s in zip(timed, rest, strict=False)}
        named |= dict(zip(fixed, rest[len(timed) :], strict=False))
        parts = (named[i] for i in range(len(streams)))
        o, after = evaluate(recurrence.map_streams(lambda _: next(parts)), pack_state(carried))
        return _copies((*state_parts(after), pieces.join(o)))

    over_time = [pieces.cut(streams[i]) for i in timed]
    others = (*(streams[i].clone() for i in fixed), *lengths)
    *after, outputs = scan_op(once, before, over_time, others)
    return outputs, pack_state(after)


def with_loops(recurrence: Recurrence) -> Recurrence:
    """A record whose solvers repeat their steps in a loop of the graph."""
    named = {field.name: getattr(recurrence, field.name) for field in fields(recurrence)}
    inside = {n: with_loops(part) for n, part in named.items() if isinstance(part, Recurrence)}
    solvers = {
        n: _LOOPED[type(part)](**vars(part)) for n, part in named.items() if type(part) in _LOOPED
    }
    return replace(recurrence, **inside, **solvers) if inside or solvers else recurrence


class _Looped(Solver):
    def repeat(self, step: Any, operator: Any, start: Parts, count: int) -> Parts:
        kind, carried = type(operator), len(start)

        def once(*parts: Tensor) -> list[Tensor]:
            return _copies(step(kind(*parts[carried + 1 :]), parts[:carried]))

        counter = torch.arange(count, device=start[0].device)
        operands = tuple(getattr(operator, field.name).clone() for field in fields(operator))
        return tuple(scan_op(once, _copies(start), [counter], operands))


def _copies(parts: Parts) -> list[Tensor]:
    """In the one layout that a compiled loop takes from step to step."""
    return [part.clone(memory_format=torch.contiguous_format) for part in parts]


@dataclass(frozen=True)
class _LoopedGradient(_Looped, ConjugateGradient): ...


@dataclass(frozen=True)
class _LoopedChebyshev(_Looped, Chebyshev): ...


_LOOPED = {ConjugateGradient: _LoopedGradient, Chebyshev: _LoopedChebyshev}
