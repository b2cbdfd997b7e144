"""The delta rule: before a value is written, what the state holds under its key is erased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastweights.recurrence.base import decay_factors, expand_time
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.products import Products, decay_products
from fastweights.recurrence.streams import heads_first, require_width
from fastweights.recurrence.transition import ErasingTransition
from fastweights.shapes import Keys, LogDecay, Map, Output, PerToken, Values


@dataclass(frozen=True, eq=False)
class Delta(MatrixRule[Tensor]):
    """What the state holds under a key is erased before a value is written under it.

    S_t = (I - β_t k_tᵀ k_t) diag(α_t) S_{t-1} + β_t k_tᵀ v_t ;  o_t = q_t S_t

    Source: MesaNet, Table 3. The state is ``[b h k v]``; it stays bounded for ‖k‖ = 1 and β in
    [0, 2].

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

    def chunk(self, state: Tensor) -> tuple[Output, Tensor]:
        """With u_t = β_t (v_t - k_t diag(α_t) S_{t-1}) the rule is `Decay` writing u, and u solves
        a unit lower triangular system: (I + β ⊙ strict P(k, k)) u = β (v - k̃ S_0), P the decayed
        products of keys with keys.
        """
        reads, erases = self._products()
        u = self._written(erases, expand_time(self, self.v) - erases.query @ state)
        o = reads.inner @ u + reads.query @ state
        return o.transpose(1, 2).to(self.output), reads.advance(state, u)

    def attention_map(self) -> Map:
        b, t, h = self.shape
        reads, erases = self._products()
        identity = torch.eye(t, dtype=self.accumulator, device=self.device)
        return (reads.inner @ self._written(erases, identity)).expand(b, h, t, t)

    def _products(self) -> tuple[Products, Products]:
        """The products of the queries and of the keys, both with the keys."""
        q, k = torch.broadcast_tensors(expand_time(self, self.q), expand_time(self, self.k))
        log_decay = None if self.log_decay is None else expand_time(self, self.log_decay)
        inner, query, key, carry = decay_products(torch.stack([q, k]), k, log_decay)
        return Products(inner[0], query[0], key, carry), Products(inner[1], query[1], key, carry)

    def _written(self, erases: Products, wanted: Tensor) -> Tensor:
        """u of `chunk`, for the values `wanted` that an untouched state lacks."""
        beta = expand_time(self, self.beta)
        system = (beta * erases.inner).tril(-1)
        return torch.linalg.solve_triangular(system, beta * wanted, upper=False, unitriangular=True)

    def ltv(self) -> LTV:
        q, k, beta = (
            s.to(self.accumulator).expand(*self.shape, -1) for s in (self.q, self.k, self.beta)
        )
        return LTV(
            A=ErasingTransition(decay_factors(self, self.log_decay), k, beta), B=beta * k, C=q
        )

    def step_operations(self, context: int) -> int:
        """As `Decay`'s, and 2 for reading what is erased."""
        del context
        h, k, v = self.operation_sizes
        return h * k * v * (6 if self.log_decay is None else 7)

    def chunk_operations(self, context: int, size: int) -> int:
        del context
        h, k, v = self.operation_sizes
        return h * (size * (4 * k + 3 * v) + 6 * k * v)
