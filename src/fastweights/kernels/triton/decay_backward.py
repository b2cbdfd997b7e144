"""The backward of `Decay` in chunks, made of parts for any rows that read a decayed state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastweights.kernels.triton.anchored import Given, Reader, ReaderGradients, anchor, release
from fastweights.kernels.triton.chunks import (
    HALF,
    Chunks,
    ChunkStreams,
    Tiles,
    block_of,
    chunk_states,
    launch_chunks,
    output_tiles,
)
from fastweights.kernels.triton.operator import NoSettings, Streams
from fastweights.kernels.triton.streams import side_by_side, strided


def reader_tiles(chunks: Chunks) -> Tiles:
    """Of `reader_gradients`: what fits the registers."""
    if chunks.kind == torch.float32:
        return Tiles(keys=16, values=16, warps=4)
    if chunks.fill_hopper:
        return Tiles(64, block_of(chunks.values, 64), 8, 3, HALF)
    return Tiles(block_of(chunks.keys, 32), block_of(chunks.values, 32), warps=8)


def value_gradients(
    rows: Tensor,
    v: Tensor,
    streams: ChunkStreams,
    d_o: Tensor,
    scores: Tensor | None,
    d_states: Tensor | None,
    chunks: Chunks,
    *,
    strict: bool,
) -> Tensor:
    """The gradient of the values ``[b t h v]``, in their dtype.

    Args:
        rows: the queries or erasing keys of `streams`, which read the states
        v: the values that the states were written with
        streams: what the states decay by, and the keys
        d_o: of what the rows read ``[b t h v]``, side by side
        scores: of `anchored.steep_scores`
        d_states: of `chunk_states` in reverse; None: what the states get is left out
        chunks: of these streams
        strict: whether a row sees only the keys of tokens before it
    """
    from fastweights.kernels.triton.device.decay_backward import value_gradients as gradients

    tiles, found = output_tiles(chunks), v.new_empty(v.shape)
    programs = chunks.count * -(-chunks.values // tiles.values)
    read = strided(rows, streams.k, streams.log_decay, d_o)
    arguments = (*read, scores, streams.steep, d_states, *strided(found))
    launch_chunks(gradients, programs, arguments, chunks, tiles, strict)
    return found


def reader_gradients(
    rows: Tensor,
    v: Tensor,
    streams: ChunkStreams,
    d_o: Tensor,
    states: Tensor,
    d_states: Tensor | None,
    chunks: Chunks,
    *,
    strict: bool,
    wanted: Sequence[bool] = (True, True, True),
    before: ReaderGradients | None = None,
) -> ReaderGradients:
    """The gradients of rows, keys and log decays; of a decay per channel what `anchored.release`
    takes: those of the anchored rows and keys, and of the ends.

    Args:
        rows, v, streams, d_o, strict: as in `value_gradients`
        states: of `chunk_states`
        d_states: of `chunk_states` in reverse. None: only what these rows read counts, not what the
            keys leave in the states, which another reader has counted
        chunks: of these streams
        wanted: which of the three are asked for
        before: those of another reader, to whose gradients of keys and log decays these are added
    """
    from fastweights.kernels.triton.device.decay_backward import reader_gradients as gradients

    k, log_decay, ends = streams[2:5]
    tiles = reader_tiles(chunks)
    blocks = -(-chunks.keys // tiles.keys)
    by_channel = wanted[2] and ends is not None
    d_rows = rows.new_empty(rows.shape) if wanted[0] or by_channel else None
    d_k = k.new_empty(k.shape) if wanted[1] or by_channel else None
    d_ends = d_log_decay = None
    if ends is not None and by_channel and d_states is not None:
        d_ends = ends.new_empty(len(ends), 1, chunks.keys)
    if log_decay is not None and wanted[2]:
        # each block of keys finds a part
        d_log_decay = log_decay.new_empty((*log_decay.shape[:-1], blocks), dtype=torch.float32)

    read = *strided(rows, k, v, log_decay, d_o), ends, streams.steep, states, d_states
    written = *strided(d_rows, d_k, d_log_decay), d_ends
    arguments = (*read, *written, *strided(before.k if before else None))
    launch_chunks(gradients, chunks.count * blocks, arguments, chunks, tiles, strict)
    if d_log_decay is not None and log_decay is not None:
        d_log_decay = d_log_decay.sum(-1, keepdim=True).to(log_decay.dtype)
        if before is not None and before.log_decay is not None:
            d_log_decay += before.log_decay
    return ReaderGradients(d_rows, d_k, d_log_decay, d_ends)


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
    chunks, given = (
        Chunks.of(q, v, torch.promote_types(q.dtype, v.dtype)),
        Given(q, None, k, log_decay),
    )
    d_o, anchored = side_by_side(d_o), anchor(given, chunks)
    rows = anchored.q
    assert rows is not None
    d_states = d_start = d_v = None
    if for_start or for_k or for_v or for_decay:
        d_states, d_start = chunk_states(d_final, d_o, anchored, chunks, reverse=True)
    if for_v:
        d_v = value_gradients(rows, v, anchored, d_o, scores, d_states, chunks, strict=False)
    found = Given(None, None, None, None)
    if for_q or for_k or for_decay:
        states, _ = chunk_states(start, v, anchored, chunks)
        asked = (for_q, for_k, for_decay)
        by_q = reader_gradients(
            rows, v, anchored, d_o, states, d_states, chunks, strict=False, wanted=asked
        )
        found = Given(by_q.rows, None, by_q.k, by_q.log_decay)
        if anchored.steep is not None:
            asked, readers = (for_q, False, for_k, for_decay), [Reader(q, v, d_o, False)]
            found = release(readers, given, [by_q], anchored, chunks, asked)
    return d_start, found.q, found.k, d_v, found.log_decay
