"""The compiled kernels as torch operators, which torch.compile calls without looking into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.native.decay_delta import (
    MATRIX,
    UNDECAYED,
    CFunctions,
    SavedForBackward,
    Streams,
    compute_backward,
    compute_forward,
    scan_of,
)

_STREAMS = (
    "Tensor q, Tensor? k, Tensor v, Tensor? log_decay, Tensor? beta, Tensor? erase, Tensor? remove,"
    " Tensor? rate"
)


@torch.library.custom_op(
    "fastweights::native",
    mutates_args=(),
    device_types="cpu",
    schema=(
        f"(bool scan, bool before, Tensor start, {_STREAMS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def native(
    scan: bool, before: bool, start: Tensor, *streams: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(o, S_T, and what the backward needs: marks, missing) of S_0 and the streams, all axes but
    heads spelled out.
    """
    code, start, given = _code(scan, before, start), start.contiguous(), _own(streams)
    kept = SavedForBackward.empty(code, given, start)
    o, last = compute_forward(code, given, given.v.shape[1], start, kept)
    return o, last, kept.marks, _tensor_or_empty(kept.missing, start)


@native.register_fake
def _(
    scan: bool, before: bool, start: Tensor, *streams: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = Streams(*streams)  # type: ignore[arg-type]
    marks, missing = SavedForBackward.shapes(_code(scan, before, start), given, start)
    o, last = given.v.new_empty(given.v.shape, dtype=given.output), start.new_empty(start.shape)
    return o, last, start.new_empty(marks), start.new_empty(missing or 0)


@torch.library.custom_op(
    "fastweights::native_backward",
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(bool scan, bool before, bool[] wanted, Tensor d_o, Tensor d_last, Tensor marks,"
        f" Tensor missing, {_STREAMS}) -> ({', '.join(['Tensor'] * 9)})"
    ),
)
def native_backward(
    scan: bool,
    before: bool,
    wanted: list[bool],
    d_o: Tensor,
    d_last: Tensor,
    marks: Tensor,
    missing: Tensor,
    *streams: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of S_0 and the streams; empty for a stream that is not there or whose gradient is
    not wanted.
    """
    given = _own(streams)
    kept = SavedForBackward(marks, missing if given.erases else None)
    d_start, grads = compute_backward(
        _code(scan, before, d_last), given, wanted, kept, d_o, d_last.contiguous()
    )
    return d_start, *(
        _tensor_or_empty(g if want else None, d_start)
        for g, want in zip(grads, wanted, strict=True)
    )


@native_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, wanted, _, d_last, _, _, *streams = arguments
    grads = (
        s.new_empty(s.shape) if want else d_last.new_empty(0)
        for s, want in zip(streams, wanted, strict=True)
    )
    return d_last.new_empty(d_last.shape), *grads


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.scan, ctx.before, _, *streams = inputs
    ctx.save_for_backward(*output[2:], *streams)


def _differentiate(ctx: Any, d_o: Tensor, d_last: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    marks, missing, *streams = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[3:])
    d_start, *grads = native_backward(
        ctx.scan, ctx.before, wanted, d_o, d_last, marks, missing, *streams
    )
    return (
        None,
        None,
        d_start,
        *(g if want else None for g, want in zip(grads, wanted, strict=True)),
    )


native.register_autograd(_differentiate, setup_context=_keep)


def _code(scan: bool, before: bool, state: Tensor) -> CFunctions:
    return scan_of(state.dtype) if scan else UNDECAYED if before else MATRIX


def _own(streams: tuple[Tensor | None, ...]) -> Streams:
    """A compiled graph lays tensors out as it likes; heads that do not share their gradient must
    not look so.
    """
    return Streams(*streams).own()  # type: ignore[arg-type]


def _tensor_or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An operator always returns tensors: an empty one for None."""
    return like.new_empty(0) if tensor is None else tensor
