"""What a decay per channel asks for before and after the parts of chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.triton.chunks import (
    HOPPER,
    Chunks,
    ChunkStreams,
    Tiles,
    block_of,
    launch_chunks,
)
from fastweights.kernels.triton.streams import strided


class Given(NamedTuple):
    """Streams ``[b t h ·]`` as given: queries, erasing keys, keys (none: 1 - α), log decays."""

    q: Tensor | None
    e: Tensor | None
    k: Tensor | None
    log_decay: Tensor | None


class ReaderGradients(NamedTuple):
    """Gradients of rows, keys and log decays ``[b t h ·]``, and of the log decays' sums over whole
    chunks ``[b h N, 1, k]``; None of what was not asked for.
    """

    rows: Tensor | None = None
    k: Tensor | None = None
    log_decay: Tensor | None = None
    ends: Tensor | None = None


class Reader(NamedTuple):
    """Rows that read the states, as given.

    Attributes:
        rows: ``[b t h k]``
        v, d_o: values, and the gradient of what the rows read, ``[b t h v]``
        strict: whether a row sees only the keys of tokens before it
    """

    rows: Tensor
    v: Tensor
    d_o: Tensor
    strict: bool


def anchor_tiles(chunks: Chunks) -> Tiles:
    """Of kernels that decay rows and keys."""
    keys = block_of(chunks.keys, 32)
    return Tiles(keys, keys, warps=4, stages=1)


def steep_tiles(chunks: Chunks) -> Tiles:
    """Of kernels that decay pairs of tokens per channel level by level: both sides of a product are
    in registers before Hopper, and the parts of float32 take more of them.
    """
    float32 = chunks.kind == torch.float32
    keys = block_of(chunks.keys, 32 if chunks.capability >= HOPPER and not float32 else 16)
    return Tiles(keys, block_of(chunks.values, 32), warps=4 if float32 else 8, stages=1)


def is_per_channel(log_decay: Tensor | None) -> bool:
    """Whether every key channel has a decay of its own."""
    return log_decay is not None and log_decay.shape[-1] > 1


def anchor(given: Given, chunks: Chunks) -> ChunkStreams:
    """The streams as the parts of chunks read them: without a decay per channel, as given."""
    q, e, k, log_decay = given
    if log_decay is None or not is_per_channel(log_decay):
        assert k is not None
        return ChunkStreams(q, e, k, log_decay, None, None)
    from fastweights.kernels.triton.device.anchored import anchor as kernel

    reading, erasing, writing = (
        None if x is None else x.new_empty(x.shape, dtype=chunks.state_dtype)
        for x in (q, e, log_decay if k is None else k)
    )
    assert writing is not None
    ends = writing.new_empty(chunks.count, 3, chunks.keys, dtype=torch.float32)
    steep, tiles = ends.new_zeros(chunks.count, dtype=torch.int32), anchor_tiles(chunks)
    arguments = (*strided(*given, reading, erasing, writing), ends, steep)
    programs = chunks.count * -(-chunks.keys // tiles.keys)
    launch_chunks(kernel, programs, arguments, chunks, tiles)
    return ChunkStreams(reading, erasing, writing, None, ends, steep)


def steep_scores(
    rows: Tensor,
    given: Given,
    steep: Tensor | None,
    chunks: Chunks,
    *,
    strict: bool,
    found: Tensor | None = None,
) -> Tensor | None:
    """P ``[b h N, C, C]`` of steep chunks and of no others; None where no channel decays alone.

    Args:
        rows: the queries or erasing keys of `given`
        steep: of `anchor`
        chunks: of these streams
        strict: whether a row sees only the keys of tokens before it
        found: what it is written to
    """
    if steep is None:
        return found
    from fastweights.kernels.triton.device.anchored import steep_scores as kernel

    if found is None:
        found = rows.new_empty(chunks.count, chunks.size, chunks.size, dtype=chunks.kind)
    arguments = (*strided(rows, given.k, given.log_decay), found, steep)
    tiles = steep_tiles(chunks)
    launch_chunks(kernel, chunks.count, arguments, chunks, tiles, strict)
    return found


def release(
    readers: Sequence[Reader],
    given: Given,
    found: Sequence[ReaderGradients],
    streams: ChunkStreams,
    chunks: Chunks,
    wanted: Sequence[bool],
) -> Given:
    """The gradients of the given streams.

    Args:
        readers: of the queries and, if any, of the erasing keys
        found: those of the anchored streams by each; the last has all of the keys, the first those
            of the ends
        streams: of `anchor`
        chunks: of the streams
        wanted: which are asked for
    """
    from fastweights.kernels.triton.device import anchored as device

    asked = zip(given, wanted, strict=True)
    gradients = Given(*(x.new_empty(x.shape) if x is not None and on else None for x, on in asked))
    d_rows = found[0].rows, found[1].rows if len(found) > 1 else None
    read = (*streams[:3], given.log_decay, *d_rows, found[-1].k)
    tiles = anchor_tiles(chunks)
    programs = chunks.count * -(-chunks.keys // tiles.keys)
    arguments = (*strided(*read), found[0].ends, *strided(*gradients))
    tied = given.k is None
    launch_chunks(device.release, programs, arguments, chunks, tiles, tied)
    for reader, d_rows in zip(readers, gradients[:2], strict=False):
        read = strided(reader.rows, given.k, reader.v, given.log_decay, reader.d_o)
        arguments = (*read, streams.steep, *strided(d_rows, gradients.k, gradients.log_decay))
        tiles, strict = steep_tiles(chunks), reader.strict
        launch_chunks(device.steep_gradients, chunks.count, arguments, chunks, tiles, strict)
    return gradients
