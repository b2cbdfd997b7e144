"""`Mesa` by solving for all tokens of a time block at once, and reading with `Decay`.

The states H at chunk starts come from one pass over the keys; from them each conjugate-gradient
step is three matrix products per chunk (`ChunkGram`), for a block of chunks that stays in the
cache. The optimal queries then read G through the `Decay` kernel, and the backward's ∂(H_t q*_t) is
that kernel's too: states are kept at block starts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.blocks import BlockPlan, slice_streams
from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import State
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.mesa import Mesa
from fastweights.recurrence.solvers import (
    ChunkGram,
    Solver,
    UnrolledSolver,
    attach_solution,
    decays_alone,
)

CHUNK = 32

Solve = Callable[..., Tensor]
"""q* ``[b t h k]`` of q, H before it, k, β, Λ and log γ: the system's right-hand side and the rest
of the system.
"""


def solve_blockwise(solver: Solver, b: Tensor, *system: Any) -> Tensor:
    """q* by `solver`, one time block after the other; a partial of it is a `Solve`."""
    plan = BlockPlan.of(CHUNK, b.shape[0] * b.shape[2], b.shape[1])
    pieces = []
    for span, gram in _blocks(plan, *system):
        rows = plan.tiles(b[:, span], system[0].dtype)
        solved = solver.solve(gram, rows.flatten(0, 2)).x.view_as(rows)
        pieces.append(plan.untile(solved, span.stop - span.start))
    return torch.cat(pieces, dim=1)


def _blocks(
    plan: BlockPlan,
    state: Tensor,
    k: Tensor,
    beta: Tensor,
    ridge: Tensor,
    log_decay: Tensor | None,
) -> Iterator[tuple[slice, ChunkGram]]:
    """Each time block with the operator of its chunks."""
    log_decay = torch.zeros_like(k[..., :1]) if log_decay is None else log_decay
    for span in plan.spans(k.shape[1]):
        streams = slice_streams(span, k, beta, ridge, log_decay)
        streams[2] = _pad_ridge(streams[2], plan.chunk)
        keys, strength, diagonal, decay = (plan.tiles(s, state.dtype) for s in streams)
        # H before every chunk from what each adds to it, keys decayed to the chunk's end
        decays = decays_alone(decay)
        assert decays.carry is not None
        starts, state = _starts(state, (decays.key * keys).mT @ (strength * keys), decays.carry)
        parts = (decays.inner, decays.query, starts, keys, strength, diagonal)
        yield span, ChunkGram(*(s.flatten(0, 2) for s in parts))


def _pad_ridge(ridge: Tensor, chunk: int) -> Tensor:
    """Λ, and behind the end of the last chunk its last: H stays as it was there, and definite with
    that one.
    """
    behind = -ridge.shape[1] % chunk
    return torch.cat([ridge, ridge[:, -1:].expand(-1, behind, -1, -1)], dim=1) if behind else ridge


def _starts(state: Tensor, written: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
    """(the state before every chunk ``[b h n k k]``, the state after the last)."""
    starts = []
    for n in range(written.shape[2]):
        starts.append(state)
        state = carry[:, :, n] * state + written[:, :, n]
    return torch.stack(starts, dim=2), state


def solve_and_read(solve: Solve, recurrence: Mesa, state: State) -> tuple[Tensor, State]:
    """(o, final state) with the optimal queries that `solve` finds: differentiated by solving once
    more, or step by step if the record's solver is `UnrolledSolver`.
    """
    b, t, h = recurrence.shape
    dtype, (gram, memory, *_) = recurrence.accumulator, state
    q, k, v, beta, ridge = (
        s.to(dtype).expand(b, t, h, -1)
        for s in (recurrence.q, recurrence.k, recurrence.v, recurrence.beta, recurrence.ridge)
    )
    log_decay = (
        None if recurrence.log_decay is None else recurrence.log_decay.to(dtype).expand(b, t, h, -1)
    )
    system = (gram, k, beta, ridge, log_decay)
    unrolled = isinstance(recurrence.solver, UnrolledSolver)
    # x_t = (H_t + Λ)⁻¹ q_t, without a graph unless its steps are to be differentiated
    with torch.set_grad_enabled(unrolled and torch.is_grad_enabled()):
        x = solve(q, *system)
    # H_t x_t: H_t = Σ_s γ… k_sᵀ β_s k_s is the state of a decay with values βk, read by x
    product, gram = run_fastest(Decay(x, k, beta * k, log_decay), gram)
    if torch.is_grad_enabled() and not unrolled:
        # x as a function of the residual q - (H + Λ) x, which is differentiable in all the streams
        x = attach_solution(solve, multiply, q - product - ridge * x, x, q, *system)
    # o_t = x_t G_t, and G_t is the state of a decay with values βv
    o, memory = run_fastest(Decay(x, k, beta * v, log_decay), memory)  # type: ignore[arg-type]
    return o.to(recurrence.output), recurrence.final_state(gram, memory)


def multiply(x: Tensor, *system: Any) -> Tensor:
    """(H + Λ) x of the rest of a system."""
    start, k, beta, ridge, log_decay = system
    return run_fastest(Decay(x, k, beta * k, log_decay), start)[0] + ridge * x


def blockwise_mesa(recurrence: Mesa, state: State) -> tuple[Tensor, State]:
    """(o, final state)."""
    return solve_and_read(partial(solve_blockwise, recurrence.solver), recurrence, state)


BLOCKED_MESA = Kernel("blocked mesa (torch)", Mesa, blockwise_mesa, opaque=True)
