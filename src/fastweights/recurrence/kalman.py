"""Gated KalmaNet's rule: ridge regression on all tokens, as ridged as it is large."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastweights.recurrence.base import Evaluation
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.effects import Effect, JointEffect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.mesa import Mesa
from fastweights.recurrence.solvers import Chebyshev, ChunkGram, Solver, TokenGram
from fastweights.recurrence.streams import heads_first, require_width
from fastweights.shapes import Keys, Map, Output, PerToken, Values

LEAST_SQUARE = 1e-30
"""What is left of ‖H‖² when all that was written has been forgotten: its root has digits in
float32, and a slope.
"""

Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Kalman(MatrixRule[Moments]):
    """Fast weights that solve a ridge regression on all tokens seen so far, mixed with plain ones.

    H_t = γ_t H_{t-1} + k_tᵀ k_t ;  G_t = γ_t G_{t-1} + k_tᵀ v_t ;  o_t = (q_t + μ_t (x_t - q_t))
    G_t, x_t = q_t (H_t + λ_t I)⁻¹, λ_t = a ‖H_t‖

    with the Frobenius norm, so that no condition number is above (a + 1) / a, in any precision.
    `Mesa` with a ridge of its own for every token; μ = 0 leaves linear attention. Source: Gated
    KalmaNet (2511.21016). The state is (H ``[b h k k]``, G ``[b h k v]``).

    Attributes:
        q, k: ``[b t h k]``
        v: ``[b t h v]``
        log_decay: log γ_t ≤ 0: None or ``[b t h 1]``; −inf empties the state
        mix: μ, in [0, 1], ``[b t h 1]``
        ratio: a > 0
        solver: of the regression, differentiated by solving once more
    """

    reads: ClassVar[tuple[str, ...]] = ("q", "mix")
    carries_sign: ClassVar[tuple[str, ...]] = ()

    q: Keys
    k: Keys
    v: Values
    log_decay: PerToken | None
    mix: PerToken
    ratio: float = 0.02
    solver: Solver = field(default_factory=Chebyshev)

    def __post_init__(self) -> None:
        if not self.ratio > 0:
            raise ValueError(f"Kalman(ratio={self.ratio}): a regression needs a ridge; use one > 0")
        _ = self.shape
        require_width("k", self.k, self.q.shape[-1])
        require_width("log_decay", self.log_decay, 1)
        require_width("mix", self.mix, 1)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        (b, _, h), k = self.shape, self.q.shape[-1]
        return (b, h, k, k), (b, h, k, self.values)

    def step(self, state: Moments) -> tuple[Output, Moments]:
        gram, memory = state
        q, k, v, mix = (heads_first(s, gram.dtype) for s in (self.q, self.k, self.v, self.mix))
        if self.log_decay is not None:
            decay = heads_first(self.log_decay, gram.dtype).exp()
            gram, memory = decay * gram, decay * memory
        gram, memory = gram + k.mT * k, memory + k.mT * v
        ridge = self._ridge(gram.square().sum((-2, -1), keepdim=True)).expand_as(gram[..., :1, :])
        system = (s.flatten(0, 1) for s in (q.expand_as(ridge), gram, ridge))
        x = self.solver.solve_differentiably(TokenGram, *system).view_as(ridge)
        o = (q + mix * (x - q)) @ memory
        return o.transpose(1, 2).to(self.output), (gram, memory)

    def chunk(self, state: Moments) -> tuple[Output, Moments]:
        """What the queries read, from the norms of all H_t, and then G and H, decayed together."""
        gram, memory = state
        reading = self._reading(self._queries(gram))
        # one `Decay` of values (v ‖ k) from (G ‖ H); what is read of H goes unused
        wide = torch.cat([s.expand(*self.shape, -1) for s in (self.v, self.k)], -1)
        o, after = replace(reading, v=wide).chunk(torch.cat([memory, gram], -1))
        memory, gram = after.split([self.values, gram.shape[-1]], -1)
        return o[..., : self.values].to(self.output), (gram, memory)

    def _ridge(self, squares: Tensor) -> Tensor:
        """λ of ‖H‖²; a where H has nothing to read, or less than `LEAST_SQUARE`."""
        return self.ratio * torch.where(squares < LEAST_SQUARE, 1, squares).sqrt()

    def _mesa(self, ridge: Tensor) -> Mesa:
        """The optimal fast weights under this ridge."""
        one = torch.ones(1, 1, 1, 1, dtype=self.accumulator, device=self.device)
        k = self.k.expand(*self.shape, -1)
        return Mesa(self.q, k, self.v, one, self.log_decay, ridge, self.solver)

    def _queries(self, gram: Tensor) -> Tensor:
        """q + μ (x - q) ``[b t h k]``, from H before the first token."""
        # ‖H_t‖², in which no ridge enters: any stands in for λ_t, which follows from it
        systems = ChunkGram.of(
            *self._mesa(torch.ones_like(self.mix[:1, :1])).operator_streams(gram)
        )
        squares = systems.squared_norm().unflatten(0, gram.shape[:2]).transpose(1, 2)
        x = self._mesa(self._ridge(squares)).optimal_queries(gram)
        q = self.q.to(x.dtype)
        return q + self.mix * (x - q)

    def _reading(self, queries: Tensor) -> Decay:
        return Decay(queries, self.k, self.v, self.log_decay)

    def as_decay(self) -> Decay:
        """The linear rule that reads G with the queries of this record, from the empty state."""
        gram = self.initial_state()[0]
        found = [self.q.new_zeros(*self.shape, self.q.shape[-1], dtype=self.accumulator)[:, :0]]
        for piece in self.split():
            found.append(piece._queries(gram))
            gram = Decay(piece.k, piece.k, piece.k, piece.log_decay).chunk(gram)[1]
        return self._reading(torch.cat(found, 1))

    def attention_map(self) -> Map:
        return self.as_decay().attention_map()

    def ltv(self) -> LTV:
        """Read by the queries of this record, which depend on its keys, from the empty state."""
        return self.as_decay().ltv()

    def effect(self, evaluate: Evaluation) -> Effect[Any]:
        written = torch.cat([s.expand(*self.shape, -1) for s in (self.k, self.v)], -1)
        return JointEffect(replace(self._reading(self.k), v=written).effect(evaluate))

    def surviving_state(self) -> Tensor | None:
        return self._reading(self.q).surviving_state()

    def step_operations(self, context: int) -> int:
        return self._mesa(torch.ones_like(self.mix)).step_operations(context)

    def chunk_operations(self, context: int, size: int) -> int:
        return self._mesa(torch.ones_like(self.mix)).chunk_operations(context, size)
