"""The Mesa rule: fast weights that are optimal, at every token, for all tokens seen so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fastweights.recurrence.base import Evaluation, expand_time
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.products import decay_products
from fastweights.recurrence.solvers import (
    Chebyshev,
    ChunkGram,
    ConjugateGradient,
    ShermanMorrison,
    Solver,
    TokenGram,
    invert_operator,
    ratio,
)
from fastweights.recurrence.streams import ShapeError, State, heads_first, require_width
from fastweights.shapes import Keys, Map, Output, PerToken, Values


@dataclass(frozen=True, eq=False)
class Mesa(MatrixRule[tuple[Tensor, ...]]):
    """Fast weights that are optimal, at every token, for all tokens seen so far.

    H_t = γ_t H_{t-1} + β_t k_tᵀ k_t ;  G_t = γ_t G_{t-1} + β_t k_tᵀ v_t ;  o_t = q_t (H_t + Λ)⁻¹
    G_t

    The minimiser Φ of ½ Σ_s ζ_ts β_s ‖v_s - k_s Φ‖² + ½ tr(Φᵀ Λ Φ), read by q_t (MesaNet
    eq. 4-6). The state is (H ``[b h k k]``, G ``[b h k v]``), and R ≈ (H + Λ)⁻¹ ``[b h k k]`` for
    `ShermanMorrison`.

    Attributes:
        q, k: ``[b t h k]``
        v: ``[b t h v]``
        beta: β ≥ 0, ``[b t h 1]``
        log_decay: log γ_t ≤ 0: None or ``[b t h 1]``; −inf empties the state
        ridge: diag Λ > 0, ``[b t h k]``; ``[h k]``, which it is made of, is given too, and
            width 1 for λ I
        solver: `ConjugateGradient`, `Chebyshev`, `Cholesky`, `ShermanMorrison` or `UnrolledSolver`
    """

    reads: ClassVar[tuple[str, ...]] = ("q", "ridge")
    writes: ClassVar[tuple[str, ...]] = ("beta",)
    carries_sign: ClassVar[tuple[str, ...]] = ("beta", "ridge")

    q: Keys
    k: Keys
    v: Values
    beta: PerToken
    log_decay: PerToken | None
    ridge: Tensor
    solver: Solver = field(default_factory=ConjugateGradient)

    def __post_init__(self) -> None:
        if self.ridge.dim() == 2:
            object.__setattr__(self, "ridge", self.ridge[None, None])
        _ = self.shape
        width = self.q.shape[-1]
        require_width("k", self.k, width)
        require_width("ridge", self.ridge, 1, width)
        object.__setattr__(self, "ridge", self.ridge.expand(-1, -1, -1, width))
        require_width("beta", self.beta, 1)
        if self.log_decay is not None and self.log_decay.shape[-1] != 1:
            raise ShapeError(
                f"Mesa's log_decay has width {self.log_decay.shape[-1]}; H stays symmetric only"
                " under one decay per head: give it width 1"
            )
        if self.accumulator.is_complex:
            raise ShapeError("Mesa's streams are real; got a complex one")

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, _, h = self.shape
        keys = self.q.shape[-1]
        square = (b, h, keys, keys)
        inverse = (square,) if isinstance(self.solver, ShermanMorrison) else ()
        return square, (b, h, keys, self.v.shape[-1]), *inverse

    def step(self, state: tuple[Tensor, ...]) -> tuple[Output, tuple[Tensor, ...]]:
        gram, memory = state[:2]
        k, v, beta = (heads_first(s, gram.dtype) for s in (self.k, self.v, self.beta))
        decay = heads_first(self._log_decay(), gram.dtype).exp()
        gram = decay * gram + k.mT * (beta * k)
        memory = decay * memory + k.mT * (beta * v)
        if isinstance(self.solver, ShermanMorrison) and not torch.is_grad_enabled():
            x, inverse = self._step_sherman_morrison(self.solver, gram, state[2])
            return (x @ memory).transpose(1, 2).to(self.output), (gram, memory, inverse)
        q, ridge = self._flatten_heads(self.q), self._flatten_heads(self.ridge)
        x = self.solver.solve_differentiably(TokenGram, q, gram.flatten(0, 1), ridge).unflatten(
            0, gram.shape[:2]
        )
        return (x @ memory).transpose(1, 2).to(self.output), self.final_state(gram, memory)

    def chunk(self, state: tuple[Tensor, ...]) -> tuple[Output, tuple[Tensor, ...]]:
        gram, memory = state[:2]
        x = self._solve_queries(gram)
        # o_t = q*_t G_t: G is a `Decay` state of values βv, and H under the same keys one of βk
        reads = decay_products(x, expand_time(self, self.k), self.log_decays())
        written = expand_time(self, self.beta) * expand_time(self, self.v)
        o = reads.inner @ written + reads.query @ memory
        gram = reads.advance(gram, expand_time(self, self.beta) * expand_time(self, self.k))
        return o.transpose(1, 2).to(self.output), self.final_state(
            gram, reads.advance(memory, written)
        )

    def final_state(self, gram: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """The state of this record that holds H and G of its last token."""
        return _complete_state(self.solver, gram, memory, self._last_ridge)

    @property
    def _last_ridge(self) -> Tensor:
        """Λ of the last token, ``[b h 1 k]``."""
        return expand_time(self, self.ridge)[:, :, -1:].expand(*self.state_shapes[0][:2], -1, -1)

    def effect(self, evaluate: Evaluation) -> Effect[tuple[Tensor, ...]]:
        """Of (H ‖ G), which no solver is needed for."""
        written = torch.cat([s.expand(*self.shape, -1) for s in (self.k, self.v)], -1)
        wide = Decay(self.k, self.k, self.beta * written, self.log_decay)
        return MesaEffect(wide.effect(evaluate), self._last_ridge, self.solver)

    def optimal_queries(self, gram: Tensor | None = None) -> Tensor:
        """q*_t = (H_t + Λ)⁻¹ q_t, ``[b t h k]``: with them Mesa is `Decay` (see `as_decay`)."""
        return self._solve_queries(self._gram() if gram is None else gram).transpose(1, 2)

    def as_decay(self) -> Decay:
        """The linear rule that reads G with the optimal queries of this record, from the empty
        state.
        """
        return Decay(self.optimal_queries(), self.k, self.beta * self.v, self.log_decay)

    def iterate_systems(
        self, state: State | None = None, size: int = 32
    ) -> Iterator[tuple[ChunkGram, Tensor]]:
        """The systems (H_t + Λ) x = q_t that this record solves from `state`, `size` tokens at a
        time.
        """
        gram = (self.initial_state() if state is None else self.adopt(state))[0]
        for first in range(0, len(self), size):
            part = self[first : first + size]
            yield ChunkGram.of(*part.operator_streams(gram)), part._flatten_heads(part.q)
            keys = expand_time(part, part.k)
            gram = decay_products(keys, keys, part.log_decays()).advance(
                gram, expand_time(part, part.beta) * keys
            )

    def _step_sherman_morrison(
        self, solver: ShermanMorrison, gram: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q* of the one token, and R after it."""
        q, k, beta, decay, ridge = (
            self._flatten_heads(s)
            for s in (self.q, self.k, self.beta, self._log_decay().exp(), self.ridge)
        )
        # R after the token's rank-one update; what it makes of q is checked, and solved for if off
        moved = solver.advance(inverse.flatten(0, 1), decay, k, beta)
        (x, _), moved = solver.solve_from(moved, TokenGram(gram.flatten(0, 1), ridge), q)
        return x.unflatten(0, gram.shape[:2]), moved.view_as(inverse)

    def _gram(self) -> Tensor:
        """H before the first token."""
        return torch.zeros(self.state_shapes[0], dtype=self.accumulator, device=self.device)

    def _solve_queries(self, gram: Tensor) -> Tensor:
        x = self.solver.solve_differentiably(
            ChunkGram.of, self._flatten_heads(self.q), *self.operator_streams(gram)
        )
        return x.unflatten(0, gram.shape[:2])

    def operator_streams(self, gram: Tensor) -> tuple[Tensor, ...]:
        """What `ChunkGram.of` takes."""
        streams = (self.k, self.beta, self.ridge, self._log_decay())
        return gram.flatten(0, 1), *map(self._flatten_heads, streams)

    def _flatten_heads(self, stream: Tensor) -> Tensor:
        """``[b t h ·]`` → ``[b·h t ·]``, everything spelled out."""
        b, t, h = self.shape
        return heads_first(stream, self.accumulator).expand(b, h, t, -1).flatten(0, 1)

    def log_decays(self) -> Tensor:
        """log γ ``[b h t 1]``, 0 where there is none."""
        return expand_time(self, self._log_decay())

    def _log_decay(self) -> Tensor:
        if self.log_decay is not None:
            return self.log_decay
        return torch.zeros(1, 1, 1, 1, dtype=self.accumulator, device=self.device)

    def attention_map(self) -> Map:
        reading = self.as_decay()
        # the map of values βv, whose column s times β_s is that of v
        return (
            replace(reading, v=self.v).attention_map() * heads_first(self.beta, self.accumulator).mT
        )

    def ltv(self) -> LTV:
        """Read by the optimal queries of this record, which depend on its keys, from the empty
        state.
        """
        system = Decay(self.q, self.k, self.v, self.log_decay).ltv()
        return replace(
            system,
            B=system.B * self.beta,
            C=torch.cat([system.C[:, :0], *self._queries_by_pieces()], 1),
        )

    def _queries_by_pieces(self) -> Iterator[Tensor]:
        """`optimal_queries` in time and memory linear in the record's length."""
        gram = self._gram()
        for piece in self.split():
            yield piece.optimal_queries(gram)
            _, gram = Decay(piece.k, piece.k, piece.beta * piece.k, piece.log_decay).chunk(gram)

    def surviving_state(self) -> Tensor | None:
        return self.as_decay().surviving_state()

    def step_operations(self, context: int) -> int:
        """H and G as `Decay`'s states, G read, and the steps of the solver."""
        del context
        h, k, v = self.operation_sizes
        return h * (3 * k * k + 5 * k * v + self._solver_steps * (2 * k * k + 12 * k))

    def chunk_operations(self, context: int, size: int) -> int:
        del context
        h, k, v = self.operation_sizes
        solve = self._solver_steps * (4 * size * k + 2 * k * k + 10 * k)
        return h * (solve + 2 * size * (k + v) + 4 * k * v + 2 * k * k)

    @property
    def _solver_steps(self) -> int:
        """Steps of an iteration; a direct solver counts as the k steps that would be exact."""
        solver = self.solver
        iterates = isinstance(solver, ConjugateGradient | Chebyshev)
        return solver.max_steps if iterates else self.q.shape[-1]


