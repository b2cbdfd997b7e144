"""What a mixer costs: parameters, state, and floating-point operations per token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.layers import TokenContext
from fastweights.mixer import Mixer
from fastweights.recurrence import (
    Amplified,
    Bonus,
    ConjugateGradient,
    Decay,
    Delta,
    Mesa,
    Normalized,
    Signed,
    Softmax,
    WindowedLinear,
)
from fastweights.recurrence.base import Recurrence

PASSES = 3
"""A backward pass takes about twice the products of its forward pass."""

SOFTMAX = 5
"""Operations for one weight of a softmax: scale, maximum, exp, sum, division."""


class Cost(NamedTuple):
    """Of one layer and one sequence.

    Attributes:
        parameters: learnt numbers
        state: numbers remembered after `context` tokens; complex ones count twice
        decode: operations for one more token then
        train: operations per token, forward and backward, of a sequence of `context` tokens

    Counted are the products of projections and what the memory does; activations, norms and
    convolutions are not.
    """

    parameters: int
    state: int
    decode: int
    train: int


def cost(mixer: Mixer, context: int = 2048, size: int = 64) -> Cost:
    """The cost of `mixer`; in training its records are evaluated in chunks of `size` tokens, or
    token by token if that takes fewer operations.
    """
    x = torch.zeros(1, 1, mixer.d, dtype=next(mixer.parameters()).dtype)
    past = TokenContext(x, None, None, None, None)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        recurrence, gate = mixer.project(x, past)
        b, t, h = recurrence.shape
        mixer.read(
            torch.zeros(b, t, h, recurrence.values, dtype=recurrence.output), gate, recurrence
        )
    projections, decode = counter.get_total_flops(), step(recurrence, context)
    return Cost(
        parameters=sum(p.numel() for p in mixer.parameters()),
        state=state_size(recurrence, context) + sum(tail.numel() for tail in past.tails),
        decode=projections + decode,
        train=PASSES * (projections + min(decode, chunk(recurrence, context, size))),
    )


def state_size(recurrence: Recurrence, context: int) -> int:
    """Numbers in the state after `context` tokens."""
    match recurrence:
        case Softmax(window=window):
            tokens = context if window is None else min(context, window - 1)
            groups = max(recurrence.k.shape[2], recurrence.v.shape[2])
            return tokens * groups * (recurrence.k.shape[-1] + recurrence.v.shape[-1])
        case WindowedLinear(window=window):
            k, v, f = (s.shape[-1] for s in (recurrence.k, recurrence.v, recurrence.fk))
            return recurrence.groups * (
                f * (v + 1) + min(context, max(window - 1, 0)) * (k + v + f)
            )
    return (2 if recurrence.accumulator.is_complex else 1) * sum(
        map(math.prod, recurrence.state_shapes)
    )


def step(recurrence: Recurrence, context: int) -> int:
    """Operations of the memory for one token that follows `context` others.

    A state of k × v takes 2 for reading, 2 for writing and 1 for decaying each of its numbers.
    """
    h, k, v = _sizes(recurrence)
    match recurrence:
        case Decay() | Bonus():
            return _complex(recurrence) * h * k * v * (4 if recurrence.log_decay is None else 5)
        case Delta():
            return h * k * v * (6 if recurrence.log_decay is None else 7)
        case Mesa():
            return h * (3 * k * k + 5 * k * v + _solver_steps(recurrence) * (2 * k * k + 12 * k))
        case Softmax(window=window):
            return h * _seen(window, context + 1) * (2 * k + 2 * v + SOFTMAX)
        case WindowedLinear(window=window):
            features = recurrence.fq.shape[-1]
            return h * (
                _seen(window, context + 1) * (2 * k + 2 * v + SOFTMAX) + 4 * features * (v + 1)
            )
        case Normalized():
            return step(recurrence.append_ones(), context) + h * v
        case Amplified() | Signed():
            return step(recurrence.inner, context)
    raise TypeError(
        f"the operations of a {type(recurrence).__name__} are not known here; state them in"
        " cost.step"
    )


def chunk(recurrence: Recurrence, context: int, size: int) -> int:
    """Operations of the memory per token of a forward pass over `context` tokens in chunks of
    `size`.
    """
    h, k, v = _sizes(recurrence)
    match recurrence:
        case Decay() | Bonus():
            return _complex(recurrence) * h * (2 * size * (k + v) + 4 * k * v)
        case Delta():
            return h * (size * (4 * k + 3 * v) + 6 * k * v)
        case Mesa():
            solve = _solver_steps(recurrence) * (4 * size * k + 2 * k * k + 10 * k)
            return h * (solve + 2 * size * (k + v) + 4 * k * v + 2 * k * k)
        case Softmax(window=window):
            return h * _seen(window, context // 2) * (2 * k + 2 * v + SOFTMAX)
        case WindowedLinear(window=window):
            features = recurrence.fq.shape[-1]
            linear = 2 * size * (features + v) + 4 * features * (v + 1)
            return h * (_seen(window, context) * (2 * k + 2 * v + SOFTMAX) + linear)
        case Normalized():
            return chunk(recurrence.append_ones(), context, size) + h * v
        case Amplified() | Signed():
            return chunk(recurrence.inner, context, size)
    raise TypeError(
        f"the operations of a {type(recurrence).__name__} are not known here; state them in"
        " cost.chunk"
    )


def _sizes(recurrence: Recurrence) -> tuple[int, int, int]:
    """(heads, key width, value width)."""
    return recurrence.shape[2], recurrence.streams["q"].shape[-1], recurrence.values


def _complex(recurrence: Recurrence) -> int:
    """Real operations in one of the record's own."""
    return 4 if recurrence.accumulator.is_complex else 1


def _seen(window: int | None, tokens: int) -> int:
    return tokens if window is None else min(tokens, window)


def _solver_steps(recurrence: Mesa) -> int:
    """Conjugate-gradient steps; a direct solver counts as the k steps that would be exact."""
    solver = recurrence.solver
    return solver.max_steps if isinstance(solver, ConjugateGradient) else recurrence.q.shape[-1]
