"""`Decay` and `Delta` with matrix states through the compiled extension (matrix.c)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.kernels.native import library
from fastweights.kernels.native.library import BLOCK, address, view
from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta


class _Streams(NamedTuple):
    """Float32 streams with batch, time and heads spelled out (by strides of 0); k is None for the tied key."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None

    @classmethod
    def of(cls, recurrence: Decay | Delta) -> _Streams:
        beta = recurrence.beta if isinstance(recurrence, Delta) else None
        shape = (*recurrence.shape, -1)
        streams = (recurrence.q, recurrence.k, recurrence.v, recurrence.log_decay, beta)
        return cls(*(None if s is None else s.float().expand(shape) for s in streams))  # type: ignore[arg-type]

    def sizes(self) -> list[int]:
        b, t, h, k = self.q.shape
        decays = 0 if self.log_decay is None else self.log_decay.shape[-1]
        threads = library.threads(b * t * h * k * self.v.shape[-1])
        return [b, t, h, k, self.v.shape[-1], decays, threads]

    def views(self) -> list[int]:
        return [n for s in (self.q, self.k, self.v, self.log_decay, self.beta) for n in view(s)]


class _Kept(NamedTuple):
    """What the backward needs beside the streams: states at block starts, and what the delta rule found missing."""

    marks: Tensor
    missing: Tensor | None

    @classmethod
    def empty(cls, streams: _Streams, start: Tensor) -> _Kept:
        b, t, h, v = streams.v.shape
        marks = start.new_empty(b, h, -(-t // BLOCK), *start.shape[2:])
        return cls(marks, None if streams.beta is None else start.new_empty(b, h, t, v))


def _forward(streams: _Streams, start: Tensor, kept: _Kept | None) -> tuple[Tensor, Tensor, list[int]]:
    """(o, last state, the `Forward` of problem.h)"""
    o, last = torch.empty(streams.v.shape, dtype=torch.float32), torch.empty_like(start)
    marks, missing = kept or (None, None)
    states = [address(s) for s in (start, last, marks, missing)]
    problem = streams.sizes() + streams.views() + list(view(o)) + states
    library.call("fw_forward", problem)
    return o, last, problem


class _Native(torch.autograd.Function):
    """(o ``[b t h v]``, S_T) of the streams and S_0 ``[b h k v]``."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *streams: Tensor | None) -> tuple[Tensor, Tensor]:
        given = _Streams(*streams)  # type: ignore[arg-type]
        kept = _Kept.empty(given, start)
        o, last, _ = _forward(given, start, kept)
        ctx.save_for_backward(*given, *kept)
        return o, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        *given, marks, missing = ctx.saved_tensors
        streams, d_last = _Streams(*given), d_last.contiguous()
        d_start = torch.empty_like(d_last)
        grads = [None if s is None else torch.empty(s.shape, dtype=torch.float32) for s in streams]
        problem = streams.sizes() + streams.views() + list(view(None))
        problem += [address(s) for s in (None, None, marks, missing)]
        problem += [n for g in (d_o, *grads) for n in view(g)]
        library.call("fw_backward", [*problem, address(d_last), address(d_start)])
        return d_start, *grads


def run(recurrence: Decay | Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state)"""
    streams, state = _Streams.of(recurrence), state.contiguous()
    if torch.is_grad_enabled() and any(s is not None and s.requires_grad for s in (state, *streams)):
        o, last = _Native.apply(state, *streams)
    else:
        o, last, _ = _forward(streams, state, None)
    if isinstance(recurrence, Decay):
        return recurrence.skipped(o), last
    return o.to(recurrence.output), last


def refuses(recurrence: Recurrence) -> str | None:
    if library.library() is None:
        return "the compiled extension is missing (python -m fastweights.kernels.native.build)"
    if recurrence.device.type != "cpu":
        return f"its streams are on {recurrence.device.type}"
    if recurrence.accumulator != torch.float32:
        return f"its streams are {recurrence.accumulator}"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into it"
    return None


def _refuses_decay(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, Decay):
        return f"it is a {type(recurrence).__name__}, not a Decay"
    return refuses(recurrence)


def _refuses_delta(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, Delta):
        return f"it is a {type(recurrence).__name__}, not a Delta"
    return refuses(recurrence)


NATIVE_DECAY = Kernel("decay (compiled)", _refuses_decay, run)
NATIVE_DELTA = Kernel("delta (compiled)", _refuses_delta, run)
