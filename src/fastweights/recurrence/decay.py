"""The general recurrent form of linear models: decay the state, add an outer product, read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fastweights.recurrence.base import Evaluation, decay_factors, expand_time
from fastweights.recurrence.effects import DiagonalEffect, Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.products import Products, decay_products, multiply_decays
from fastweights.recurrence.scales import Scales
from fastweights.recurrence.streams import heads_first, require_width
from fastweights.recurrence.transition import DiagonalTransition
from fastweights.shapes import Keys, LogDecay, Map, Mask, Output, Skip, Values


@dataclass(frozen=True, eq=False)
class Decay(MatrixRule[Tensor]):
    """The state decays, an outer product is added to it, and the query reads it.

    S_t = diag(α_t) S_{t-1} + k_tᵀ v_t ;  o_t = q_t S_t + skip_t v_t

    The general recurrent form of linear models (MetaLA eq. 13-14; DSF eq. 11). The state is
    ``[b h k v]``; q, k and log_decay may be complex, and then o and the state are.

    Attributes:
        q: ``[b t h k]``
        k: ``[b t h k]``, or None for the tied key 1 - α_t (MetaLA, HGRN)
        v: ``[b t h v]``
        log_decay: log α_t ≤ 0: None (no decay), ``[b t h 1]`` or ``[b t h k]``; −inf empties the
            state
        skip: ``[b t h 1]`` or ``[b t h v]``: DSF's D_t
    """

    carries_sign: ClassVar[tuple[str, ...]] = ("q", "v", "skip")

    q: Keys
    k: Keys | None
    v: Values
    log_decay: LogDecay | None
    skip: Skip | None = None

    def __post_init__(self) -> None:
        if self.k is None and self.log_decay is None:
            raise ValueError("Decay needs k, or log_decay for the tied key 1 - α; both are None")
        _ = self.shape
        width = self.q.shape[-1]
        require_width("k", self.k, width)
        require_width("log_decay", self.log_decay, *((width,) if self.k is None else (1, width)))
        require_width("skip", self.skip, 1, self.v.shape[-1])

    @property
    def key(self) -> Tensor:
        """k, or the tied key 1 - α = -expm1(log α) where k is None."""
        if self.k is not None:
            return self.k
        assert self.log_decay is not None
        return -torch.expm1(self.log_decay)

    def step(self, state: Tensor) -> tuple[Output, Tensor]:
        q, k, v = (heads_first(s, state.dtype) for s in (self.q, self.key, self.v))
        if self.log_decay is not None:
            state = heads_first(self.log_decay, state.dtype).exp().mT * state
        state = state + k.mT * v
        return self.add_skip((q @ state).transpose(1, 2)), state

    def chunk(self, state: Tensor) -> tuple[Output, Tensor]:
        products, v = self._products(), expand_time(self, self.v)
        o = products.inner @ v + products.query @ state
        return self.add_skip(o.transpose(1, 2)), products.advance(state, v)

    def add_skip(self, o: Tensor) -> Output:
        if self.skip is not None:
            o = o + self.skip * self.v
        return o.to(self.output)

    def attention_map(self) -> Map:
        require_width("skip (of a map)", self.skip, 1)
        b, t, h = self.shape
        inner = self._products().inner
        if self.skip is not None:
            inner = inner + torch.diag_embed(heads_first(self.skip, inner.dtype).squeeze(-1))
        return inner.expand(b, h, t, t)

    def _products(self) -> Products:
        log_decay = None if self.log_decay is None else expand_time(self, self.log_decay)
        return decay_products(expand_time(self, self.q), expand_time(self, self.key), log_decay)

    def ltv(self) -> LTV:
        q, k = (s.to(self.accumulator).expand(*self.shape, -1) for s in (self.q, self.key))
        return LTV(
            A=DiagonalTransition(decay_factors(self, self.log_decay), q.shape[-1]),
            B=k,
            C=q,
            D=self.skip,
        )

    def restart(self, starts: Mask) -> Self:
        return replace(super().restart(starts), k=self.key)  # a tied key is not that of a reset

    def effect(self, evaluate: Evaluation) -> Effect[Tensor]:
        _, added = evaluate(self, self.initial_state())
        return DiagonalEffect(self.total_decay, added)

    @property
    def total_decay(self) -> Tensor:
        """The product of all tokens' decays, ``[b h k|1 1]``."""
        if self.log_decay is None:
            return torch.ones(1, 1, 1, 1, dtype=self.accumulator, device=self.device)
        return multiply_decays(expand_time(self, self.log_decay))

    def amplify(self, scales: Scales, log_decay: Tensor) -> tuple[Decay, Tensor]:
        written = scales.written
        skip = None if self.skip is None else self.skip * written
        return Decay(self.q, self.key * written, self.v, log_decay, skip), scales.after
