"""`Decay` and `Delta` through the compiled extension: matrix.c, and scan.c where a head holds a single value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.kernels.native import library
from fastweights.kernels.native.library import address, view
from fastweights.kernels.native.memory import empty
from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import Recurrence, State
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta


class _Code(NamedTuple):
    """The two C functions of a kernel, and the constant that says how many tokens lie between two states which the
    first keeps for the second."""

    forward: str
    backward: str
    marked: str


MATRIX = _Code("fw_forward", "fw_backward", "fw_matrix_marks")
SCAN = _Code("fw_scan_forward", "fw_scan_backward", "fw_scan_marks")


class _Streams(NamedTuple):
    """Float32 streams; k is None for the tied key. C reads an axis of length 1 with a stride of 0."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None

    @classmethod
    def of(cls, recurrence: Decay | Delta) -> _Streams:
        beta = recurrence.beta if isinstance(recurrence, Delta) else None
        streams = (recurrence.q, recurrence.k, recurrence.v, recurrence.log_decay, beta)
        return cls(*(s if s is None or s.dtype == torch.float32 else s.float() for s in streams))  # type: ignore[arg-type]

    def expanded(self, b: int, t: int, h: int, *, sharing: bool) -> _Streams:
        """Batch, time and heads spelled out, so that autograd sums the gradients; q and k may stay shared by heads."""
        q, k = (self.q, self.k) if not sharing else (_own_heads(self.q), _own_heads(self.k))
        q, k = (None if s is None else s.expand(b, t, s.shape[2] if sharing else h, -1) for s in (q, k))
        others = (None if s is None else s.expand(b, t, h, -1) for s in (self.v, self.log_decay, self.beta))
        return _Streams(q, k, *others)  # type: ignore[arg-type]

    def problem(self, t: int, start: Tensor) -> list[int]:
        """The sizes and views of `Forward` in problem.h."""
        b, h, k, v = start.shape
        decays = 0 if self.log_decay is None else self.log_decay.shape[-1]
        views = (*view(self.q), *view(self.k), *view(self.v), *view(self.log_decay), *view(self.beta))
        return [b, t, h, k, v, decays, library.threads(b * t * h * k * v), *views]


def _own_heads(stream: Tensor | None) -> Tensor | None:
    """Heads of stride 0 tell C that they share their gradient too, which they do only where the axis has length 1."""
    return stream.contiguous() if stream is not None and stream.shape[2] > 1 and stream.stride(2) == 0 else stream


class _Kept(NamedTuple):
    """What the backward needs beside the streams: some states, and what the delta rule found missing."""

    marks: Tensor
    missing: Tensor | None

    @staticmethod
    def shapes(code: _Code, streams: _Streams, start: Tensor) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Of the two; None for what is not there."""
        b, t, h, v = streams.v.shape
        marks = (-(-t // library.constant(code.marked)), *start.shape)
        return marks, None if streams.beta is None else (b, h, t, v)

    @classmethod
    def empty(cls, code: _Code, streams: _Streams, start: Tensor) -> _Kept:
        marks, missing = cls.shapes(code, streams, start)
        return cls(empty(*marks), None if missing is None else empty(*missing))


def _forward(code: _Code, streams: _Streams, t: int, start: Tensor, kept: _Kept | None) -> tuple[Tensor, Tensor]:
    """(o, last state)"""
    b, h, k, v = start.shape
    o, last = empty(b, t, h, v), empty(b, h, k, v)
    marks, missing = kept or (None, None)
    states = address(start), address(last), address(marks), address(missing)
    library.call(code.forward, (*streams.problem(t, start), *view(o), *states))
    return o, last


class _Native(torch.autograd.Function):
    """(o ``[b t h v]``, S_T) of S_0 ``[b h k v]`` and the streams."""

    @staticmethod
    def forward(ctx: Any, code: _Code, start: Tensor, *streams: Tensor | None) -> tuple[Tensor, Tensor]:
        given = _Streams(*streams)  # type: ignore[arg-type]
        kept = _Kept.empty(code, given, start)
        o, last = _forward(code, given, given.v.shape[1], start, kept)
        ctx.code = code
        ctx.save_for_backward(*given, *kept)
        return o, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        *given, marks, missing = ctx.saved_tensors
        kept, d_last = _Kept(marks, missing), gradients[1].contiguous()
        d_start, grads = _backward(ctx.code, _Streams(*given), kept, gradients[0], d_last)
        return None, d_start, *grads


def _backward(
    code: _Code, streams: _Streams, kept: _Kept, d_o: Tensor, d_last: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of the state before the record, and of the streams."""
    problem = [*streams.problem(d_o.shape[1], d_last), *view(None), *(address(s) for s in (None, None, *kept))]
    grads = [None if s is None else _gradient(s, d_last.shape[1], problem) for s in streams]
    d_start = empty(*d_last.shape)
    views = [n for g in (d_o, *grads) for n in view(g)]
    library.call(code.backward, [*problem, *views, address(d_last), address(d_start)])
    return d_start, [_summed(g, s) for g, s in zip(grads, streams, strict=True)]


