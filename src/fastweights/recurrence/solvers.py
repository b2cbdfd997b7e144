"""Solvers of (H_t + Λ) x_t = b_t for every token, and how their solutions are differentiated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastweights.recurrence.derivatives import (
    are_transforms_nested,
    gradients_of,
    is_followed_on,
    require_one_at_a_time,
    transform_here,
)
from fastweights.recurrence.products import Products, decay_products


class Operator(ABC):
    """A positive definite matrix H_t + Λ_t for every token of n tiles, acting on rows ``[n t k]``.

    Attributes:
        ridge: diag Λ, ``[n t k]`` or of width 1 along t.
    """

    ridge: Tensor

    @abstractmethod
    def apply(self, p: Tensor) -> Tensor:
        """Return (H_t + Λ) p_t for every token."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return diag(H_t + Λ), ``[n t k]``."""

    @abstractmethod
    def squared_norm(self) -> Tensor:
        """Return ‖H_t‖², the sum of the squares of all elements, ``[n t 1]``."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return H_t + Λ, ``[n t k k]``."""

    @abstractmethod
    def take(self, tiles: Tensor) -> Self:
        """Return the operator of the chosen tiles."""


@dataclass(frozen=True, eq=False)
class TokenGram(Operator):
    """The operator H + Λ of one token: ``gram [n k k]``, ``ridge [n 1 k]``."""

    gram: Tensor
    ridge: Tensor

    def apply(self, p: Tensor) -> Tensor:
        return p @ self.gram.mT + self.ridge * p

    def diagonal(self) -> Tensor:
        return self.gram.diagonal(dim1=-2, dim2=-1)[..., None, :] + self.ridge

    def squared_norm(self) -> Tensor:
        return self.gram.square().sum((-2, -1))[:, None, None]

    def dense(self) -> Tensor:
        return self.gram[..., None, :, :] + torch.diag_embed(self.ridge)

    def take(self, tiles: Tensor) -> TokenGram:
        return TokenGram(self.gram[tiles], self.ridge[tiles])


@dataclass(frozen=True, eq=False)
class ChunkGram(Operator):
    """The operators H_t + Λ of all tokens of a chunk, never formed.

    H_t p is `Decay` with v = βk and q = p (MesaNet app. C).

    Attributes:
        inner: ``[n t s]``, ∏_{j=s+1..t} γ_j.
        query: ``[n t 1]``, ∏_{j≤t} γ_j.
        start: ``[n k k]``, H before the chunk.
        k: ``[n t k]``, keys.
        beta: ``[n t 1]``, writing strengths.
        ridge: Λ, broadcast over tokens.
    """

    inner: Tensor
    query: Tensor
    start: Tensor
    k: Tensor
    beta: Tensor
    ridge: Tensor

    @classmethod
    def of(cls, start: Tensor, k: Tensor, beta: Tensor, ridge: Tensor, log_decay: Tensor) -> Self:
        """Build the operator from streams ``[n t ·]``."""
        decays = decays_alone(log_decay)
        return cls(decays.inner, decays.query, start, k, beta, ridge)

    def apply(self, p: Tensor) -> Tensor:
        # Σ_{s≤t} (∏γ) (p_t·k_s) β_s k_s of the chunk's tokens, then ∏γ H p_t of those before
        own = ((p @ self.k.mT) * self.inner) @ (self.beta * self.k)
        return own + self.query * (p @ self.start.mT) + self.ridge * p

    def diagonal(self) -> Tensor:
        own = self.inner @ (self.beta * self.k.square())
        return own + self.query * self.start.diagonal(dim1=-2, dim2=-1)[..., None, :] + self.ridge

    def squared_norm(self) -> Tensor:
        # H_t = Σ_s w_ts k_sᵀ k_s + g_t H, and ‖kᵀk · pᵀp‖ = (k·p)², k H kᵀ for kᵀk and H
        weights = self.inner * self.beta.mT
        own = ((weights @ (self.k @ self.k.mT).square()) * weights).sum(-1, keepdim=True)
        both = weights @ ((self.k @ self.start) * self.k).sum(-1, keepdim=True)
        before = self.start.square().sum((-2, -1))[:, None, None]
        return own + self.query * (2 * both + self.query * before)

    def dense(self) -> Tensor:
        outer = self.k[..., :, None] * (self.beta * self.k)[..., None, :]
        own = (self.inner @ outer.flatten(-2)).unflatten(-1, outer.shape[-2:])
        return (
            own + self.query[..., None] * self.start[..., None, :, :] + torch.diag_embed(self.ridge)
        )

    def take(self, tiles: Tensor) -> ChunkGram:
        streams = (self.inner, self.query, self.start, self.k, self.beta, self.ridge)
        return ChunkGram(*(s[tiles] for s in streams))


