"""Single tokens of `WindowedLinear`, one after the other, by calls of C that are packed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.windowed import (
    NATIVE_WINDOW,
    ONE_TOKEN,
    FeaturelessWindowState,
    FeatureWeights,
    WindowRule,
    learned_features,
)
from fastweights.kernels.table import select
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.windowed import WindowedLinear

_OFFSETS = abi.offsets(abi.WindowProblem)
_ENDLESS = torch.iinfo(torch.int64).max


class TokenStreams(NamedTuple):
    """Where a token's streams lie, of all heads: q, o ``[1 1 h ·]`` and k, v ``[1 1 g ·]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor

    def of(self, head: int) -> TokenStreams:
        """Those of one key head and its queries."""
        repeats = self.q.shape[2] // self.k.shape[2]
        read, own = slice(head * repeats, (head + 1) * repeats), slice(head, head + 1)
        return TokenStreams(
            self.q[:, :, read], self.k[:, :, own], self.v[:, :, own], self.o[:, :, read]
        )


class HeldWindows:
    """The state of some key heads with one window, which is written where it lies: in memory for a
    full window, whose first tokens are there.

    Args:
        state: (keys ``[b g s k]``, values ``[b g s v]``, memory ``[b g f v+1]``, ages ``[b s]``)
        window: w; s is at most w - 1

    Raises:
        ValueError: if the state is not of float32 and of this window
    """

    def __init__(self, state: Sequence[Tensor], window: int) -> None:
        keys, values, memory, age = state
        room, self.cached = max(window - 1, 0), age.shape[1]
        if library.refuse_strangers(keys, values, memory) or self.cached > room:
            raise ValueError("a state is not one of plain float32, or of another window")
        shape = (*keys.shape[:2], room)
        self.keys, self.values, self.ages = (
            part.new_empty(*shape, *part.shape[3:]) for part in (keys, values, age)
        )
        self.keys[:, :, : self.cached], self.values[:, :, : self.cached] = keys, values
        self.ages[:, :, : self.cached], self.memory = age[:, None], _copy(memory)

    def fields(self, sequence: int, head: int) -> dict[str, Any]:
        """Those of a problem of one head that say where the state is, and the next one."""
        parts = {"keys": self.keys, "values": self.values, "age": self.ages, "memory": self.memory}
        state = {name: part[sequence, head] for name, part in parts.items()}
        after = {f"next_{name}": part for name, part in state.items()}
        return {"cached": self.cached, **state, **after}

    def copy(self, cached: int) -> FeaturelessWindowState:
        """The state as it is now, with so many tokens in the window."""
        keys, values = self.keys[:, :, :cached], self.values[:, :, :cached]
        return _copy(keys), _copy(values), _copy(self.memory), _copy(self.ages[:, 0, :cached])


def _copy(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


class HeadTokens:
    """What reads the next token of the key heads of sequences, where `streams` have it then.

    Args:
        records: of one token of the heads of a group, for each sequence, by group; their streams
            are not read
        heads: the numbers of a group's heads in `streams`
        states: of each group, behind which the token comes
        streams: of all heads, for each sequence

    Attributes:
        calls: what reads the token, leaves o where it belongs and the states behind it

    Raises:
        ValueError: if another kernel takes a record, or it has features that others have made, or
            a state is not one that C writes
    """

    def __init__(
        self,
        records: Sequence[Sequence[WindowedLinear]],
        heads: Sequence[Sequence[int]],
        states: Sequence[Sequence[Tensor]],
        streams: Sequence[TokenStreams],
    ) -> None:
        self._held = [
            HeldWindows(state, own[0].window) for state, own in zip(states, records, strict=True)
        ]
        problems: list[Any] = [
            problem
            for held, own, numbers in zip(self._held, records, heads, strict=True)
            for i, record in enumerate(own)
            for problem in _problems(record, numbers, streams[i], held, i)
        ]
        behind = range(len(problems) - 1, -1, -1)
        threads = library.threads(4 * sum(p.keys.numel() + p.memory.numel() for p in problems))
        read = library.PreparedCall(
            ONE_TOKEN,
            *(
                p._replace(threads=threads, following=n)
                for p, n in zip(problems, behind, strict=True)
            ),
        )
        rooms = [problem.keys.shape[0] for problem in problems]
        self.calls = read, _count(read, rooms)
        counts = [len(own) * len(numbers) for own, numbers in zip(records, heads, strict=True)]
        self._firsts = [sum(counts[:i]) for i in range(len(counts))]

    def states(self) -> list[FeaturelessWindowState]:
        """Copies of what the states are now."""
        cached = _numbers(self.calls[0], "cached")[self._firsts].tolist()
        return [held.copy(count) for held, count in zip(self._held, cached, strict=True)]


def _numbers(call: library.PreparedCall, field: str) -> np.ndarray:
    """Where a number of each problem of a call lies."""
    memory: Any = call.memory
    step, first = abi.size(abi.WindowProblem), _OFFSETS[field]
    return np.ndarray((len(memory) // step,), np.int64, memory, first, (step,))


def _count(call: library.PreparedCall, rooms: list[int]) -> library.PreparedCall:
    """What counts a token in the problems of a call, with room for so many in the windows."""
    _, memory = call.addresses
    problems = torch.arange(len(rooms)) * abi.size(abi.WindowProblem) + memory
    numbers = torch.cat([problems + _OFFSETS[field] for field in ("position", "cached")])
    most = torch.tensor([_ENDLESS] * len(rooms) + rooms)
    counters = abi.Counters(len(numbers), numbers, most)
    return library.PreparedCall("fw_advance", counters, kept=call)


def _problems(
    record: WindowedLinear,
    heads: Sequence[int],
    streams: TokenStreams,
    held: HeldWindows,
    sequence: int,
) -> Iterator[abi.WindowProblem]:
    """Of each key head of one sequence alone."""
    source = learned_features(record)
    if select(record) is not NATIVE_WINDOW or source is None or record.groups != len(heads):
        raise ValueError("the record of a token is not one that C reads by itself")
    mix = record.mix.float().expand(1, 1, record.shape[2], 1).chunk(len(heads), 2)
    each = zip(heads, mix, source.by_head(len(heads)), strict=True)
    for i, (head, own, weights) in enumerate(each):
        state = held.fields(sequence, i)
        yield _problem(WindowRule.of(record), streams.of(head), own, weights, state)


def _problem(
    rule: WindowRule, streams: TokenStreams, mix: Tensor, weights: FeatureWeights, state: Any
) -> abi.WindowProblem:
    q, k, v, o = streams
    widths: dict[str, Any] = {
        "h": q.shape[2],
        "k": q.shape[3],
        "v": v.shape[3],
        "f": len(state["memory"]),
    }
    given: dict[str, Any] = {"q": q, "key": k, "value": v, "mix": mix, "o": o}
    constants: dict[str, Any] = {
        **rule._asdict(),
        "softcap": rule.softcap or 0.0,
        "forgotten": FORGOTTEN,
    }
    nothing: dict[str, Any] = dict.fromkeys(("log_scale", "keep", "starts"))
    return abi.WindowProblem(
        b=1,
        t=1,
        g=1,
        threads=1,
        **widths,
        **constants,
        **given,
        **nothing,
        **weights.fields(),
        **state,
    )