@dataclass(frozen=True, eq=False)
class MesaEffect(Effect[tuple[Tensor, ...]]):
    """The effect on H and G, and what else the state of the last token holds.

    Attributes:
        wide: on (H ‖ G), ``[b h k k+v]``
        ridge: Λ of the last token, ``[b h 1 k]``
        solver: the record's
    """

    wide: Effect[Tensor]
    ridge: Tensor
    solver: Solver

    def after(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        gram, memory = state[:2]
        wide = self.wide.after(torch.cat([gram, memory], -1))
        k = gram.shape[-1]
        return _complete_state(self.solver, wide[..., :k], wide[..., k:], self.ridge)


def _complete_state(
    solver: Solver, gram: Tensor, memory: Tensor, ridge: Tensor
) -> tuple[Tensor, ...]:
    """The state that holds H and G under Λ ``[b h 1 k]``, with what the solver carries."""
    if not isinstance(solver, ShermanMorrison):
        return gram, memory
    with torch.no_grad():
        operator = TokenGram(gram.flatten(0, 1), ridge.flatten(0, 1))
        return gram, memory, invert_operator(operator).view_as(gram)


class SolverStatistics(NamedTuple):
    """Of every token and head, ``[b t h]``: the steps taken, and ‖q - (H + Λ) x‖ / ‖q‖ (MesaNet
    Fig. 7).
    """

    steps: Tensor
    residual: Tensor


@torch.no_grad()
def solver_statistics(recurrence: Mesa, state: State | None = None) -> SolverStatistics:
    """What the solver of this record does on its systems, from `state` or the empty one."""
    steps, residuals = [], []
    for operator, q in recurrence.iterate_systems(state):
        x, taken = recurrence.solver.solve(operator, q)
        steps.append(taken)
        residuals.append(
            ratio((q - operator.apply(x)).norm(dim=-1, keepdim=True), q.norm(dim=-1, keepdim=True))
        )
    return SolverStatistics(_by_head(recurrence, steps), _by_head(recurrence, residuals))


@torch.no_grad()
def condition_numbers(recurrence: Mesa, state: State | None = None) -> Tensor:
    """The condition number of every H_t + Λ_t, ``[b t h]`` (MesaNet Fig. 13)."""
    found = []
    for operator, _ in recurrence.iterate_systems(state):
        # the systems of a `Signed` record, σ (H + Λ), have eigenvalues below 0 where σ = -1
        curvature = torch.linalg.eigvalsh(operator.dense()).abs()
        found.append(curvature.amax(-1, keepdim=True) / curvature.amin(-1, keepdim=True))
    return _by_head(recurrence, found)


def _by_head(recurrence: Mesa, rows: list[Tensor]) -> Tensor:
    """``[b·h t 1]`` pieces → ``[b t h]``"""
    b, t, h = recurrence.shape
    return torch.cat(rows, 1).reshape(b, h, t).transpose(1, 2)