def decays_alone(log_decay: Tensor) -> Products:
    """Return the `Products` of queries and keys of width 1 that are all one."""
    one = torch.ones_like(log_decay)
    return decay_products(one, one, log_decay)


Parts = tuple[Tensor, ...]
"""Where an iteration stands."""


class SolverResult(NamedTuple):
    """A solution x ``[n t k]``, and the number of steps that each token took, ``[n t 1]``."""

    x: Tensor
    steps: Tensor


class Solver(ABC):
    """A method to solve (H_t + Λ) x_t = b_t."""

    @abstractmethod
    def solve(self, operator: Operator, b: Tensor) -> SolverResult:
        """Solve for the right-hand sides ``b [n t k]``."""

    def solve_differentiably(
        self, build: Callable[..., Operator], b: Tensor, *theta: Tensor
    ) -> Tensor:
        """Solve for the operator ``build(*theta)``, differentiably in b and θ by solving once
        more."""
        if are_transforms_nested():
            return self._solve_densely(build, b, *theta)
        return solve_implicitly(partial(_solve, self, build), partial(_multiply, build), b, *theta)

    def _solve_densely(self, build: Callable[..., Operator], b: Tensor, *theta: Tensor) -> Tensor:
        """The solution that is found, with all derivatives of the exact one: by an inverse, as the
        gradient of linalg.solve's tangent is wrong (torch 2.8 to 2.14).
        """
        exact = (b[..., None, :] @ torch.linalg.inv(build(*theta).dense())).squeeze(-2)
        found = self.solve(build(*(s.detach() for s in theta)), b.detach()).x
        return exact + (found - exact).detach()

    def repeat(
        self, step: Callable[[Any, Parts], Parts], operator: Operator, start: Parts, count: int
    ) -> Parts:
        """Return what `count` steps make of the tensors `start`."""
        for _ in range(count):
            start = step(operator, start)
        return start

    def draw_for_training(self) -> Solver:
        """Return this solver with a random number of steps, as training a model for any number of
        steps needs it (MesaNet app. I)."""
        return self


class _Iterate(NamedTuple):
    """Where conjugate gradients stand in some tiles: all ``[n t ·]``."""

    x: Tensor
    r: Tensor
    p: Tensor
    residual: Tensor
    enough: Tensor
    steps: Tensor

    @classmethod
    def start(cls, operator: Operator, b: Tensor, tol: float) -> _Iterate:
        # the residual of the Jacobi start is the first direction too
        x = b / operator.diagonal()
        r = b - operator.apply(x)
        residual, size = (s.detach().square().sum(-1, keepdim=True) for s in (r, b))
        # bounds of ‖r‖², and so squares themselves
        enough = torch.maximum(tol**2 * residual, (torch.finfo(b.dtype).eps / 8) ** 2 * size)
        return cls(x, r, r, r.square().sum(-1, keepdim=True), enough, torch.zeros_like(residual))

    @property
    def active(self) -> Tensor:
        return self.residual > self.enough

    def step(self, operator: Operator) -> _Iterate:
        active, product = self.active, operator.apply(self.p)
        # ‖r‖² / pᵀ (H + Λ) p; 0 for a token that has converged, whose x and r stay
        length = torch.where(
            active, ratio(self.residual, (self.p * product).sum(-1, keepdim=True)), 0
        )
        x, r = self.x + length * self.p, self.r - length * product
        residual = torch.where(active, r.square().sum(-1, keepdim=True), self.residual)
        # conjugate to the directions before
        p = r + ratio(residual, self.residual) * self.p
        return _Iterate(x, r, p, residual, self.enough, self.steps + active)

    def take(self, tiles: Tensor) -> _Iterate:
        return _Iterate(*(s[tiles] for s in self))


