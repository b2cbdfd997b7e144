"""Recurrences made of recurrences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from fastweights.recurrence.base import Recurrence, State, require_width
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.ltv import LTV
from fastweights.shapes import Map, Mask, Output, PerToken, Segments


@dataclass(frozen=True, eq=False)
class Normalized(Recurrence):
    """o_t = q_t S_t / n_t, n_t = q_t z_t, or max(|q_t z_t|, floor_t)      (DSF eq. 13-16; mLSTM's max{1, ·})

    z is the state of an extra value column of ones, so that the rows of the attention map sum to one (or, under
    the floor, to less). A row without weight (n = 0: nothing but padding so far) gives o = 0.

    inner  a `Decay` or `Delta`; its skip, if any, has width 1
    floor  None, a number > 0, or ``[b t h 1]``
    State ``[b h k v+1]``, the last column z.
    """

    inner: Decay | Delta
    floor: PerToken | float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.inner, Decay):
            require_width("skip (of a Normalized)", self.inner.skip, 1)
        if isinstance(self.floor, Tensor):
            require_width("floor", self.floor, 1)
        elif self.floor is not None and self.floor <= 0:
            raise ValueError(f"Normalized(floor={self.floor}): the floor of a normaliser is above 0, or None")
        _ = self.shape

    @cached_property
    def streams(self) -> dict[str, Tensor]:
        floor = {"floor": self.floor} if isinstance(self.floor, Tensor) else {}
        return {**self.inner.streams, **floor}

    @property
    def values(self) -> int:
        return self.inner.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        ((*before, v),) = self.inner.state_shapes
        return ((*before, v + 1),)

    def __getitem__(self, span: slice) -> Self:
        floor = self.floor
        if isinstance(floor, Tensor) and floor.shape[1] == len(self):
            floor = floor[:, span]
        return replace(self, inner=self.inner[span], floor=floor)

    def step(self, state: Tensor) -> tuple[Output, State]:
        return self.divided(self.extended().step(state))

    def chunk(self, state: Tensor) -> tuple[Output, State]:
        return self.divided(self.extended().chunk(state))

    def attention_map(self) -> Map:
        weights = self.inner.attention_map()
        return weights * self._reciprocal(weights.sum(-1, keepdim=True).transpose(1, 2)).transpose(1, 2)

    def extended(self) -> Decay | Delta:
        """The inner record with the column of ones on v."""
        v = self.inner.v.to(self.accumulator)
        return replace(self.inner, v=torch.cat([v, torch.ones_like(v[..., :1])], dim=-1))

    def divided(self, evaluated: tuple[Tensor, State]) -> tuple[Output, State]:
        """The output and state of this record from those of the extended one."""
        o, state = evaluated
        return (o[..., :-1] * self._reciprocal(o[..., -1:])).to(self.output), state

    def _reciprocal(self, n: Tensor) -> Tensor:
        if self.floor is not None:
            n = n.abs().clamp(min=self.floor) if isinstance(self.floor, float | int) else n.abs().maximum(self.floor)
        empty = n == 0
        return torch.where(empty, 0, 1 / torch.where(empty, 1, n))

    def ltv(self) -> LTV:
        """Read through C_t = q_t / n_t, on this record's own normalisers from the empty state."""
        system = self.inner.ltv()
        empty = self.initial_state()
        assert isinstance(empty, Tensor)
        ones, _ = self.extended().chunk(empty)
        scale = self._reciprocal(ones[..., -1:])
        skip = None if system.D is None else system.D * scale
        return replace(system, C=system.C * scale, D=skip)

    def keep(self, mask: Mask) -> Self:
        return replace(self, inner=self.inner.keep(mask))

    def segments(self, ids: Segments) -> Self:
        return replace(self, inner=self.inner.segments(ids))
