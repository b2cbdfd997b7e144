"""The tokens that a window and its sinks keep beside a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.streams import State, state_parts
from fastweights.recurrence.timeline import FORGOTTEN, Timeline, newest
from fastweights.recurrence.transition import ShiftRegister

Parts = tuple[Tensor, ...]


class KeptTokens(NamedTuple):
    """The sinks, then the last tokens, oldest first; those that are lost stand before the others.

    Attributes:
        keys, values: ``[b g s ·]``
        written: ``[b s h ·]`` each
        age: ``[b s]``
    """

    keys: Tensor
    values: Tensor
    written: Parts
    age: Tensor

    def slide(self, own: KeptTokens, sinks: int, *, drop: bool) -> KeptTokens:
        """With a token of its own at the end, and without the oldest behind the sinks if `drop`."""

        def join(old: Tensor, new: Tensor, axis: int) -> Tensor:
            length = old.shape[axis]
            held = old.narrow(axis, 0, sinks)
            rest = old.narrow(axis, sinks + drop, length - sinks - drop)
            return torch.cat([held, rest, new], axis)

        written = (join(*pair, 1) for pair in zip(self.written, own.written, strict=True))
        return KeptTokens(
            join(self.keys, own.keys, 2),
            join(self.values, own.values, 2),
            tuple(written),
            join(self.age, own.age, 1),
        )


class SeenTokens(NamedTuple):
    """All tokens that a record's queries may see, the s - t cached ones first.

    Attributes:
        keys, values: ``[b g s ·]``
        written: ``[b s h ·]`` each
        time: where the tokens stand
        sink: ``[b s]``, which of them stay visible
        rank: ``[b s]``, see `ranks_in_documents`
    """

    keys: Tensor
    values: Tensor
    written: Parts
    time: Timeline
    sink: Tensor
    rank: Tensor


def join_state(cache: KeptTokens, memory: State) -> Parts:
    """The state of a `Windowed` whose rule has the state `memory`."""
    return (
        cache.keys,
        cache.values,
        *swap_time_and_heads(cache.written),
        *state_parts(memory),
        cache.age,
    )


def swap_time_and_heads(streams: Iterable[Tensor]) -> Parts:
    """``[b s h ·]`` ↔ ``[b h s ·]``: records have time first, states heads."""
    return tuple(s.transpose(1, 2) for s in streams)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """``[b s …]`` at ``[b t]``"""
    over_channels = index.view(*index.shape, *(1 for _ in x.shape[2:]))
    return x.gather(1, over_channels.expand(*index.shape, *x.shape[2:]))


def keep_tokens(cache: KeptTokens, sink: Tensor, sinks: int, window: int) -> KeptTokens:
    """The sinks of a cache, and the newest of its other tokens."""
    # sinks, and those of the others that the window holds, each chosen by age
    held = torch.where(sink, cache.age, FORGOTTEN)
    recent = torch.where(~sink & (cache.age <= window), cache.age, FORGOTTEN)
    groups = [(held, newest(held, sinks)), (recent, newest(recent, window))]
    chosen = torch.cat([index for _, index in groups], 1)
    age = torch.cat([ages.gather(1, index) for ages, index in groups], 1)
    there = age < FORGOTTEN
    tokens = (*swap_time_and_heads((cache.keys, cache.values)), *cache.written)
    # a log decay may be -inf
    keys, values, *written = (
        torch.where(there[..., None, None], take_tokens(s, chosen), 0) for s in tokens
    )
    keys, values = swap_time_and_heads((keys, values))
    return KeptTokens(keys, values, tuple(written), age)


def ranks_in_documents(age: Tensor, time: Timeline, sinks: int, starts: Tensor | None) -> Tensor:
    """``[b s]``: which token of its document each seen one is, from 0; of cached ones behind the
    sinks `sinks`, and -1 for those that are lost.

    Args:
        age: of the cached tokens, ``[b s-t]``, the sinks first
        time: where all tokens stand
        sinks: how many sinks a document has
        starts: ``[b t 1 1]``, where documents begin
    """
    live = age < FORGOTTEN
    held = live[:, :sinks]
    behind = torch.where(live[:, sinks:], sinks, -1)
    cached = torch.cat([torch.where(held, held.cumsum(1) - 1, -1), behind], 1)
    # own tokens count on from the cached sinks, or from 0 where a document begins
    first = -held.sum(1, keepdim=True).expand_as(time.query)
    if starts is not None:
        first = torch.where(starts[..., 0, 0], time.query - 1, first).cummax(1).values
    kept = time.position[:, age.shape[1] :] > 0
    return torch.cat([cached, torch.where(kept, time.query - 1 - first, -1)], 1)


def tokens_behind(
    time: Timeline, window: int, keep: Tensor | None
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """A function ``[b s …]`` → ``[b t …]`` to the token that lies `window` kept ones behind each of
    a record's own, and ``[b t]``: where there is one.

    Args:
        time: where the tokens stand
        window: w
        keep: ``[b t 1 1]``, which of the record's tokens are kept; None for all
    """
    (b, s), t = time.position.shape, time.query.shape[1]
    device = time.position.device
    if keep is None:
        # own token i stands at s - t + i: a shift by w, with zeros where the cache does not reach
        missing, first = max(window - (s - t), 0), max(s - t - window, 0)

        def shift(x: Tensor) -> Tensor:
            return torch.cat([x.new_zeros(b, missing, *x.shape[2:]), x], 1)[:, first : first + t]

        return shift, torch.arange(t, device=device)[None] >= missing
    # the place of a position, for those that are still to leave: 1 - w is the first
    last = window + t
    place = time.position + window - 1
    place = torch.where((place >= 0) & (place < last), place, last)
    # which token each place holds, -1 for none; what is lost goes to the place behind all
    nowhere = place.new_full((b, last + 1), -1)
    tokens = nowhere.scatter(1, place, torch.arange(s, device=device).expand(b, s))
    # position p - w has the place p - 1
    index = tokens[:, :-1].gather(1, (time.query - 1).clamp(max=last - 1))
    found = (index >= 0) & keep[..., 0, 0].expand(b, t)
    return lambda x: take_tokens(x, index.clamp(min=0)), found


def register_rows(seen: SeenTokens, window: int, sinks: int) -> Tensor:
    """``[b t s n+w]``: the row of a register of sinks and a window in which each of a record's own
    tokens finds the seen ones, as bools.
    """
    rows = torch.arange(max(sinks, window), device=seen.rank.device)
    held = (seen.rank[..., None] == rows[:sinks])[:, None]
    moving = seen.time.distance[..., None] == rows[:window]
    moving = moving & ~seen.sink[:, None, :, None]
    found = torch.cat([held.expand(-1, moving.shape[1], -1, -1), moving], -1)
    return found & seen.time.same_document[..., None]


def register(
    seen: SeenTokens,
    system: LTV,
    window: int,
    sinks: int,
    keep: Tensor | None,
    starts: Tensor | None,
) -> tuple[ShiftRegister, Tensor]:
    """(A, B) of the sinks' values, those of the last tokens in a shift register, and the rows of
    `system`, the delayed rule's, which the end of the register goes on into.
    """
    written = system.B
    b, t = seen.time.query.shape
    always = torch.ones(b, t, 1, 1, dtype=torch.bool, device=written.device)
    rank = seen.rank[:, -t:, None]
    # a token enters the row of its rank among the sinks, else row 0 of the register
    held = rank == torch.arange(sinks, device=written.device)
    entered = F.pad((rank >= sinks).to(written.dtype), (0, max(window - 1, 0)))[..., :window]
    slots = torch.cat([held.to(written.dtype), entered], -1)[:, :, None]
    written = written.expand(b, t, -1, -1)
    slots = slots.expand(*written.shape[:3], -1)
    A = ShiftRegister(
        leaving=written,
        slots=window,
        moves=always if keep is None else keep,
        lasts=always if starts is None else ~starts,
        below=system.A,
        held=sinks,
    )
    return A, torch.cat([slots, torch.zeros_like(written) if window else written], -1)
