"""Where cached tokens and a record's own stand: what is visible to whom, and what the cache
keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fastweights.recurrence.effects import Effect

FORGOTTEN = 1 << 40
"""The age of a cached token that no query will see again."""


def zero_or_more(count: int) -> int:
    """The larger of a number and 0; of a length that torch.export knows by a symbol, a symbol."""
    largest: Any = torch.sym_max if isinstance(count, torch.SymInt) else max
    return largest(count, 0)


def newest(age: Tensor, count: int) -> Tensor:
    """``[b ≤ count]``: those of the tokens with ages ``[b s]`` that the next ones will see longest,
    oldest first, forgotten ones in front.
    """
    order = age.argsort(dim=1, stable=True, descending=True)
    return order[:, zero_or_more(order.shape[1] - count) :]


def insert_forgotten(
    cached: Sequence[Tensor], age: Tensor, room: int, place: int = 0
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The ``[b · s ·]`` tensors of cached tokens and their ages ``[b s]``, filled up to `room`
    tokens by forgotten ones, from `place` on.
    """
    missing = room - age.shape[1]

    def widen(part: Tensor, axis: int, value: int) -> Tensor:
        first, rest = part.tensor_split([place], axis)
        shape = [*part.shape]
        shape[axis] = missing
        return torch.cat([first, part.new_full(shape, value), rest], axis)

    if missing <= 0:
        return tuple(cached), age
    return tuple(widen(part, 2, 0) for part in cached), widen(age, 1, FORGOTTEN)


@dataclass(frozen=True, eq=False)
class Passage(Effect[Tensor]):
    """How some tokens age those that are cached before them.

    Attributes:
        count: ``[b 1]``, how many of them are kept
        fresh: ``[b 1]``, whether a document begins among them, so that all before is forgotten
    """

    count: Tensor
    fresh: Tensor

    def after(self, state: Tensor) -> Tensor:
        remembered = (state < FORGOTTEN // 2) & ~self.fresh
        return torch.where(remembered, state + self.count, FORGOTTEN)


class Timeline(NamedTuple):
    """The tokens that a record's queries may see: the s - t cached ones, then its own.

    Attributes:
        position: ``[b s]`` counts kept tokens (1: the record's first; ≤ 0: cached; far below:
            padding or forgotten)
        document: ``[b s]`` numbers segments, 0 is the one that the cache belongs to
        query: ``[b t]`` where the queries stand (padding: where the next token will)
        length: ``[b 1]`` how many of the record's tokens are kept
    """

    position: Tensor
    document: Tensor
    query: Tensor
    length: Tensor

    @classmethod
    def of(cls, age: Tensor, t: int, kept: Tensor | None, starts: Tensor | None) -> Self:
        """`t` tokens after a cache of ages ``[b s-t]``; `kept` and `starts` are ``[b t 1 1]`` or
        None.
        """
        b = age.shape[0]
        keeps = (
            age.new_ones(b, t, dtype=torch.bool) if kept is None else kept[..., 0, 0].expand(b, t)
        )
        position = keeps.cumsum(1)
        own = torch.where(keeps, position, -FORGOTTEN)
        document = (
            torch.zeros_like(position)
            if starts is None
            else starts[..., 0, 0].expand(b, t).cumsum(1)
        )
        return cls(
            # a cached token lies its age before the record's first one, which is at 1
            position=torch.cat([1 - age, own], 1),
            document=torch.cat([torch.zeros_like(age), document], 1),
            query=torch.where(keeps, position, position + 1),
            length=position[:, -1:],
        )

    @property
    def distance(self) -> Tensor:
        """``[b t s]``: how many kept tokens a key lies behind a query; FORGOTTEN or so if it is
        lost to all.
        """
        return self.query[:, :, None] - self.position[:, None, :]

    @property
    def same_document(self) -> Tensor:
        """``[b t s]``: whether a key belongs to its query's document and is not behind it in the
        record.
        """
        t, s = self.query.shape[1], self.position.shape[1]
        causal = torch.ones(t, s, dtype=torch.bool, device=self.query.device).tril(s - t)
        return causal & (self.document[:, s - t :, None] == self.document[:, None, :])

    @property
    def passage(self) -> Passage:
        """What the record's tokens do to the ages of those cached before them."""
        return Passage(self.length, self.document[:, -1:] > 0)

    @property
    def age(self) -> Tensor:
        """``[b s]``: the distances that the next token will see."""
        age = self.length + 1 - self.position
        # padding and forgotten tokens lie about FORGOTTEN behind, all others far less than half
        current = self.document == self.document[:, -1:]
        return torch.where(current & (age < FORGOTTEN // 2), age, FORGOTTEN)
