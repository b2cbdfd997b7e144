"""The decay of selective state spaces: one number per token and head, times a rate of each key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.recurrence.base import Evaluation, Recurrence, expand_time
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.effects import DiagonalEffect, Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.streams import require_width
from fastweights.recurrence.wrapper import Composed
from fastweights.shapes import Keys, Map, Output, PerToken, Values


@dataclass(frozen=True, eq=False)
class Selective(Composed[Tensor], MatrixRule[Tensor]):
    """`Decay` whose log α_t = log_decay_t · rate, which a kernel need not write out.

    Source: Mamba, whose log α_t = -Δ_t exp(log A) is N times as large as Δ.

    Attributes:
        q, k, v: as in `Decay`
        log_decay: ``[b t h 1]``, ≤ 0; −inf empties the state
        rate: of every key, > 0: ``[b t h k]``, most often constant in time
    """

    q: Keys
    k: Keys
    v: Values
    log_decay: PerToken
    rate: Keys

    def __post_init__(self) -> None:
        _ = self.shape
        width = self.q.shape[-1]
        require_width("k", self.k, width)
        require_width("log_decay", self.log_decay, 1)
        require_width("rate", self.rate, width)

    @property
    def plain(self) -> Decay:
        """The same rule with its decay written out."""
        reset, finite = self._split_decay()
        log_decay = torch.addcmul(reset, finite, self.rate)
        return Decay(self.q, self.k, self.v, log_decay)

    def _split_decay(self) -> tuple[Tensor, Tensor]:
        """(−inf or 0, the rest) of log_decay: −inf is added, not multiplied, for 0, the gradient of
        the product, times it would be none.
        """
        empty = self.log_decay == -torch.inf
        finite = torch.where(empty, 0.0, self.log_decay)
        return torch.zeros_like(finite).masked_fill(empty, -torch.inf), finite

    def effect(self, evaluate: Evaluation) -> Effect[Tensor]:
        _, added = evaluate(self, self.initial_state())
        # summed over time at once: the product is never written out
        streams = (*self._split_decay(), self.rate)
        reset, finite, rate = (expand_time(self, stream) for stream in streams)
        total = torch.einsum("bhti,bhtk->bhki", finite, rate) + reset.sum(2, keepdim=True)
        return DiagonalEffect(total.exp(), added)

    @property
    def innermost(self) -> Recurrence:
        return self.plain

    @property
    def reader(self) -> Recurrence:
        return self.plain

    def evaluate_with(self, evaluate: Evaluation, state: Tensor) -> tuple[Output, Tensor]:
        """(o, state) from the plain rule."""
        return evaluate(self.plain, state)

    def attention_map(self) -> Map:
        return self.plain.attention_map()

    def ltv(self) -> LTV:
        return self.plain.ltv()