@dataclass(frozen=True)
class ConjugateGradient(Solver):
    """Conjugate gradients: at most `max_steps` steps from the Jacobi start b / diag (MesaNet
    Algorithm 1).

    A token stops once its residual has fallen to `tol` of the start's, or to a rounding error of b.
    Scale invariant: nothing is ever added to a denominator.

    Attributes:
        max_steps: Most steps of a token.
        tol: Relative residual at which a token stops; None to stop at a rounding error of b only.
    """

    max_steps: int = 30
    tol: float | None = None

    def __post_init__(self) -> None:
        if self.max_steps < 0 or (self.tol is not None and self.tol < 0):
            raise ValueError(f"{self}: max_steps and tol must not be negative")

    def solve(self, operator: Operator, b: Tensor) -> SolverResult:
        # in units of b's largest number, so that no square overflows or vanishes
        scale = b.detach().abs().amax(-1, keepdim=True)
        found = self._run(operator, _Iterate.start(operator, ratio(b, scale), self.tol or 0.0))
        return SolverResult(found.x * scale, found.steps)

    def draw_for_training(self) -> UnrolledSolver:
        """Draw a random number of steps from 0 to all, differentiated step by step.

        The steps end with the accuracy of float32: the residual of a converged system has no
        direction left to differentiate.
        """
        return UnrolledSolver(
            ConjugateGradient(int(torch.randint(self.max_steps + 1, ())), self.tol or 1e-5)
        )

    def _run(self, operator: Operator, iterate: _Iterate) -> _Iterate:
        if not self._looks(iterate.x):
            return _Iterate(*self.repeat(_step, operator, iterate, self.max_steps))
        if iterate.x.requires_grad:
            return self._run_whole(operator, iterate)
        return self._run_active(operator, iterate)

    def _looks(self, x: Tensor) -> bool:
        """Whether it is looked at what has converged.

        It makes the host wait for an accelerator, which only a tolerance is worth.
        """
        unknown = torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta
        if unknown or torch._C._are_functorch_transforms_active():
            return False
        return x.is_cpu or self.tol is not None

    def _run_whole(self, operator: Operator, iterate: _Iterate) -> _Iterate:
        """All tiles until the last token has converged, for a step changes no other; each can be
        differentiated."""
        for _ in range(self.max_steps):
            if not iterate.active.any():
                break
            iterate = iterate.step(operator)
        return iterate

    def _run_active(self, operator: Operator, iterate: _Iterate) -> _Iterate:
        """Tiles whose tokens have all converged are put aside as soon as they are half of what is
        left."""
        # `whole` has every tile's result, `left` says which tiles the iterate still holds
        whole = iterate._replace(x=iterate.x.clone(), steps=iterate.steps.clone())
        left = torch.arange(len(iterate.x), device=iterate.x.device)
        for _ in range(self.max_steps):
            busy = iterate.active.flatten(1).any(-1)
            count = int(busy.sum())
            if 2 * count <= len(left):
                whole.x[left], whole.steps[left] = iterate.x, iterate.steps
                left, operator, iterate = left[busy], operator.take(busy), iterate.take(busy)
            if count == 0:
                return whole
            iterate = iterate.step(operator)
        whole.x[left], whole.steps[left] = iterate.x, iterate.steps
        return whole


def _step(operator: Operator, parts: Parts) -> Parts:
    return _Iterate(*parts).step(operator)


