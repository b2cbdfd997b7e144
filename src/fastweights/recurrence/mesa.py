"""The Mesa rule: fast weights that are optimal, at every token, for all tokens seen so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.recurrence.base import (
    Recurrence,
    ShapeError,
    check_mask,
    heads_first,
    masked_stream,
    require_width,
    timed,
    with_resets,
)
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.products import Products, decayed_products
from fastweights.shapes import Keys, Map, Mask, Output, PerToken, Segments, Values


class Operator(ABC):
    """A symmetric positive definite matrix H_t + Λ per token, acting on rows ``[b h t k]``."""

    @abstractmethod
    def apply(self, p: Tensor) -> Tensor:
        """(H_t + Λ) p_t for every token."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """diag(H_t + Λ), ``[b h t k]``."""

    @abstractmethod
    def dense(self) -> Tensor:
        """H_t + Λ, ``[b h t k k]``."""


@dataclass(frozen=True, eq=False)
class TokenGram(Operator):
    """H + Λ of one token: ``gram [b h k k]``, ``ridge [b h 1 k]``."""

    gram: Tensor
    ridge: Tensor

    def apply(self, p: Tensor) -> Tensor:
        return p @ self.gram.mT + self.ridge * p

    def diagonal(self) -> Tensor:
        return self.gram.diagonal(dim1=-2, dim2=-1)[..., None, :] + self.ridge

    def dense(self) -> Tensor:
        return self.gram[..., None, :, :] + torch.diag_embed(self.ridge)


@dataclass(frozen=True, eq=False)
class ChunkGram(Operator):
    """H_t + Λ of all tokens of a chunk, never formed: H_t p is `Decay` with v = βk and q = p (MesaNet app. C).

    decays  the `Products` of ones: ``inner [b h t s]`` is ∏_{j=s+1..t} γ_j, ``query [b h t 1]`` is ∏_{j≤t} γ_j
    start   ``[b h k k]``, H before the chunk
    """

    decays: Products
    start: Tensor
    k: Tensor
    beta: Tensor
    ridge: Tensor

    @classmethod
    def of(cls, start: Tensor, k: Tensor, beta: Tensor, ridge: Tensor, log_decay: Tensor) -> Self:
        one = torch.ones_like(log_decay)
        return cls(decayed_products(one, one, log_decay), start, k, beta, ridge)

    def apply(self, p: Tensor) -> Tensor:
        own = ((p @ self.k.mT) * self.decays.inner) @ (self.beta * self.k)
        return own + self.decays.query * (p @ self.start.mT) + self.ridge * p

    def diagonal(self) -> Tensor:
        own = self.decays.inner @ (self.beta * self.k.square())
        return own + self.decays.query * self.start.diagonal(dim1=-2, dim2=-1)[..., None, :] + self.ridge

    def dense(self) -> Tensor:
        outer = self.k[..., :, None] * (self.beta * self.k)[..., None, :]
        own = (self.decays.inner @ outer.flatten(-2)).unflatten(-1, outer.shape[-2:])
        return own + self.decays.query[..., None] * self.start[..., None, :, :] + torch.diag_embed(self.ridge)


class Solver(ABC):
    """How (H_t + Λ) x_t = b_t is solved."""

    @abstractmethod
    def solve(self, operator: Operator, b: Tensor) -> Tensor:
        """x for the right-hand sides ``b [b h t k]``."""


@dataclass(frozen=True)
class ConjugateGradient(Solver):
    """At most `max_steps` steps from the Jacobi start b / diag; a token stops once its residual has fallen to
    `tol` of the start's (MesaNet Algorithm 1). Scale invariant: nothing is ever added to a denominator."""

    max_steps: int = 30
    tol: float | None = None

    def __post_init__(self) -> None:
        if self.max_steps < 0 or (self.tol is not None and self.tol < 0):
            raise ValueError(f"{self}: steps and tolerance are not negative")

    def solve(self, operator: Operator, b: Tensor) -> Tensor:
        scale = b.abs().amax(-1, keepdim=True)
        b = _ratio(b, scale)
        x = b / operator.diagonal()
        r = b - operator.apply(x)
        p, residual = r, r.square().sum(-1, keepdim=True)
        enough = residual * (self.tol or 0.0) ** 2
        for _ in range(self.max_steps):
            active = residual > enough
            if self.tol is not None and not active.any():
                break
            product = operator.apply(p)
            length = torch.where(active, _ratio(residual, (p * product).sum(-1, keepdim=True)), 0)
            x, r = x + length * p, r - length * product
            previous, residual = residual, torch.where(active, r.square().sum(-1, keepdim=True), residual)
            p = r + _ratio(residual, previous) * p
        return x * scale


