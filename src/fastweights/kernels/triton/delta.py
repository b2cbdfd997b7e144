"""`Delta` in Triton: many tokens, forward and backward, also with erasing keys of their own, as
`DPLR` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.table import Kernel
from fastweights.kernels.triton.anchored import Given, Reader, anchor, release, steep_scores
from fastweights.kernels.triton.chips import chip_of
from fastweights.kernels.triton.chunks import (
    WIDEST,
    Chunks,
    ChunkSizes,
    ChunkStreams,
    Tiles,
    block_of,
    chunk_outputs,
    launch_chunks,
    output_tiles,
    state_tiles,
)
from fastweights.kernels.triton.decay import expand_streams, refuse_streams
from fastweights.kernels.triton.decay_backward import reader_gradients, value_gradients
from fastweights.kernels.triton.launch import DEVICES, launch
from fastweights.kernels.triton.operator import NoSettings, OperatorResult, Streams, TritonOperator
from fastweights.kernels.triton.streams import Strided, side_by_side, strided
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.dplr import DPLR


class DeltaStreams(NamedTuple):
    """The streams of the operator, ``[b t h ·]``: keys e erase, keys k write. `start` is the state
    ``[b h k v]`` before the first token.
    """

    start: Tensor
    q: Tensor
    e: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None

    @property
    def given(self) -> Given:
        return Given(self.q, self.e, self.k, self.log_decay)

    @property
    def chunks(self) -> Chunks:
        return Chunks.of(self.q, self.v, torch.promote_types(self.q.dtype, self.v.dtype))


def write_tiles(chunks: Chunks, device: torch.device) -> Tiles:
    """Of the kernel that walks along states and erases from them: all keys in one block, so many
    values that registers hold the state.
    """
    keys, chip = block_of(chunks.keys, WIDEST), chip_of(device)
    if chunks.kind == torch.float32:
        return _float32_tiles(chunks, keys)
    values = 64 if keys <= 128 and chip.capability == 90 else 32
    wide = keys > 128
    return Tiles(
        keys, block_of(chunks.values, values), warps=8 if wide else 4, stages=1 if wide else 2
    )


def write_back_tiles(chunks: Chunks, device: torch.device) -> Tiles:
    """Of the kernel that walks back."""
    keys, chip = block_of(chunks.keys, WIDEST), chip_of(device)
    if chunks.kind == torch.float32:
        return _float32_tiles(chunks, keys)
    wide = keys <= 128 and chip.capability >= 90
    values = block_of(chunks.values, 64 if wide else 32)
    if (chip.capability, keys, values) == (90, 128, 64):
        # two programs to a multiprocessor, which wait for memory in turn
        return Tiles(keys, values, warps=4, stages=1)
    return Tiles(keys, values, warps=8, stages=1 if keys > 128 else 2)


def _float32_tiles(chunks: Chunks, keys: int) -> Tiles:
    """Of both; the parts that float32 is multiplied in take registers."""
    if keys <= 64:
        return Tiles(keys, block_of(chunks.values, 32), warps=4)
    return Tiles(keys, block_of(chunks.values, 16), warps=8, stages=1 if keys > 128 else 2)


def solve(s: DeltaStreams, anchored: ChunkStreams, chunks: Chunks) -> Tensor:
    """The resolvent of every chunk ``[b h N, C, C]``."""
    from fastweights.kernels.triton.device import delta as device

    shape = chunks.count, chunks.size, chunks.size
    products = s.q.new_empty(shape, dtype=torch.float32)
    arguments = (*strided(anchored.e, anchored.k, anchored.log_decay), products)
    tiles = output_tiles(chunks)
    launch_chunks(device.scores, chunks.count, arguments, chunks, tiles)
    steep_scores(s.e, s.given, anchored.steep, chunks, strict=True, found=products)
    found = s.q.new_empty(shape, dtype=chunks.kind)
    arguments = (products, Strided.of(s.beta), found, chunks.time, chunks.heads, chunks.size)
    launch(device.solve, (chunks.count,), *arguments, num_warps=1)
    return found


class WrittenValues(NamedTuple):
    """What is found along the tokens.

    Attributes:
        states: ``[b h N, k, v]`` before every chunk
        values: u ``[b t h v]``
        missing: d ``[b t h v]``, or None
        final: the state ``[b h k v]`` after the last token
        maps: ``[b h segments, k, k]``, what segments of time do to a state; None where time is not
            cut
    """

    states: Tensor
    values: Tensor
    missing: Tensor | None
    final: Tensor
    maps: Tensor | None


class Segments(NamedTuple):
    """Time cut into `count` segments of `span` chunks: one, or as many as occupy the GPU."""

    span: int
    count: int

    @classmethod
    def of(cls, s: DeltaStreams, chunks: Chunks) -> Segments:
        programs = chunks.sequences * write_tiles(chunks, s.q.device).blocks(chunks)
        span = chunks.segment_span(programs, s.q.device)
        return cls(span, max(1, -(-chunks.per_sequence // span)))

    def empty(self, like: Tensor, chunks: Chunks, width: int) -> Tensor:
        """A matrix of keys by so many columns for each segment, in float32."""
        shape = chunks.sequences * self.count, chunks.keys, width
        return like.new_empty(shape, dtype=torch.float32)


def write(
    s: DeltaStreams,
    anchored: ChunkStreams,
    resolvent: Tensor,
    chunks: Chunks,
    *,
    keep_missing: bool,
) -> WrittenValues:
    """Walk along the tokens from the start."""
    from fastweights.kernels.triton.device.delta import states

    segments, tiles = Segments.of(s, chunks), write_tiles(chunks, s.q.device)
    stream = (*s.q.shape[:-1], chunks.values)
    found = s.q.new_empty(chunks.states_shape, dtype=chunks.state_dtype)
    values = s.q.new_empty(stream, dtype=chunks.kind)
    missing = torch.empty_like(values) if keep_missing else None
    final = torch.empty_like(s.start, memory_format=torch.contiguous_format)
    written = found, Strided.of(values), Strided.or_none(missing)

    def walk(
        start: Tensor | None, v: Tensor | None, kept: Sequence[object], last: Tensor | None
    ) -> None:
        width = chunks.keys if v is None else chunks.values
        columns = chunks._replace(values=width)
        blocks = tiles._replace(values=block_of(width, tiles.values))
        read = strided(anchored.e, anchored.k, v, s.beta, anchored.log_decay)
        programs = chunks.sequences * segments.count * -(-width // blocks.values)
        arguments = (start, *read, anchored.ends, resolvent, *kept, last)
        launch_chunks(states, programs, arguments, columns, blocks, span=segments.span)

    if segments.count == 1:
        walk(s.start.contiguous(), s.v, written, final)
        return WrittenValues(found, values, missing, final, None)
    nothing, last = (None, None, None), segments.empty(s.q, chunks, chunks.values)
    maps = segments.empty(s.q, chunks, chunks.keys)
    walk(None, None, nothing, maps)
    walk(None, s.v, nothing, last)
    starts = chain(s.start, maps, last, final, segments, chunks, reverse=False)
    walk(starts, s.v, written, None)
    return WrittenValues(found, values, missing, final, maps)


def chain(
    start: Tensor,
    maps: Tensor,
    ends: Tensor,
    final: Tensor,
    segments: Segments,
    chunks: Chunks,
    *,
    reverse: bool,
) -> Tensor:
    """The states before segments ``[b h segments, k, v]``, from what each leaves of zeros.

    Args:
        start: ``[b h k v]`` before the first segment (the last, in `reverse`)
        maps: of the segments
        ends: what each segment ends with that starts from zeros
        final: ``[b h k v]``, into which the state after the last segment goes
        segments, chunks: of the streams
        reverse: whether a segment precedes the one before it, and maps are transposed
    """
    from fastweights.kernels.triton.device.delta import advance

    tiles, found = state_tiles(chunks._replace(kind=torch.float32)), torch.empty_like(ends)
    order = range(segments.count)[:: -1 if reverse else 1]
    found.unflatten(0, (-1, segments.count))[:, order[0]] = start.flatten(0, 1)
    programs, sizes = chunks.sequences * tiles.blocks(chunks), ChunkSizes.of(chunks, tiles)
    for segment in order:
        arguments = (maps, ends, found, final, segment, segments.count, sizes, reverse)
        launch(advance, (programs,), *arguments, **tiles.options())
    return found


def delta_forward(settings: NoSettings, streams: Streams, keep: bool) -> OperatorResult:
    """(o ``[b t h v]``, the state after the last token), and for the backward the resolvents and
    the scores of steep chunks.
    """
    del settings
    s = DeltaStreams(*streams)  # type: ignore[arg-type]
    chunks = s.chunks
    anchored = anchor(s.given, chunks)
    resolvent = solve(s, anchored, chunks)
    found = write(s, anchored, resolvent, chunks, keep_missing=False)
    scores = steep_scores(s.q, s.given, anchored.steep, chunks, strict=False)
    assert anchored.q is not None
    o = chunk_outputs(
        anchored.q, found.values, anchored, scores, found.states, chunks, strict=False
    )
    return OperatorResult((o, found.final), (resolvent, scores) if keep else ())


class WriteGradients(NamedTuple):
    """What is found on the way back along the tokens.

    Attributes:
        states: ``[b h N, k, v]``, of the state after every chunk
        values: of v
        erased: of what the erasing keys read, y
        beta: ``[b t h ·]``, parts of it
        start: of the start
    """

    states: Tensor
    values: Tensor
    erased: Tensor
    beta: Tensor
    start: Tensor


def write_back(
    s: DeltaStreams,
    anchored: ChunkStreams,
    resolvent: Tensor,
    written: WrittenValues,
    d_o: Tensor,
    d_values: Tensor,
    d_final: Tensor,
    chunks: Chunks,
) -> WriteGradients:
    """Walk back along the tokens from the end.

    Args:
        s, anchored, resolvent, chunks: as in `write`
        written: by it, with what was missing
        d_o, d_final: of the outputs and the state after the last token
        d_values: what the outputs give u inside of chunks
    """
    from fastweights.kernels.triton.device.delta import state_gradients

    segments, tiles = Segments.of(s, chunks), write_back_tiles(chunks, s.q.device)
    blocks = tiles.blocks(chunks)
    found = WriteGradients(
        s.q.new_empty(chunks.states_shape, dtype=chunks.state_dtype),
        torch.empty_like(d_values),
        torch.empty_like(d_values),
        s.q.new_empty(*s.q.shape[:-1], blocks, dtype=torch.float32),
        torch.empty_like(d_final, memory_format=torch.contiguous_format),
    )
    gradients = found.states, *map(Strided.of, (found.values, found.erased, found.beta))

    def walk(
        after: Tensor | None, missing: Tensor | None, kept: Sequence[object], before: Tensor | None
    ) -> None:
        read = strided(*anchored[:3], s.beta, anchored.log_decay)
        arguments = (
            after,
            *read,
            anchored.ends,
            resolvent,
            *strided(d_o, d_values, missing),
            *kept,
            before,
        )
        programs = chunks.sequences * segments.count * blocks
        launch_chunks(state_gradients, programs, arguments, chunks, tiles, span=segments.span)

    if written.maps is None:
        walk(d_final.contiguous(), written.missing, gradients, found.start)
        return found
    first = segments.empty(s.q, chunks, chunks.values)
    walk(None, None, (None, None, None, None), first)
    after = chain(d_final, written.maps, first, found.start, segments, chunks, reverse=True)
    walk(after, written.missing, gradients, None)
    return found


def delta_backward(
    settings: NoSettings,
    streams: Streams,
    saved: Streams,
    gradients: tuple[Tensor, ...],
    wanted: Sequence[bool],
) -> Streams:
    """The gradients of the streams: resolvents and scores were saved, what is written and the
    states are found again.
    """
    del settings
    s, (resolvent, scores) = DeltaStreams(*streams), saved  # type: ignore[arg-type]
    assert resolvent is not None
    chunks, d_o, d_final = s.chunks, side_by_side(gradients[0]), gradients[1]
    anchored = anchor(s.given, chunks)
    written = write(s, anchored, resolvent, chunks, keep_missing=True)
    u, q, e = written.values, anchored.q, anchored.e
    assert q is not None
    assert e is not None
    d_u = value_gradients(q, u, anchored, d_o, scores, None, chunks, strict=False)
    found = write_back(s, anchored, resolvent, written, d_o, d_u, d_final, chunks)
    _, for_q, for_e, for_k, _, _, for_decay = wanted
    by_q = reader_gradients(
        *(q, u, anchored, d_o, written.states, found.states, chunks),
        strict=False,
        wanted=(for_q, for_k, for_decay),
    )
    # what is erased is read from the same states, by the keys that erase
    by_e = reader_gradients(
        *(e, u, anchored, found.erased, written.states, None, chunks),
        strict=True,
        wanted=(for_e, for_k, for_decay),
        before=by_q,
    )
    by_both = Given(by_q.rows, by_e.rows, by_e.k, by_e.log_decay)
    if anchored.steep is not None:
        readers = Reader(s.q, u, d_o, False), Reader(s.e, u, found.erased, True)
        asked = (for_q, for_e, for_k, for_decay)
        by_both = release(readers, s.given, (by_q, by_e), anchored, chunks, asked)
    d_beta = found.beta.sum(-1, keepdim=True).to(s.beta.dtype)
    d_v, d_log_decay = found.values.to(s.v.dtype), by_both.log_decay
    return found.start, *by_both[:3], d_v, d_beta, d_log_decay


def _define(_: NoSettings, streams: Streams) -> tuple[Tensor, Any]:
    start, q, e, k, v, beta, log_decay = streams
    assert None not in (start, q, e, k, v, beta)
    return chunk_loop(DPLR(q, beta * k, v, e, None, log_decay), start)  # type: ignore[arg-type, operator]


DELTA = TritonOperator(
    "delta",
    settings=NoSettings,
    streams=("start", "q", "e", "k", "v", "beta", "log_decay"),
    outputs=2,
    forward=delta_forward,
    backward=delta_backward,
    define=_define,
)


def compute_delta(record: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state): the keys that write erase."""
    q, k, v, beta, log_decay = expand_streams(record, "q", "k", "v", "beta", "log_decay")
    o, final = DELTA(NoSettings(), state, q, k, k, v, beta, log_decay)
    return o, final


def compute_dplr(record: DPLR, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) where w writes and erases what a reads, with β = 1."""
    q, a, w, v, log_decay = expand_streams(record, "q", "a", "w", "v", "log_decay")
    ones = torch.ones(1, 1, 1, 1, device=record.device).expand(*record.shape, 1)
    o, final = DELTA(NoSettings(), state, q, a, w, v, ones, log_decay)
    return o, final


def refuse_dplr(record: DPLR) -> str | None:
    """Why keys are further apart than the kernels have them."""
    if record.b is not None:
        return "what is erased is erased along a key of its own (b), not along w"
    if record.reads_undecayed:
        return "what is erased is read before the state decays"
    return refuse_streams(record)


TRITON_DELTA = Kernel("delta (Triton)", Delta, compute_delta, refuse_streams, DEVICES, True)
TRITON_DPLR = Kernel("DPLR (Triton)", DPLR, compute_dplr, refuse_dplr, DEVICES, True)
