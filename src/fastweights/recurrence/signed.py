"""Decays of either sign."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, Self, cast

import torch
from torch import Tensor

from fastweights.recurrence.base import Evaluation, S
from fastweights.recurrence.effects import Effect, SignedEffect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.streams import mask_stream, pack_state, require_width, state_parts
from fastweights.recurrence.transition import (
    DiagonalTransition,
    ErasingTransition,
    RankOneTransition,
)
from fastweights.recurrence.wrapper import Composed, Wrapper
from fastweights.shapes import Map, Mask, Output, PerToken


@dataclass(frozen=True, eq=False)
class Signed(Composed[S], Wrapper[S], Generic[S]):
    """The inner rule with a decay of either sign: log |α_t| is the inner record's, the sign of α_t
    stands here.

    With σ_t = ∏_{s≤t} sign α_s, the state σ_t S_t decays by |α_t| alone, so that signs travel as
    factors ±1: on q, v and skip of a `Decay`, on q and v of a `Delta` or `DPLR`; on β and Λ of a
    `Mesa`, for σ_t (H_t + Λ) is what it then solves with. The state is the inner record's.
    α ∈ (-1, 1) is what state tracking takes (MesaNet app. H).

    Attributes:
        inner: a `Decay`, `Delta`, `DPLR`, `Mesa` or a `MatrixRule` of one's own; its decay, if
            any, stands for |α_t|
        sign: ``[b t h 1]``, only whether it is negative counts; it has no gradient
    """

    inner: MatrixRule[S]
    sign: PerToken

    def __post_init__(self) -> None:
        if not self.inner.carries_sign:
            raise TypeError(
                f"Signed({type(self.inner).__name__}): the rule names no streams that carry the"
                " sign of a state that decays before it is read; use Decay, Delta or Mesa"
            )
        require_width("sign", self.sign, 1)
        _ = self.shape

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.without_signs().state_shapes

    def evaluate_with(self, evaluate: Evaluation, state: S) -> tuple[Output, S]:
        """(o, state) from the record whose signs are on its streams."""
        o, state = evaluate(self.without_signs(), state)
        return o.to(self.output), self._times(self._signs().prod(1, keepdim=True), state)

    def without_signs(self) -> MatrixRule[S]:
        """The record of the inner rule whose state is σ_t S_t."""
        return self.inner.with_signs(self._signs().cumprod(1))

    def _signs(self) -> Tensor:
        """±1 ``[b t h 1]``"""
        negative = self.sign.detach() < 0
        return (
            torch.where(negative, -1.0, 1.0).to(self.accumulator).expand(-1, self.shape[1], -1, -1)
        )

    def _times(self, sign: Tensor, state: S) -> S:
        signs = sign.transpose(1, 2)
        return cast(S, pack_state([signs * part for part in state_parts(state)]))

    def _signs_on_values(self) -> Tensor | int:
        """σ where the unsigned record's values carry it, 1 where they do not."""
        return self._signs().cumprod(1) if "v" in self.inner.carries_sign else 1

    def attention_map(self) -> Map:
        weights, on_values = self.without_signs().attention_map(), self._signs_on_values()
        return weights * on_values.transpose(1, 2).mT if isinstance(on_values, Tensor) else weights

    def ltv(self) -> LTV:
        signs, on_values = self._signs(), self._signs_on_values()
        read, system = signs.cumprod(1), self.without_signs().ltv()
        assert isinstance(system.A, DiagonalTransition | ErasingTransition | RankOneTransition)
        # from σ_t S_t, driven by the unsigned record's values, to S_t, driven by v
        return replace(
            system,
            A=system.A.times(signs),
            B=system.B * read * on_values,
            C=system.C * read,
            D=None if system.D is None else system.D * on_values,
        )

    def effect(self, evaluate: Evaluation) -> Effect[Any]:
        sign = self._signs().prod(1, keepdim=True).transpose(1, 2)
        return SignedEffect(self.without_signs().effect(evaluate), sign)

    def keep(self, mask: Mask) -> Self:
        return replace(self, inner=self.inner.keep(mask), sign=mask_stream(self.sign, mask, 1.0))
