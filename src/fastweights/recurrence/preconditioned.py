"""A delta rule that writes along its keys as their past squares suggest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fastweights.recurrence.base import (
    Evaluation,
    NoFiniteFormError,
    add_resets,
    check_mask,
    read_by_chunks,
)
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.dplr import DPLR
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.streams import ShapeError, mask_stream, require_width
from fastweights.recurrence.wrapper import Composed
from fastweights.shapes import Keys, LogDecay, Map, Mask, Output, PerToken, Values

States = tuple[Tensor, Tensor]

EMPTY = 1e-6
"""What a sum of squares is at least, for its logarithm: as in the paper's code."""


@dataclass(frozen=True, eq=False)
class Preconditioned(Composed[States], MatrixRule[States]):
    """The delta rule with another write key: k ⊙ M, M from the squares of the keys so far.

    A_t = γ_t A_{t-1} + ρ_t k_t² ;  M_t = X^(-r / (1 + |r|)), r = log A_t - c ;
    S_t = diag(α_t) S_{t-1} + β_t (k_t ⊙ M_t)ᵀ (v_t - k_t diag(α_t) S_{t-1}) ;  o_t = q_t S_t

    A is the diagonal of the curvature of what S is to solve, so that directions that many keys had
    are written less, and new ones more, by at most the factor X. The state is (A ``[b h 1 k]``, S
    ``[b h k v]``). With unit keys and β ≤ 1, S stays bounded for X ≤ 2.

    Source: Preconditioned DeltaNet (2604.21100).

    Attributes:
        q, k: ``[b t h k]``
        v: ``[b t h v]``
        beta: β, ``[b t h 1]``
        log_decay: log α_t ≤ 0: None, ``[b t h 1]`` or ``[b t h k]``; −inf empties S
        rate: ρ ≥ 0, ``[b t h 1]``
        log_fade: log γ_t ≤ 0, ``[b t h 1]``; −inf empties A
        center: c, ``[b t h 1]``: the logarithm of the A that M is 1 for
        spread: X > 0; above 1, so that A divides
    """

    writes: ClassVar[tuple[str, ...]] = ("beta", "rate")
    carries_sign: ClassVar[tuple[str, ...]] = ()

    q: Keys
    k: Keys
    v: Values
    beta: PerToken
    log_decay: LogDecay | None
    rate: PerToken
    log_fade: PerToken
    center: PerToken
    spread: float = 1.5

    def __post_init__(self) -> None:
        _ = self.shape
        width = self.q.shape[-1]
        require_width("k", self.k, width)
        require_width("log_decay", self.log_decay, 1, width)
        for name in ("beta", "rate", "log_fade", "center"):
            require_width(name, self.streams[name], 1)
        if not self.spread > 0:
            raise ShapeError(
                f"Preconditioned(spread={self.spread}): M lies between 1/spread and spread; give a"
                " number above 0"
            )

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, _, h = self.shape
        keys = self.q.shape[-1]
        return (b, h, 1, keys), (b, h, keys, self.v.shape[-1])

    def evaluate_with(self, evaluate: Evaluation, state: States) -> tuple[Output, States]:
        """(o, state) from the squares of the keys, then the rule that they precondition."""
        curvature, memory = state
        squares, curvature = evaluate(self.squares(), curvature)
        o, memory = evaluate(self.rule(squares), memory)
        return o.to(self.output), (curvature, memory)

    def squares(self) -> Decay:
        """The rule whose output is A_t."""
        k = self.k.to(self.accumulator)
        one = torch.ones(1, 1, 1, 1, dtype=k.dtype, device=k.device)
        return Decay(one, one, self.rate.to(k.dtype) * k.square(), self.log_fade)

    def rule(self, squares: Tensor) -> DPLR:
        """The rule of S, given A_t ``[b t h k]``."""
        r = (squares + EMPTY).log() - self.center.to(squares.dtype)
        M = (-math.log(self.spread) * r / (1 + r.abs())).exp()
        w = (self.beta * self.k * M).to(self.k.dtype)
        return DPLR(self.q, w, self.v, self.k, None, self.log_decay)

    def as_dplr(self) -> DPLR:
        """The rule of S from the empty state, whose write keys depend on the keys before."""
        return self.rule(read_by_chunks(self.squares()))

    def attention_map(self) -> Map:
        return self.as_dplr().attention_map()

    def ltv(self) -> LTV:
        """Written along the keys of this record, which depend on those before, from the empty
        state.
        """
        return self.as_dplr().ltv()

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        return replace(super().keep(mask), log_fade=mask_stream(self.log_fade, mask))

    def restart(self, starts: Mask) -> Self:
        fade = add_resets(self, self.log_fade, starts)
        return replace(super().restart(starts), log_fade=fade)

    def effect(self, evaluate: Evaluation) -> Effect[Any]:
        del evaluate
        raise NoFiniteFormError(
            "what tokens do to the state of a Preconditioned depends on the squares of all keys"
            " before them, at every token; evaluate it by HeadSharded(group)"
        )

    def surviving_state(self) -> Tensor | None:
        return self.as_dplr().surviving_state()

    def step_operations(self, context: int) -> int:
        """Those of S, and of every key channel 4 for A, 8 for M and 2 for the key."""
        h, k, _ = self.operation_sizes
        return self.as_dplr().step_operations(context) + 14 * h * k

    def chunk_operations(self, context: int, size: int) -> int:
        h, k, _ = self.operation_sizes
        return self.as_dplr().chunk_operations(context, size) + (10 + 2 * size) * h * k
