"""Decays of either sign."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from fastweights.recurrence.base import (
    Recurrence,
    State,
    lazy_property,
    mask_stream,
    pack_state,
    require_width,
)
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.mesa import Mesa
from fastweights.recurrence.transition import DiagonalTransition, ErasingTransition
from fastweights.shapes import Map, Mask, Output, PerToken, Segments


@dataclass(frozen=True, eq=False)
class Signed(Recurrence):
    """The inner rule with a decay of either sign: log |α_t| is the inner record's, the sign of α_t
    stands here.

    With σ_t = ∏_{s≤t} sign α_s, the state σ_t S_t decays by |α_t| alone, so that signs travel as
    factors ±1: on q and v of a `Decay` or `Delta`; on β and Λ of a `Mesa`, for σ_t (σ_t H_t + Λ) is
    what it then solves with. α ∈ (-1, 1) is what state tracking takes
    (MesaNet app. H)

    inner  its decay, if any, stands for |α_t|
    sign   ``[b t h 1]``, only whether it is negative counts; it has no gradient
    State as the inner record's.
    """

    inner: Decay | Delta | Mesa
    sign: PerToken

    def __post_init__(self) -> None:
        require_width("sign", self.sign, 1)
        _ = self.shape

    @lazy_property
    def streams(self) -> dict[str, Tensor]:
        return {**self.inner.streams, "sign": self.sign}

    @property
    def values(self) -> int:
        return self.inner.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.without_signs().state_shapes

    def step(self, state: Any) -> tuple[Output, State]:
        return self.inner.step(self._times(self._signs(), state))

    def chunk(self, state: Any) -> tuple[Output, State]:
        return self.restore_signs(self.without_signs().chunk(state))

    def without_signs(self) -> Decay | Delta | Mesa:
        """The record of the inner rule whose state is σ_t S_t."""
        signs = self._signs().cumprod(1)
        inner = self.inner
        if isinstance(inner, Mesa):
            return replace(inner, beta=signs * inner.beta, ridge=signs * inner.ridge)
        return replace(inner, q=signs * inner.q, v=signs * inner.v)

    def restore_signs(self, evaluated: tuple[Tensor, State]) -> tuple[Output, State]:
        """The output and state of this record from those of the unsigned one."""
        o, state = evaluated
        return o.to(self.output), self._times(self._signs().prod(1, keepdim=True), state)

    def _signs(self) -> Tensor:
        """±1 ``[b t h 1]``"""
        negative = self.sign.detach() < 0
        return torch.where(negative, -1.0, 1.0).to(self.accumulator).expand(-1, len(self), -1, -1)

    def _times(self, sign: Tensor, state: State) -> Any:
        parts = state if isinstance(state, tuple) else (state,)
        return pack_state([sign.transpose(1, 2) * part for part in parts])

    def attention_map(self) -> Map:
        weights = self.without_signs().attention_map()
        return (
            weights
            if isinstance(self.inner, Mesa)
            else weights * self._signs().cumprod(1).transpose(1, 2).mT
        )

    def ltv(self) -> LTV:
        signs = self._signs()
        system, read = self.inner.ltv(), 1
        if isinstance(self.inner, Mesa):
            system, read = self.without_signs().ltv(), signs.cumprod(1)
        assert isinstance(system.A, DiagonalTransition | ErasingTransition)
        return replace(
            system,
            A=replace(system.A, decay=system.A.decay * signs),
            B=system.B * read,
            C=system.C * read,
        )

    def keep(self, mask: Mask) -> Self:
        return replace(self, inner=self.inner.keep(mask), sign=mask_stream(self.sign, mask, 1.0))

    def segments(self, ids: Segments) -> Self:
        return replace(self, inner=self.inner.segments(ids))
