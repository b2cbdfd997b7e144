"""`Mesa` through the compiled extension: mesa.c solves, and reads where no gradient is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.mesa import solve_and_read
from fastweights.kernels.native import abi, library
from fastweights.kernels.native.decay_delta import CPU, refuses
from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import State
from fastweights.recurrence.mesa import Mesa
from fastweights.recurrence.solvers import ConjugateGradient

CODE = "fw_mesa"
SPAN = 256
"""SOLVED of mesa.h: tokens between two states from which threads may start."""


@dataclass(frozen=True)
class NativeSolve:
    """q* by mesa.c, each token for as many steps as it needs; a call is a `kernels.mesa.Solve`."""

    solver: ConjugateGradient

    def __call__(self, b: Tensor, *system: Any) -> Tensor:
        x, (start, *streams) = torch.empty(b.shape), system
        self.solve((b, *streams, None), (x, None), (start.contiguous(), None))
        return x

    def solve(
        self,
        streams: tuple[Tensor | None, ...],
        outputs: tuple[Tensor | None, Tensor | None],
        state: tuple[Tensor, Tensor | None],
        taken: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The last states. `streams`: b, k, β, Λ, log γ, v; `outputs`: x and o; `state`: H and,
        with v, G.
        """
        last = [None if s is None else torch.empty_like(s) for s in state]
        (b, h, k, _), t = state[0].shape, max(s.shape[1] for s in streams if s is not None)
        v = 0 if state[1] is None else state[1].shape[-1]
        threads = library.threads(t * state[0].numel())
        marks = None
        if t > SPAN and threads > 1 and b * h < 4 * threads:
            marks = torch.empty(-(-t // SPAN), b * h * k * (k + v))
        steps, tol = self.solver.max_steps, -1.0 if self.solver.tol is None else self.solver.tol
        sizes = (b, t, h, k, v, steps, tol, threads)
        places = (*streams, *outputs, *state, *last, marks, taken)
        library.call(CODE, abi.MesaProblem(*sizes, *places))
        return tuple(s for s in last if s is not None)


def _run(recurrence: Mesa, state: State) -> tuple[Tensor, State]:
    assert isinstance(recurrence.solver, ConjugateGradient)
    solve = NativeSolve(recurrence.solver)
    if torch.is_grad_enabled() and any(
        s.requires_grad for s in (*recurrence.streams.values(), *state)
    ):
        return solve_and_read(solve, recurrence, state)
    o, last, _ = solve_and_count(recurrence, state, counted=False)
    return o, last


def solve_and_count(
    recurrence: Mesa, state: State, *, counted: bool = True
) -> tuple[Tensor, State, Tensor | None]:
    """(o, final state, steps of every token ``[b h t]``), without gradients."""
    (b, t, h), values = recurrence.shape, recurrence.values
    streams = (
        recurrence.q,
        recurrence.k,
        recurrence.beta,
        recurrence.ridge,
        recurrence.log_decay,
        recurrence.v,
    )
    single = tuple(None if s is None or s.dtype == torch.float32 else s.float() for s in streams)
    streams = tuple(s if f is None else f for s, f in zip(streams, single, strict=True))
    o, taken = torch.empty(b, t, h, values), torch.empty(b, h, t) if counted else None
    assert isinstance(recurrence.solver, ConjugateGradient)
    gram, memory = (s.contiguous() for s in state)
    last = NativeSolve(recurrence.solver).solve(streams, (None, o), (gram, memory), taken)
    return o.to(recurrence.output), last, taken


def _refuses(recurrence: Mesa) -> str | None:
    if not isinstance(recurrence.solver, ConjugateGradient):
        return f"its solver is a {type(recurrence.solver).__name__}"
    return refuses(recurrence)


NATIVE_MESA = Kernel("mesa (compiled)", Mesa, _run, _refuses, CPU, True)