@dataclass(frozen=True)
class Cholesky(Solver):
    """Direct and exact: every H_t is formed, ``k²`` numbers per token."""

    def solve(self, operator: Operator, b: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(operator.dense())
        return torch.cholesky_solve(b[..., None], factor).squeeze(-1)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    zero = b == 0
    return torch.where(zero, 0, a / torch.where(zero, 1, b))


class ImplicitSolve(torch.autograd.Function):
    """x = A(θ)⁻¹ b with db = A⁻¹ dx and dθ = -dbᵀ (∂A/∂θ) x (MesaNet app. C): the solver is never unrolled."""

    @staticmethod
    def forward(ctx: Any, solver: Solver, build: Callable[..., Operator], b: Tensor, *theta: Tensor | None) -> Tensor:
        x = solver.solve(build(*theta), b)
        ctx.solver, ctx.build = solver, build
        ctx.save_for_backward(x, *theta)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *theta = ctx.saved_tensors
        db = ctx.solver.solve(ctx.build(*theta), dx)
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
        grads: list[Tensor | None] = [None] * len(theta)
        if wanted:
            with torch.enable_grad():
                theta = [t if t is None else t.detach().requires_grad_() for t in theta]
                product = ctx.build(*theta).apply(x)
            found = torch.autograd.grad(product, cast(list[Tensor], [theta[i] for i in wanted]), -db)
            for i, grad in zip(wanted, found, strict=True):
                grads[i] = grad
        return None, None, db, *grads


@dataclass(frozen=True, eq=False)
class Mesa(Recurrence):
    """H_t = γ_t H_{t-1} + β_t k_tᵀ k_t ;  G_t = γ_t G_{t-1} + β_t k_tᵀ v_t ;  o_t = q_t (H_t + Λ)⁻¹ G_t

    The minimiser of ½ Σ_s ζ_ts β_s ‖v_s - k_s Φ‖² + ½ tr(Φᵀ Λ Φ), read by q_t      (MesaNet eq. 4-6)

    q, k       ``[b t h k]``
    v          ``[b t h v]``
    beta       β ≥ 0, ``[b t h 1]``
    log_decay  log γ_t ≤ 0: None or ``[b t h 1]``; −inf empties the state
    ridge      diag Λ > 0, ``[h k]`` or ``[b t h k]``
    solver     `ConjugateGradient` or `Cholesky`
    State (H ``[b h k k]``, G ``[b h k v]``).
    """

    q: Keys
    k: Keys
    v: Values
    beta: PerToken
    log_decay: PerToken | None
    ridge: Tensor
    solver: Solver = ConjugateGradient()

    def __post_init__(self) -> None:
        if self.ridge.dim() == 2:
            object.__setattr__(self, "ridge", self.ridge[None, None])
        _ = self.shape
        width = self.q.shape[-1]
        require_width("k", self.k, width)
        require_width("ridge", self.ridge, 1, width)
        require_width("beta", self.beta, 1)
        if self.log_decay is not None and self.log_decay.shape[-1] != 1:
            raise ShapeError(
                f"Mesa's log_decay has width {self.log_decay.shape[-1]}; H stays symmetric only under one decay "
                "per head: give it width 1"
            )
        if self.accumulator.is_complex:
            raise ShapeError("Mesa's streams are real; got a complex one")

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, _, h = self.shape
        keys = self.q.shape[-1]
        return (b, h, keys, keys), (b, h, keys, self.v.shape[-1])

    @property
    def values(self) -> int:
        return self.v.shape[-1]

    def step(self, state: tuple[Tensor, Tensor]) -> tuple[Output, tuple[Tensor, Tensor]]:
        gram, memory = state
        q, k, v, beta = (heads_first(s, gram.dtype) for s in (self.q, self.k, self.v, self.beta))
        if self.log_decay is not None:
            decay = heads_first(self.log_decay, gram.dtype).exp()
            gram, memory = decay * gram, decay * memory
        gram, memory = gram + k.mT * (beta * k), memory + k.mT * (beta * v)
        ridge = heads_first(self.ridge, gram.dtype).expand_as(k.expand(*gram.shape[:2], 1, -1))
        x = ImplicitSolve.apply(self.solver, TokenGram, q.expand_as(ridge), gram, ridge)
        return (x @ memory).transpose(1, 2).to(self.output), (gram, memory)

    def chunk(self, state: tuple[Tensor, Tensor]) -> tuple[Output, tuple[Tensor, Tensor]]:
        gram, memory = state
        x = self._solved(gram)
        reads = decayed_products(x, timed(self, self.k), self._log_decay())
        written = timed(self, self.beta) * timed(self, self.v)
        o = reads.inner @ written + reads.query @ memory
        gram = reads.advance(gram, timed(self, self.beta) * timed(self, self.k))
        return o.transpose(1, 2).to(self.output), (gram, reads.advance(memory, written))

    def optimal_queries(self, gram: Tensor | None = None) -> Tensor:
        """q*_t = (H_t + Λ)⁻¹ q_t, ``[b t h k]``: with them Mesa is `Decay` (see `as_decay`)."""
        return self._solved(self.initial_state()[0] if gram is None else gram).transpose(1, 2)

    def as_decay(self) -> Decay:
        """The linear rule that reads G with the optimal queries of this record, from the empty state."""
        return Decay(self.optimal_queries(), self.k, self.beta * self.v, self.log_decay)

    def _solved(self, gram: Tensor) -> Tensor:
        streams = (timed(self, s) for s in (self.k, self.beta, self.ridge))
        b, t, h = self.shape
        q = timed(self, self.q).expand(b, h, t, -1)
        return ImplicitSolve.apply(self.solver, ChunkGram.of, q, gram, *streams, self._log_decay())

    def _log_decay(self) -> Tensor:
        if self.log_decay is not None:
            return timed(self, self.log_decay)
        return torch.zeros(1, 1, len(self), 1, dtype=self.accumulator, device=self.device)

    def attention_map(self) -> Map:
        reading = self.as_decay()
        return replace(reading, v=self.v).attention_map() * heads_first(self.beta, self.accumulator).mT

    def ltv(self) -> LTV:
        """Read by the optimal queries of this record, which depend on its keys, from the empty state."""
        system = Decay(self.q, self.k, self.v, self.log_decay).ltv()
        return replace(system, B=system.B * self.beta, C=torch.cat([system.C[:, :0], *self._queries_by_pieces()], 1))

    def _queries_by_pieces(self) -> Iterator[Tensor]:
        """`optimal_queries` in time and memory linear in the record's length."""
        gram = torch.zeros(self.state_shapes[0], dtype=self.accumulator, device=self.device)
        for piece in self.pieces():
            yield piece.optimal_queries(gram)
            _, gram = Decay(piece.k, piece.k, piece.beta * piece.k, piece.log_decay).chunk(gram)

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        log_decay = None if self.log_decay is None else masked_stream(self.log_decay, mask)
        return replace(self, beta=masked_stream(self.beta, mask), log_decay=log_decay)

    def segments(self, ids: Segments) -> Self:
        check_mask(self, ids, "segment ids")
        return replace(self, log_decay=with_resets(self, self.log_decay, ids))
