"""Recurrences of any length in graphs: their steps in a loop that the graph holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._higher_order_ops import scan

from fastweights.methods import Method
from fastweights.recurrence import Recurrence, Softmax, Substeps, WindowedLinear
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
        return loop_steps(recurrence, state)


def loop_steps(recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
    """(o, final state) by a loop of `step`."""
    streams: list[Tensor] = []
    recurrence.map_streams(lambda s: streams.append(s) or s)
    timed = [i for i, s in enumerate(streams) if s.shape[1] != 1]

    def step(carried: tuple[Tensor, ...], tokens: tuple[Tensor, ...]) -> Any:
        parts = list(streams)
        for i, token in zip(timed, tokens, strict=True):
            parts[i] = token.unsqueeze(1)
        rest = iter(parts)
        o, after = recurrence.map_streams(lambda _: next(rest)).step(pack_state(list(carried)))
        after = after if isinstance(after, tuple) else (after,)
        return tuple(part.clone() for part in after), o.squeeze(1).clone()

    start = state if isinstance(state, tuple) else (state,)
    xs = tuple(streams[i].transpose(0, 1) for i in timed)
    after, outputs = scan(step, tuple(s.clone() for s in start), xs)
    return outputs.transpose(0, 1), pack_state(list(after))