@dataclass(frozen=True)
class Chebyshev(Solver):
    """Chebyshev iteration: `max_steps` steps between bounds of the eigenvalues, the least of Λ and
    the largest of it with ‖H_t‖, for positive definite systems.

    No inner products and no divisions by what it finds, and so no trouble in low precision. After n
    steps the error is at most 2 ((√κ - 1) / (√κ + 1))ⁿ of the solution, for bounds of quotient κ.
    Source: Gated KalmaNet (2511.21016), section 4.

    Attributes:
        max_steps: Steps of every token.
    """

    max_steps: int = 30

    def __post_init__(self) -> None:
        if self.max_steps < 0:
            raise ValueError(f"{self}: max_steps must not be negative")

    def solve(self, operator: Operator, b: Tensor) -> SolverResult:
        # H_t has eigenvalues from 0 to at most its Frobenius norm
        least = operator.ridge.amin(-1, keepdim=True)
        most = operator.ridge.amax(-1, keepdim=True) + operator.squared_norm().sqrt()
        center, contraction = (least + most) / 2, ((most - least) / (most + least)).square()
        # x_0 = 0, x_1 = b / c and ω_1 = 2, with c halfway between the bounds
        start = torch.zeros_like(b), b / center, torch.full_like(center, 2.0)

        def step(operator: Operator, parts: Parts) -> Parts:
            before, x, pace, center, contraction, b = parts
            # ω ← 4 / (4 - ρ² ω), which weighs the residual and the momentum of the step before
            pace = 4 / (4 - contraction * pace)
            moved = x - pace / center * (operator.apply(x) - b) + (pace - 1) * (x - before)
            return x, moved, pace, center, contraction, b

        _, x, *_ = self.repeat(step, operator, (*start, center, contraction, b), self.max_steps)
        return SolverResult(x, torch.full_like(center, self.max_steps))


@dataclass(frozen=True)
class UnrolledSolver(Solver):
    """The solver `inner`, differentiated step by step.

    Exact for a solution that few steps leave unfinished (MesaNet app. I), at the cost of keeping
    every step. A converged system is better differentiated by solving once more.
    """

    inner: ConjugateGradient

    def solve(self, operator: Operator, b: Tensor) -> SolverResult:
        return self.inner.solve(operator, b)

    def solve_differentiably(
        self, build: Callable[..., Operator], b: Tensor, *theta: Tensor
    ) -> Tensor:
        return self.inner.solve(build(*theta), b).x


@dataclass(frozen=True)
class Cholesky(Solver):
    """A direct, exact solver: it forms every H_t, ``k²`` numbers per token."""

    def solve(self, operator: Operator, b: Tensor) -> SolverResult:
        dense = operator.dense()
        # under `Signed` this is σ (H + Λ): the first diagonal element has the sign of all
        sign = dense[..., :1, 0].sign()
        factor = torch.linalg.cholesky(sign[..., None] * dense)
        x = torch.cholesky_solve((sign * b)[..., None], factor).squeeze(-1)
        return SolverResult(x, torch.zeros_like(x[..., :1]))


@dataclass(frozen=True)
class ShermanMorrison(Solver):
    """Recursive least squares: R_t ≈ (H_t + Λ)⁻¹ is updated at every token by rank-one updates
    (MesaNet app. G).

    Exact while γ = 1. Forgetting also fades the ridge in R, so that every solution is checked: a
    head whose residual exceeds `tol` of its query is solved by `fallback`, and its R is computed
    anew. Many tokens at once are solved by `fallback` alone.

    Attributes:
        tol: Largest residual, relative to the query, of an accepted solution.
        fallback: Solver for all other cases.
    """

    tol: float = 1e-4
    fallback: Solver = field(default_factory=lambda: ConjugateGradient(30, 1e-6))

    def solve(self, operator: Operator, b: Tensor) -> SolverResult:
        return self.fallback.solve(operator, b)

    def advance(self, inverse: Tensor, decay: Tensor, k: Tensor, beta: Tensor) -> Tensor:
        """Return R_t for ``R_{t-1} [n k k]``, and γ, k, β of one token ``[n 1 ·]``."""
        # (γ M)⁻¹ = R / γ, by which the ridge in M fades too
        inverse = inverse / decay
        # (M + β kᵀk)⁻¹ = R - β (k R)ᵀ (k R) / (1 + β k R kᵀ), for R is symmetric
        read = k @ inverse
        return inverse - read.mT * (beta * read) / (1 + beta * (read @ k.mT))

    def solve_from(
        self, inverse: Tensor, operator: Operator, b: Tensor
    ) -> tuple[SolverResult, Tensor]:
        """Return (solution, R) of one token, from an R that may be unusable: zeros, or not
        finite."""
        x = b @ inverse
        error = (b - operator.apply(x)).norm(dim=-1) - self.tol * b.norm(dim=-1)
        # not "error > 0": NaN, of an R that is not finite, counts as bad
        bad = (~(error <= 0)).squeeze(-1).nonzero().squeeze(-1)
        steps = torch.zeros_like(x[..., :1])
        if len(bad):
            left = operator.take(bad)
            x, steps, inverse = x.clone(), steps, inverse.clone()
            x[bad], steps[bad] = self.fallback.solve(left, b[bad])
            inverse[bad] = invert_operator(left)
        return SolverResult(x, steps), inverse


