"""A query reads the state that precedes its token, and the token itself with a weight of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.base import Evaluation, decay_factors
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.scales import EMPTY_LOG_SCALE, Scales
from fastweights.recurrence.streams import (
    heads_first,
    mask_stream,
    require_width,
)
from fastweights.recurrence.transition import DelayedTransition
from fastweights.recurrence.wrapper import Composed
from fastweights.shapes import Keys, LogDecay, Map, Mask, Output, PerToken, Values


@dataclass(frozen=True, eq=False)
class Bonus(Composed[Tensor], MatrixRule[Tensor]):
    """The query reads the state before its token, and the token with a weight of its own.

    o_t = q_t S_{t-1} + bonus_t v_t ;  S_t = diag(α_t) S_{t-1} + k_tᵀ v_t

    Source: RWKV, eq. 16. The state is ``[b h k v]``, as `Decay` has it.

    Attributes:
        q, k, v, log_decay: as in `Decay`
        bonus: ``[b t h 1]``, what the current token weighs in its own output
    """

    carries_sign: ClassVar[tuple[str, ...]] = ()

    q: Keys
    k: Keys
    v: Values
    log_decay: LogDecay | None
    bonus: PerToken

    def __post_init__(self) -> None:
        _ = self.shape
        width = self.q.shape[-1]
        require_width("k", self.k, width)
        require_width("log_decay", self.log_decay, 1, width)
        require_width("bonus", self.bonus, 1)

    def shift_queries(self) -> Decay:
        """The rule that reads S_t with the query of token t + 1."""
        v = self.v.to(self.accumulator).expand(*self.shape, -1)
        return Decay(self.q.roll(-1, dims=1), self.k, v, self.log_decay)

    def evaluate_with(self, evaluate: Evaluation, state: Tensor) -> tuple[Output, Tensor]:
        """(o, state) from the plain rule, read one token behind."""
        o, after = evaluate(self.shift_queries(), state)
        first = (heads_first(self.q[:, :1], state.dtype) @ state).transpose(1, 2)
        o = torch.cat([first, o[:, :-1]], dim=1) + self.bonus * self.v
        return o.to(self.output), after

    def attention_map(self) -> Map:
        below = F.pad(self.shift_queries().attention_map()[..., :-1, :], (0, 0, 1, 0))
        return below + torch.diag_embed(heads_first(self.bonus, below.dtype).squeeze(-1))

    def ltv(self) -> LTV:
        """On the state and the one before it, which is what a query reads: 2k rows, of which k only
        wait.
        """
        q, k = (s.to(self.accumulator).expand(*self.shape, -1) for s in (self.q, self.k))
        decay, width = decay_factors(self, self.log_decay), q.shape[-1]
        return LTV(
            DelayedTransition(decay, 2 * width),
            B=F.pad(k, (0, width)),
            C=F.pad(q, (width, 0)),
            D=self.bonus,
        )

    def restart(self, starts: Mask) -> Self:
        # a document's first query would read the state of the document before it
        return replace(super().restart(starts), q=mask_stream(self.q, ~starts))

    def effect(self, evaluate: Evaluation) -> Effect[Tensor]:
        return Decay(self.q, self.k, self.v, self.log_decay).effect(evaluate)

    def amplify(self, scales: Scales, log_decay: Tensor) -> tuple[Bonus, Tensor]:
        # a query that is zero reads nothing, whatever a document before it has left
        reading = (self.q != 0).any(-1, keepdim=True)
        before = torch.where(reading, scales.before, EMPTY_LOG_SCALE)
        # the output is divided by the larger of what the state and what the token weighs
        read = torch.maximum(before, scales.gain).clamp(min=scales.least).detach()
        q, own = scales.factors(before - read), scales.factors(scales.gain - read)
        k, bonus = self.k * scales.written, self.bonus * own
        return Bonus(self.q * q, k, self.v, log_decay, bonus), read
