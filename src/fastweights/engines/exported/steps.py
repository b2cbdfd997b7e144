"""Recurrences of any length in graphs: their steps in a loop that the graph holds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op

from fastweights.methods import Method
from fastweights.recurrence import Recurrence, Softmax, Substeps, WindowedLinear
from fastweights.recurrence.solvers import Chebyshev, ConjugateGradient, Parts, Solver
from fastweights.recurrence.streams import State, pack_state


@dataclass(frozen=True)
class Steps(Method):
    """Every token by `Recurrence.step`, in one loop over time that torch.export keeps as a loop.

    Softmax attention, whose state grows, reads all tokens at once.
    """

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        if isinstance(recurrence, Softmax | WindowedLinear):
            return recurrence.chunk(state)  # type: ignore[arg-type]
        if isinstance(recurrence, Substeps):
            return recurrence.read_tokens(self.evaluate(recurrence.inner, state))
        return loop_steps(with_loops(recurrence), state)


def loop_steps(recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
    """(o, final state) by a loop of `step`."""
    streams: list[Tensor] = []
    recurrence.map_streams(lambda s: streams.append(s) or s)
    timed = [i for i, s in enumerate(streams) if s.shape[1] != 1]
    fixed = [i for i, s in enumerate(streams) if s.shape[1] == 1]
    start = state if isinstance(state, tuple) else (state,)

    def step(*parts: Tensor) -> list[Tensor]:
        carried, tokens = parts[: len(start)], parts[len(start) : len(start) + len(timed)]
        named = dict(zip(fixed, parts[len(start) + len(timed) :], strict=True))
        named.update((i, token.unsqueeze(1)) for i, token in zip(timed, tokens, strict=True))
        rest = (named[i] for i in range(len(streams)))
        o, after = recurrence.map_streams(lambda _: next(rest)).step(pack_state([*carried]))
        after = after if isinstance(after, tuple) else (after,)
        return [*(part.clone() for part in after), o.squeeze(1).clone()]

    over_time = [streams[i].transpose(0, 1) for i in timed]
    before = [part.clone() for part in start]
    *after, outputs = scan_op(step, before, over_time, tuple(streams[i].clone() for i in fixed))
    return outputs.transpose(0, 1), pack_state(after)


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
            after = step(kind(*parts[carried + 1 :]), parts[:carried])
            return [part.clone() for part in after]

        counter = torch.arange(count, device=start[0].device)
        operands = tuple(getattr(operator, field.name).clone() for field in fields(operator))
        return tuple(scan_op(once, [part.clone() for part in start], [counter], operands))


@dataclass(frozen=True)
class _LoopedGradient(_Looped, ConjugateGradient): ...


@dataclass(frozen=True)
class _LoopedChebyshev(_Looped, Chebyshev): ...


_LOOPED = {ConjugateGradient: _LoopedGradient, Chebyshev: _LoopedChebyshev}
