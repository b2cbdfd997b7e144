"""`Mesa` by solving for all tokens of a time block at once, and reading with `Decay`.

The states H at chunk starts come from one pass over the keys; from them each conjugate-gradient step is three matrix
products per chunk (`ChunkGram`), for a block of chunks that stays in the cache and stops once all its tokens have
converged. The optimal queries then read G through the `Decay` kernel, and the backward's ∂(H_t q*_t) is that kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.kernels.blocks import Plan, cut
from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.mesa import ChunkGram, ImplicitSolve, Mesa, Operator, Solver
from fastweights.recurrence.products import decayed_products

CHUNK = 32


@dataclass(frozen=True, eq=False)
class SequenceGram(Operator):
    """H_t + Λ for every token of a sequence, on rows ``[b t h k]``."""

    plan: Plan
    start: Tensor
    k: Tensor
    beta: Tensor
    ridge: Tensor
    log_decay: Tensor | None

    def apply(self, p: Tensor) -> Tensor:
        return run_fastest(Decay(p, self.k, self.beta * self.k, self.log_decay), self.start.mT)[0] + self.ridge * p

    def diagonal(self) -> Tensor:
        raise NotImplementedError("a sequence is solved block by block: use blocks()")

    dense = diagonal

    def blocks(self) -> Iterator[tuple[slice, ChunkGram]]:
        """Each time block with the operator of its chunks, ``[b h n c ·]``."""
        state = self.start
        for span in self.plan.spans(self.k.shape[1]):
            streams = cut(span, self.k, self.beta, self.ridge, self._decays())
            k, beta, ridge, log_decay = (self.plan.tiles(s, state.dtype) for s in streams)
            ridge = ridge.masked_fill(ridge == 0, 1)  # Λ > 0: a zero pads the last chunk, where H may be singular
            one = torch.ones_like(log_decay)
            decays = decayed_products(one, one, log_decay)
            assert decays.carry is not None
            starts, state = _starts(state, (decays.key * k).mT @ (beta * k), decays.carry)
            yield span, ChunkGram(decays, starts, k, beta, ridge)

    def _decays(self) -> Tensor:
        return torch.zeros_like(self.k[..., :1]) if self.log_decay is None else self.log_decay


def _starts(state: Tensor, written: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """(the state before every chunk ``[b h n k k]``, the state after the last)."""
    starts = torch.empty_like(written)
    for n in range(written.shape[2]):
        starts[:, :, n] = state
        state = carry[:, :, n] * state + written[:, :, n]
    return starts, state


@dataclass(frozen=True)
class BlockedSolver(Solver):
    """`inner` on one time block of a `SequenceGram` after the other."""

    inner: Solver

    def solve(self, operator: SequenceGram, b: Tensor) -> Tensor:
        x = torch.empty_like(b)
        for span, gram in operator.blocks():
            solved = self.inner.solve(gram, operator.plan.tiles(b[:, span], gram.start.dtype))
            x[:, span] = operator.plan.untile(solved, span.stop - span.start)
        return x


def chunked_mesa(recurrence: Mesa, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(o, final (H, G))."""
    b, t, h = recurrence.shape
    plan, dtype = Plan.of(CHUNK, b * h, t), recurrence.accumulator
    q, k, v, beta, ridge = (
        s.to(dtype).expand(b, t, h, -1)
        for s in (recurrence.q, recurrence.k, recurrence.v, recurrence.beta, recurrence.ridge)
    )
    log_decay = None if recurrence.log_decay is None else recurrence.log_decay.to(dtype).expand(b, t, h, -1)
    build = lambda *theta: SequenceGram(plan, *theta)  # noqa: E731
    x = ImplicitSolve.apply(BlockedSolver(recurrence.solver), build, q, state[0], k, beta, ridge, log_decay)
    written = beta * torch.cat([k, v], dim=-1)
    o, both = run_fastest(Decay(x, k, written, log_decay), torch.cat(state, dim=-1))
    keys = k.shape[-1]
    return o[..., keys:].to(recurrence.output), (both[..., :keys], both[..., keys:])


def refuses(recurrence: Recurrence) -> str | None:
    return None if isinstance(recurrence, Mesa) else f"it is a {type(recurrence).__name__}, not a Mesa"


CHUNKED_MESA = Kernel("blocked mesa (torch)", refuses, chunked_mesa)
