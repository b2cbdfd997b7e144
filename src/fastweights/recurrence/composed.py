"""Recurrences made of recurrences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from fastweights.recurrence.base import Recurrence, State, masked_stream, one_or_all, require_width
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.mesa import Mesa
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

    @property
    def streams(self) -> dict[str, Tensor]:
        floor = {"floor": self.floor} if isinstance(self.floor, Tensor) else {}
        return {**self.inner.streams, **floor}

    @property
    def values(self) -> int:
        return self.inner.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.extended().state_shapes

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


@dataclass(frozen=True, eq=False)
class Signed(Recurrence):
    """The inner rule with a decay of either sign: log |α_t| is the inner record's, the sign of α_t stands here.

    With σ_t = ∏_{s≤t} sign α_s, the state σ_t S_t decays by |α_t| alone, so that signs travel as factors ±1:
    on q and v of a `Decay` or `Delta`; on β and Λ of a `Mesa`, for σ_t (σ_t H_t + Λ) is what it then solves with.
    α ∈ (-1, 1) is what state tracking takes                                              (MesaNet app. H)

    inner  its decay, if any, stands for |α_t|
    sign   ``[b t h 1]``, only whether it is negative counts; it has no gradient
    State as the inner record's.
    """

    inner: Decay | Delta | Mesa
    sign: PerToken

    def __post_init__(self) -> None:
        require_width("sign", self.sign, 1)
        _ = self.shape

    @property
    def streams(self) -> dict[str, Tensor]:
        return {**self.inner.streams, "sign": self.sign}

    @property
    def values(self) -> int:
        return self.inner.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.unsigned().state_shapes

    def __getitem__(self, span: slice) -> Self:
        constant = self.sign.shape[1] != len(self)
        inner = self.inner[span] if len(self.inner) == len(self) else self.inner
        return replace(self, inner=inner, sign=self.sign if constant else self.sign[:, span])

    def step(self, state: Any) -> tuple[Output, State]:
        return self.inner.step(self._times(self._signs(), state))

    def chunk(self, state: Any) -> tuple[Output, State]:
        return self.signed(self.unsigned().chunk(state))

    def unsigned(self) -> Decay | Delta | Mesa:
        """The record of the inner rule whose state is σ_t S_t."""
        signs = self._signs().cumprod(1)
        inner = self.inner
        if isinstance(inner, Mesa):
            return replace(inner, beta=signs * inner.beta, ridge=signs * inner.ridge)
        return replace(inner, q=signs * inner.q, v=signs * inner.v)

    def signed(self, evaluated: tuple[Tensor, State]) -> tuple[Output, State]:
        """The output and state of this record from those of the unsigned one."""
        o, state = evaluated
        return o.to(self.output), self._times(self._signs().prod(1, keepdim=True), state)

    def _signs(self) -> Tensor:
        """±1 ``[b t h 1]``"""
        negative = self.sign.detach() < 0
        return torch.where(negative, -1.0, 1.0).to(self.accumulator).expand(-1, len(self), -1, -1)

    def _times(self, sign: Tensor, state: State) -> Any:
        parts = state if isinstance(state, tuple) else (state,)
        return one_or_all([sign.transpose(1, 2) * part for part in parts])

    def attention_map(self) -> Map:
        weights = self.unsigned().attention_map()
        return weights if isinstance(self.inner, Mesa) else weights * self._signs().cumprod(1).transpose(1, 2).mT

    def ltv(self) -> LTV:
        signs = self._signs()
        if not isinstance(self.inner, Mesa):
            system = self.inner.ltv()
            return replace(system, A=system.A * (signs if system.diagonal else signs[..., None]))
        system, total = self.unsigned().ltv(), signs.cumprod(1)
        return replace(system, A=system.A * signs, B=system.B * total, C=system.C * total)

    def keep(self, mask: Mask) -> Self:
        return replace(self, inner=self.inner.keep(mask), sign=masked_stream(self.sign, mask, 1.0))

    def segments(self, ids: Segments) -> Self:
        return replace(self, inner=self.inner.segments(ids))
