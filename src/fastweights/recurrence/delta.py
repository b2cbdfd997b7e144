"""The delta rule: before a value is written, what the state holds under its key is erased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastweights.recurrence.base import decay_factors
from fastweights.recurrence.dplr import DPLR
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.streams import heads_first, require_width
from fastweights.recurrence.transition import ErasingTransition
from fastweights.shapes import Keys, LogDecay, Map, Output, PerToken, Values


@dataclass(frozen=True, eq=False)
class Delta(MatrixRule[Tensor]):
    """What the state holds under a key is erased before a value is written under it.

    S_t = (I - β_t k_tᵀ k_t) diag(α_t) S_{t-1} + β_t k_tᵀ v_t ;  o_t = q_t S_t

    `DPLR` with w = b = βk and a = k. Source: MesaNet, Table 3. The state is ``[b h k v]``; it stays
    bounded for ‖k‖ = 1 and β in [0, 2].

    Attributes:
        q, k: ``[b t h k]``
        v: ``[b t h v]``
        beta: ``[b t h 1]``
        log_decay: log α_t ≤ 0: None (DeltaNet), ``[b t h 1]`` (gated DeltaNet) or ``[b t h k]``;
            −inf empties the state
    """

    writes: ClassVar[tuple[str, ...]] = ("beta",)

    q: Keys
    k: Keys
    v: Values
    beta: PerToken
    log_decay: LogDecay | None = None

    def __post_init__(self) -> None:
        _ = self.shape
        width = self.q.shape[-1]
        require_width("k", self.k, width)
        require_width("beta", self.beta, 1)
        require_width("log_decay", self.log_decay, 1, width)

    def step(self, state: Tensor) -> tuple[Output, Tensor]:
        q, k, v, beta = (heads_first(s, state.dtype) for s in (self.q, self.k, self.v, self.beta))
        if self.log_decay is not None:
            state = heads_first(self.log_decay, state.dtype).exp().mT * state
        state = state + k.mT * (beta * (v - k @ state))
        return (q @ state).transpose(1, 2).to(self.output), state

    @property
    def general(self) -> DPLR:
        """The rule with keys apart: βk writes, and erases what k reads."""
        k, beta = self.k.to(self.accumulator), self.beta.to(self.accumulator)
        return DPLR(self.q, beta * k, self.v, self.k, None, self.log_decay)

    def chunk(self, state: Tensor) -> tuple[Output, Tensor]:
        return self.general.chunk(state)

    def attention_map(self) -> Map:
        return self.general.attention_map()

    def ltv(self) -> LTV:
        q, k, beta = (
            s.to(self.accumulator).expand(*self.shape, -1) for s in (self.q, self.k, self.beta)
        )
        return LTV(
            A=ErasingTransition(decay_factors(self, self.log_decay), k, beta), B=beta * k, C=q
        )

    def step_operations(self, context: int) -> int:
        return self.general.step_operations(context)

    def chunk_operations(self, context: int, size: int) -> int:
        return self.general.chunk_operations(context, size)
