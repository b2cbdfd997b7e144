"""The backward of `Decay` in chunks, made of parts for any rows that read a decayed state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.triton.chunks import (
    HALF,
    HOPPER,
    Chunks,
    Tiles,
    block_of,
    chunk_states,
    is_per_channel,
    launch_chunks,
    output_tiles,
)
from fastweights.kernels.triton.operator import NoSettings, Streams
from fastweights.kernels.triton.streams import Strided, side_by_side, strided


class ReaderGradients(NamedTuple):
    """Gradients ``[b t h ·]`` of rows, keys and log decays, in the dtypes of those; None of what
    was not asked for.
    """

    rows: Tensor | None
    k: Tensor | None
    log_decay: Tensor | None


def reader_tiles(chunks: Chunks, *, per_channel: bool) -> Tiles:
    """Of `reader_gradients`: what fits the registers."""
    if chunks.kind == torch.float32:
        return Tiles(keys=16, values=16, warps=4)
    if per_channel or chunks.kind == torch.float16:
        return Tiles(block_of(chunks.keys, 32), block_of(chunks.values, 32), warps=8)
    tiles = Tiles(block_of(chunks.keys, 64), block_of(chunks.values, 64), warps=8)
    return tiles._replace(stages=3, registers=HALF) if chunks.capability >= HOPPER else tiles


def value_gradients(
    rows: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_decay: Tensor | None,
    d_o: Tensor,
    scores: Tensor | None,
    d_states: Tensor | None,
    chunks: Chunks,
    *,
    strict: bool,
) -> Tensor:
    """The gradient of the values ``[b t h v]``, in their dtype.

    Args:
        rows, log_decay: the streams that read the states, and that the states decay by
        d_o: of what the rows read ``[b t h v]``, side by side
        k, v: the keys and values that the states were written with; no k stands for 1 - α
        scores: of `chunk_scores`
        d_states: of `chunk_states` in reverse; None: what the states get is left out
        chunks: of these streams
        strict: whether a row sees only the keys of tokens before it
    """
    from fastweights.kernels.triton.device.decay_backward import value_gradients as gradients

    tiles, found = output_tiles(chunks), v.new_empty(v.shape)
    programs = chunks.count * -(-chunks.values // tiles.values)
    arguments = (*strided(rows, k, log_decay, d_o), scores, d_states, *strided(found))
    launch_chunks(gradients, programs, arguments, chunks, tiles, strict)
    return found


def reader_gradients(
    rows: Tensor,
    k: Tensor | None,
    v: Tensor,
    log_decay: Tensor | None,
    d_o: Tensor,
    states: Tensor,
    d_states: Tensor | None,
    chunks: Chunks,
    *,
    strict: bool,
    wanted: Sequence[bool] = (True, True, True),
    before: ReaderGradients | None = None,
) -> ReaderGradients:
    """The gradients of rows, keys and log decays.

    Args:
        rows, k, v, log_decay, d_o, strict: as in `value_gradients`
        states: of `chunk_states`
        d_states: of `chunk_states` in reverse. None: only what these rows read counts, not what the
            keys leave in the states, which another reader has counted
        chunks: of these streams
        wanted: which of the three are asked for
        before: those of another reader, to whose gradients of keys and log decays these are added
    """
    from fastweights.kernels.triton.device import decay_backward as device

    per_channel = is_per_channel(log_decay)
    tiles = reader_tiles(chunks, per_channel=per_channel)
    blocks = -(-chunks.keys // tiles.keys)
    d_rows = rows.new_empty(rows.shape) if wanted[0] else None
    d_k = k.new_empty(k.shape) if wanted[1] and k is not None else None
    d_log_decay = None
    if log_decay is not None and wanted[2]:
        # of a decay per head, each block of keys finds a part
        d_log_decay = (
            log_decay.new_empty(log_decay.shape)
            if per_channel
            else log_decay.new_empty((*log_decay.shape[:-1], blocks), dtype=torch.float32)
        )

    read, written = strided(rows, k, v, log_decay, d_o), strided(d_rows, d_k, d_log_decay)
    arguments = (*read, states, d_states, *written, *strided(before.k if before else None))

    def compute(kernel: Any, *more: object) -> None:
        launch_chunks(kernel, chunks.count * blocks, (*arguments, *more), chunks, tiles, strict)

    if per_channel:
        more = Strided.or_none(before.log_decay if before else None)
        steep = rows.new_empty(chunks.count * blocks, dtype=torch.int32)
        compute(device.channel_reader_gradients, more, steep)
        compute(device.steep_reader_gradients, more, steep)
    else:
        compute(device.reader_gradients)
    if d_log_decay is not None and log_decay is not None and not per_channel:
        d_log_decay = d_log_decay.sum(-1, keepdim=True).to(log_decay.dtype)
        if before is not None and before.log_decay is not None:
            d_log_decay += before.log_decay
    return ReaderGradients(d_rows, d_k, d_log_decay)


def decay_backward(
    settings: NoSettings,
    streams: Streams,
    saved: Streams,
    gradients: tuple[Tensor, ...],
    wanted: Sequence[bool],
) -> Streams:
    """The gradients of `decay.decay_forward`'s streams, from those of o and of the last state.

    Nothing but scores was saved: the states are found again.
    """
    del settings
    start, q, k, v, log_decay = streams
    (scores,), (d_o, d_final) = saved, gradients
    assert start is not None
    assert q is not None
    assert v is not None
    for_start, for_q, for_k, for_v, for_decay = wanted
    chunks = Chunks.of(q, v, torch.promote_types(q.dtype, v.dtype))
    d_o = side_by_side(d_o)
    d_states = d_start = d_v = None
    if for_start or for_k or for_v or for_decay:
        d_states, d_start = chunk_states(d_final, q, d_o, log_decay, chunks, reverse=True)
    if for_v:
        assert d_states is not None
        d_v = value_gradients(q, k, v, log_decay, d_o, scores, d_states, chunks, strict=False)
    found = ReaderGradients(None, None, None)
    if for_q or for_k or for_decay:
        states, _ = chunk_states(start, k, v, log_decay, chunks)
        asked = (for_q, for_k, for_decay)
        found = reader_gradients(
            q, k, v, log_decay, d_o, states, d_states, chunks, strict=False, wanted=asked
        )
    return d_start, found.rows, found.k, d_v, found.log_decay