def invert_operator(operator: Operator) -> Tensor:
    """Return (H + Λ)⁻¹ ``[n k k]`` of single tokens."""
    return torch.linalg.inv(operator.dense().squeeze(-3))


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where b is 0."""
    zero = b == 0
    return torch.where(zero, 0, a / torch.where(zero, 1, b))


def _solve(solver: Solver, build: Callable[..., Operator], b: Tensor, *theta: Tensor) -> Tensor:
    return solver.solve(build(*theta), b).x


def _multiply(build: Callable[..., Operator], x: Tensor, *theta: Tensor) -> Tensor:
    return build(*theta).apply(x)


def solve_implicitly(
    solve: Callable[..., Tensor], product: Callable[..., Tensor], b: Tensor, *theta: Tensor
) -> Tensor:
    """Return x = A(θ)⁻¹ b by `solve`, differentiable although the solver is never unrolled (MesaNet
    app. C).

    With x fixed, dx = A⁻¹ d(b - A(θ) x): the gradient of the residual is e* = A⁻¹ ∂L/∂x, one more
    solve, and the differentiable `product` A(θ) x passes -e* on to θ: ∂L/∂θ = -e*ᵀ (∂A/∂θ) x.
    """
    with torch.no_grad():
        # detached: forward-mode tangents are those of the residual
        x = solve(b.detach(), *(None if s is None else s.detach() for s in theta))
    if not torch.is_grad_enabled() and transform_here() is None:
        return x
    return attach_solution(solve, product, b - product(x, *theta), x, b, *theta)


def attach_solution(
    solve: Callable[..., Tensor],
    product: Callable[..., Tensor],
    residual: Tensor,
    x: Tensor,
    b: Tensor,
    *theta: Tensor | None,
) -> Tensor:
    """x, a constant, as a function of the residual b - A(θ) x, of b and of θ (see
    `_ImplicitSolve`).
    """
    # torch.compile takes no function with a jvp, and never asks for one
    function = _ImplicitSolve if torch.compiler.is_compiling() else _FollowedSolve
    return function.apply(solve, product, residual, x, b, *theta)  # type: ignore[return-value]


class _ImplicitSolve(torch.autograd.Function):
    """x as a function of the residual b - A(θ) x, in which it is a constant, of b and of θ.

    With A = H + Λ, dx = A⁻¹ d(residual), and A is symmetric: the residual's gradient e* is one more
    solve, for ∂L/∂x. What that says of b and θ, autograd finds in the residual's own graph, where x
    does not depend on θ. It does where the gradient is to be differentiated again: then that of b
    is e*, solved for differentiably, and that of θ -e*ᵀ (∂A/∂θ) x, with x as it is found here.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        return inputs[3].view_as(inputs[3])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.solve, ctx.product, _, _, _, *theta = inputs
        ctx.save_for_backward(output, *theta)
        ctx.save_for_forward(*theta)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        require_one_at_a_time(gradients, "a solver")
        x, *theta = ctx.saved_tensors
        # e* goes to the residual alone, whose own graph hands it on to b and θ
        if not is_followed_on(gradients):
            return None, None, ctx.solve(gradients[0], *theta), *[None] * (len(theta) + 2)
        # to be differentiated again: b and θ get theirs here, and the residual none
        e = solve_implicitly(ctx.solve, ctx.product, gradients[0], *theta)
        wanted = ctx.needs_input_grad[5:]
        found = gradients_of(partial(ctx.product, x), theta, wanted, (-e,))
        return None, None, None, None, e, *found


class _FollowedSolve(_ImplicitSolve):
    """One that forward-mode differentiation follows too."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        require_one_at_a_time(tangents, "a solver")
        found = solve_implicitly(ctx.solve, ctx.product, tangents[2], *ctx.saved_tensors)
        return _ForwardAlone.apply(found)


class _ForwardAlone(torch.autograd.Function):
    """A tangent that is found with x as a constant, and therefore has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "the forward-mode derivative of a solver has no gradient; differentiate the gradient"
            " forward instead: torch.func.jvp(torch.func.grad(f), …)"
        )