def _gradient(stream: Tensor, h: int, problem: list[int]) -> Tensor:
    """``[b t h ·]``, or ``[b t strips ·]`` partial sums for a stream that the heads share."""
    b, t, heads, width = stream.shape
    if heads == h:
        return empty(b, t, h, width)
    return empty(library.call("fw_scan_strips", problem), b, t, width).permute(1, 2, 0, 3)


def _summed(gradient: Tensor | None, stream: Tensor | None) -> Tensor | None:
    if gradient is None or stream is None or gradient.shape == stream.shape:
        return gradient
    return gradient.sum(2, keepdim=True)


def _run(code: _Code, recurrence: Decay | Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    streams, state = _Streams.of(recurrence), state.contiguous()
    b, t, h = recurrence.shape
    sharing = code is SCAN and state.shape[2] > 1
    if torch.compiler.is_compiling():
        return torch.ops.fastweights.native(code is SCAN, state, *streams.expanded(b, t, h, sharing=sharing))[:2]
    if torch.is_grad_enabled() and any(s is not None and s.requires_grad for s in (state, *streams)):
        return _Native.apply(code, state, *streams.expanded(b, t, h, sharing=sharing))  # type: ignore[return-value]
    return _forward(code, streams, t, state, None)


def _run_decay(recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
    assert isinstance(recurrence, Decay)
    assert isinstance(state, Tensor)
    o, last = _run(MATRIX, recurrence, state)
    return recurrence.skipped(o), last


def _run_scan(recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
    assert isinstance(recurrence, Decay)
    assert isinstance(state, Tensor)
    o, last = _run(SCAN, recurrence, state)
    return recurrence.skipped(o), last


def _run_delta(recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
    assert isinstance(recurrence, Delta)
    assert isinstance(state, Tensor)
    o, last = _run(MATRIX, recurrence, state)
    return o.to(recurrence.output), last


def _refuses(recurrence: Recurrence) -> str | None:
    if library.missing():
        return "the compiled extension is missing (python -m fastweights.kernels.native.build)"
    if recurrence.device.type != "cpu":
        return f"its streams are on {recurrence.device.type}"
    if recurrence.accumulator != torch.float32:
        return f"its streams are {recurrence.accumulator}, not float32 or narrower"
    return None


def _refuses_decay(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, Decay):
        return f"it is a {type(recurrence).__name__}, not a Decay"
    if recurrence.q.shape[-1] == 1 and recurrence.values == 2 and len(recurrence) > 1:
        return "its states are two numbers per head, for which matrix products do not pay"
    return _refuses(recurrence)


def _refuses_delta(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, Delta):
        return f"it is a {type(recurrence).__name__}, not a Delta"
    return _refuses(recurrence)


def _refuses_scan(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, Decay):
        return f"it is a {type(recurrence).__name__}, not a Decay"
    width = recurrence.q.shape[-1]
    if recurrence.values != 1:
        return f"its heads hold {recurrence.values} values, not one"
    if recurrence.log_decay is None or recurrence.log_decay.shape[-1] != width:
        return "not every key has a decay of its own"
    refusal = _refuses(recurrence)
    if refusal is None and not 1 <= width <= (widest := library.constant("fw_widest_scan")):
        return f"its keys are {width} wide, not 1 to {widest}"
    return refusal


NATIVE_SCAN = Kernel("scan (compiled)", _refuses_scan, _run_scan)
NATIVE_DECAY = Kernel("decay (compiled)", _refuses_decay, _run_decay)
NATIVE_DELTA = Kernel("delta (compiled)", _refuses_delta, _run_delta)
