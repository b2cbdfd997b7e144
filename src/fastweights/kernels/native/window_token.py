"""Single tokens of `WindowedLinear`, one after the other, by calls of C that are packed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple

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

_STATE = "keys", "values", "age", "memory"
_NEXT = tuple(f"next_{name}" for name in _STATE)
"""Of a state and the next one, in the order in which a problem has them, one behind the other."""

_OFFSETS = abi.offsets(abi.WindowProblem)
_CACHED, _BEFORE, _AFTER, _POSITION = (
    _OFFSETS[name] for name in ("cached", _STATE[0], _NEXT[0], "position")
)
_COUNT, _POINTERS = Struct("q"), Struct("4q")


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


class WindowToken:
    """What reads the next token of some key heads of sequences, where `streams` have it then.

    Args:
        records: of one token of these heads, for each sequence; their streams are not read
        heads: their numbers in `streams`
        streams: of all heads, for each sequence

    Raises:
        ValueError: if another kernel takes a record, or it has features that others have made
    """

    def __init__(
        self,
        records: Sequence[WindowedLinear],
        heads: Sequence[int],
        streams: Sequence[TokenStreams],
    ) -> None:
        self._calls = list[library.PreparedCall]()
        self._positions = list[int]()
        for record, own in zip(records, streams, strict=True):
            source = learned_features(record)
            if select(record) is not NATIVE_WINDOW or source is None or record.groups != len(heads):
                raise ValueError("the record of a token is not one that C reads by itself")
            problems = list(_problems(record, source, heads, own))
            self._calls += [library.PreparedCall(ONE_TOKEN, problem) for problem in problems]
            self._positions += [source.position] * len(problems)
        self._shape = len(records), len(heads)
        self._room = max(records[0].window - 1, 0)
        self._widths = records[0].q.shape[-1], records[0].values, records[0].fq.shape[-1]

    def refuses(self, state: Sequence[Tensor]) -> bool:
        """Whether the state is not one of plain float32 that a token can be read behind."""
        keys, values, memory, age = state
        (k, v, f), (b, g), cached = self._widths, self._shape, age.shape[-1]
        shapes = (b, g, cached, k), (b, g, cached, v), (b, g, f, v + 1)
        floats = tuple(s.shape for s in (keys, values, memory)) == shapes and not (
            library.refuse_strangers(keys, values, memory)
        )
        ages = age.shape == (b, cached) and age.dtype is torch.long and cached <= self._room
        return not (floats and ages and all(s.is_contiguous() for s in state))

    def __call__(self, state: Sequence[Tensor]) -> FeaturelessWindowState:
        """The state behind the token, and o where it belongs; `state` is not refused."""
        (k, v, f), (b, g), cached = self._widths, self._shape, state[3].shape[1]
        kept = min(self._room, cached + 1)
        keys, values = torch.empty(b, g, kept, k), torch.empty(b, g, kept, v)
        after = keys, values, torch.empty(b, g, f, v + 1), torch.empty(b, kept, dtype=torch.long)
        befores, afters = self._addresses(state), self._addresses(after)
        each = zip(self._calls, self._positions, befores, afters, strict=True)
        for call, position, old, new in each:
            _COUNT.pack_into(call.memory, _CACHED, cached)
            _COUNT.pack_into(call.memory, _POSITION, position)
            _POINTERS.pack_into(call.memory, _BEFORE, *old)
            _POINTERS.pack_into(call.memory, _AFTER, *new)
            call()
        self._positions = [position + 1 for position in self._positions]
        return after

    def _addresses(self, state: Sequence[Tensor]) -> Iterator[tuple[int, int, int, int]]:
        """Where keys, values, the ages of all heads and memory of each call begin."""
        keys, values, memory, age = (part.data_ptr() for part in state)
        steps, (b, g) = [part.nbytes // len(self._calls) for part in state[:3]], self._shape
        of_ages = state[3].nbytes // b
        for i in range(len(self._calls)):
            yield (
                keys + i * steps[0],
                values + i * steps[1],
                age + i // g * of_ages,
                memory + i * steps[2],
            )


def _problems(
    record: WindowedLinear, source: FeatureWeights, heads: Sequence[int], streams: TokenStreams
) -> Iterator[abi.WindowProblem]:
    """Of each key head alone, without a state."""
    rule, f, count = WindowRule.of(record), record.fq.shape[-1], len(heads)
    mix = record.mix.float().expand(1, 1, record.shape[2], 1).chunk(count, 2)
    state: dict[str, Any] = {**dict.fromkeys(_STATE), **dict.fromkeys(_NEXT)}
    for head, own, weights in zip(heads, mix, source.by_head(count), strict=True):
        q, k, v, o = streams.of(head)
        sizes = (1, 1, q.shape[2], 1, q.shape[3], v.shape[3], f, rule.window, 0, rule.shared)
        constants = (FORGOTTEN, rule.scale, rule.softcap or 0.0, 1)
        parts: dict[str, Any] = {"o": o, **weights.fields(), **state}
        yield abi.WindowProblem(*sizes, *constants, q, k, v, own, None, None, None, **parts)
