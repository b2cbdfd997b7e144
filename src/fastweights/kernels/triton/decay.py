"""`Decay` in chunks: a sequential walk over states, then all chunks at once."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.table import Kernel, refuse_complex
from fastweights.kernels.triton.anchored import Given, anchor, steep_scores
from fastweights.kernels.triton.chunks import WIDEST, Chunks, chunk_outputs, chunk_states
from fastweights.kernels.triton.decay_backward import decay_backward
from fastweights.kernels.triton.launch import DEVICES, refuse_missing
from fastweights.kernels.triton.operator import NoSettings, OperatorResult, Streams, TritonOperator
from fastweights.kernels.triton.streams import NARROW, side_by_side
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.composed import Normalized
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.windowed import with_ones

NARROWEST = 8
"""Of keys and values: of narrower ones, most of a tile would be empty."""


def decay_forward(settings: NoSettings, streams: Streams, keep: bool) -> OperatorResult:
    """(o, the state after the last token), and for the backward the scores of steep chunks.

    Args:
        settings: none
        streams: start ``[b h k v]``, q, k or None for 1 - α, v, log_decay or None, ``[b t h ·]``
        keep: whether a backward follows
    """
    del settings
    start, q, k, v, log_decay = streams
    assert start is not None
    assert q is not None
    assert v is not None
    chunks = Chunks.of(q, v, torch.promote_types(q.dtype, v.dtype))
    given = Given(q, None, k, log_decay)
    anchored = anchor(given, chunks)
    states, final = chunk_states(start, v, anchored, chunks)
    scores = steep_scores(q, given, anchored.steep, chunks, strict=False)
    assert anchored.q is not None
    o = chunk_outputs(anchored.q, v, anchored, scores, states, chunks, strict=False)
    return OperatorResult((o, final), (scores,) if keep else ())


def _define(_: NoSettings, streams: Streams) -> tuple[Tensor, Any]:
    start, *of_record = streams
    assert start is not None
    return chunk_loop(Decay(*of_record), start)  # type: ignore[arg-type]


DECAY = TritonOperator(
    "decay",
    settings=NoSettings,
    streams=("start", "q", "k", "v", "log_decay"),
    outputs=2,
    forward=decay_forward,
    backward=decay_backward,
    define=_define,
)


def expand_streams(record: Recurrence, *names: str) -> list[Tensor | None]:
    """These streams of a record ``[b t h ·]``, as kernels read them; None for those it lacks."""
    found = (record.streams.get(name) for name in names)
    return [None if s is None else side_by_side(s.expand(*record.shape, -1)) for s in found]


def compute_decay(record: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state)."""
    o, final = DECAY(NoSettings(), state, *expand_streams(record, "q", "k", "v", "log_decay"))
    return record.add_skip(o), final


def compute_normalized(record: Normalized, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state), from the inner record with its column of ones in the dtype of its values:
    half-precision streams are multiplied as such.
    """
    inner = cast(Decay, record.inner)
    o, final = compute_decay(inner.with_values(with_ones(inner.v)), state)
    return record.divide_output((o.float(), final))


def refuse_streams(record: Recurrence) -> str | None:
    """Why kernels that decay a matrix per head do not take a record's streams."""
    complex_streams = refuse_complex(record)
    if complex_streams is not None:
        return complex_streams
    for name, stream in record.streams.items():
        if stream.dtype not in NARROW:
            return f"{name} is {stream.dtype}, not one of {', '.join(map(str, NARROW))}"
    for *_, k, v in record.state_shapes:
        if max(k, v) > WIDEST:
            return f"its states are {k} × {v}, wider than {WIDEST}"
        if min(k, v) < NARROWEST:
            return f"its states are {k} × {v}, narrower than {NARROWEST}"
    return refuse_missing()


def refuse_normalized(record: Normalized) -> str | None:
    """Why a record is left to the kernels of its inner rule."""
    if not isinstance(record.inner, Decay):
        return f"its inner rule is {type(record.inner).__name__}, not Decay"
    return refuse_streams(record)


TRITON_DECAY = Kernel("decay (Triton)", Decay, compute_decay, refuse_streams, DEVICES, True)
TRITON_NORMALIZED = Kernel(
    "normalised decay (Triton)", Normalized, compute_normalized, refuse_normalized, DEVICES, True
)
