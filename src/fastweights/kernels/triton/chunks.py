"""The states before chunks of tokens, and what rows read of them: parts that the rules share which
decay a matrix per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fastweights.kernels.triton.chips import chip_of
from fastweights.kernels.triton.launch import launch
from fastweights.kernels.triton.streams import next_power, strided

HALF = 128
"""Registers of a thread with which a multiprocessor holds 512 threads."""

HOPPER = 90
"""The capability from which on products read shared memory."""

WIDEST = 256
"""The widest keys and values that the kernels' tiles are made for."""

NARROWEST = 32
"""Of blocks: on Hopper, Triton 3.6 reads those of 16 columns in bfloat16 wrongly."""

SHORTEST_SEGMENT = 8
"""Chunks that one program walks at least: shorter segments cost more than they gain."""

FEWEST_SEGMENTS = 4
"""Segments that time is cut into, if at all: their chunks are walked twice."""


class Chunks(NamedTuple):
    """Streams cut into chunks.

    Attributes:
        batch, time, heads: of the streams
        keys, values: widths
        kind: the dtype of the products
        capability: of the GPU
    """

    batch: int
    time: int
    heads: int
    keys: int
    values: int
    kind: torch.dtype
    capability: int

    @classmethod
    def of(cls, rows: Tensor, v: Tensor, kind: torch.dtype) -> Self:
        """Of the streams of rows ``[b t h k]`` and values ``[b t h v]``."""
        batch, time, heads, keys = rows.shape
        capability = chip_of(rows.device).capability
        return cls(batch, time, heads, keys, v.shape[-1], kind, capability)

    @property
    def size(self) -> int:
        """Tokens of a chunk; the parts that float32 is multiplied in need twice the registers."""
        return 32 if self.kind == torch.float32 else 64

    @property
    def per_sequence(self) -> int:
        return -(-self.time // self.size)

    @property
    def sequences(self) -> int:
        """Sequences and heads."""
        return self.batch * self.heads

    @property
    def count(self) -> int:
        return self.sequences * self.per_sequence

    @property
    def fill_hopper(self) -> bool:
        """Whether larger tiles pay: bfloat16 keys of the widths that were measured on Hopper."""
        wide = 64 < self.keys <= 128
        return wide and self.kind == torch.bfloat16 and self.capability >= HOPPER

    @property
    def state_dtype(self) -> torch.dtype:
        """Of stored states; sums over many tokens outgrow float16."""
        return torch.float32 if self.kind == torch.float16 else self.kind

    @property
    def states_shape(self) -> tuple[int, int, int]:
        return self.count, self.keys, self.values

    def segment_span(self, programs: int, device: torch.device) -> int:
        """How many chunks a program walks, where a walk of all time takes so many `programs`: all,
        or so few that every multiprocessor has two programs.
        """
        segments = min(
            2 * chip_of(device).multiprocessors // max(1, programs),
            self.per_sequence // SHORTEST_SEGMENT,
        )
        segments = segments if segments >= FEWEST_SEGMENTS else 1
        return max(1, -(-self.per_sequence // segments))


class ChunkStreams(NamedTuple):
    """Streams ``[b t h ·]`` as the parts of chunks read them, and what decays them.

    Attributes:
        q, e, k: rows and keys; of a decay per channel decayed from and to their chunk's anchor
        log_decay: of a decay per head, or None
        ends: ``[b h N, 3, k]`` of a decay per channel, or None: Σ log2 α of a chunk before its
            anchor, at it and behind it
        steep: ``[b h N]``: whether the pairs inside a chunk are not those of rows and keys
    """

    q: Tensor | None
    e: Tensor | None
    k: Tensor
    log_decay: Tensor | None
    ends: Tensor | None
    steep: Tensor | None


class Tiles(NamedTuple):
    """How a kernel is launched: the widths of its blocks of keys and values, warps, stages, and the
    registers that a thread may have (0: as many as it takes).
    """

    keys: int
    values: int
    warps: int
    stages: int = 2
    registers: int = 0

    def options(self) -> dict[str, int]:
        found = {"num_warps": self.warps, "num_stages": self.stages}
        return found | {"maxnreg": self.registers} if self.registers else found

    def blocks(self, chunks: Chunks) -> int:
        """Blocks of a state."""
        return -(-chunks.keys // self.keys) * -(-chunks.values // self.values)


class ChunkSizes(NamedTuple):
    """What kernels are compiled for: the widths of keys and values, the tokens of a chunk, the
    widths of tiles, and the dtype of products.
    """

    K: int
    V: int
    C: int
    BK: int
    BV: int
    KIND: Any

    @classmethod
    def of(cls, chunks: Chunks, tiles: Tiles) -> Self:
        kind = product_kind(chunks.kind)
        return cls(chunks.keys, chunks.values, chunks.size, tiles.keys, tiles.values, kind)


def block_of(width: int, most: int) -> int:
    """The width of a block: a power of 2 from `NARROWEST`, or `most` if that is less, to `most`."""
    return min(most, max(NARROWEST, next_power(width)))


def state_tiles(chunks: Chunks) -> Tiles:
    """Of kernels that walk states."""
    if chunks.fill_hopper:
        return Tiles(128, block_of(chunks.values, 64), warps=8, stages=3)
    keys = 32 if chunks.kind == torch.float32 else 64
    return Tiles(block_of(chunks.keys, keys), block_of(chunks.values, 64), warps=4)


def output_tiles(chunks: Chunks) -> Tiles:
    """Of kernels that read the states of all chunks at once."""
    if chunks.kind == torch.float32:
        return Tiles(block_of(chunks.keys, 32), block_of(chunks.values, 64), warps=4)
    values = block_of(chunks.values, 128)
    return Tiles(block_of(chunks.keys, 64), values, warps=8 if values == 128 else 4)


def product_kind(dtype: torch.dtype) -> Any:
    """Triton's name of the dtype that products are made in."""
    from triton import language as tl

    kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return kinds[dtype]


def launch_chunks(
    kernel: Any,
    programs: int,
    arguments: Sequence[object],
    chunks: Chunks,
    tiles: Tiles,
    *constants: bool,
    span: int | None = None,
) -> None:
    """Start a kernel that goes through chunks, by so many programs.

    Args:
        arguments: streams and what else it reads and writes, in its order
        constants: that it is compiled for
        span: of segments in chunks, if it walks along them
    """
    lengths = (chunks.time, chunks.heads, *(() if span is None else (span,)))
    sizes = ChunkSizes.of(chunks, tiles)
    launch(kernel, (programs,), *arguments, *lengths, sizes, *constants, **tiles.options())


def chunk_states(
    start: Tensor,
    v: Tensor,
    streams: ChunkStreams,
    chunks: Chunks,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the states ``[b h N, k, v]`` before the chunks, decayed to their anchors, the one
    ``[b h k v]`` after the last token).

    In `reverse`, of the last state's gradient and that of what the queries read: (the gradients of
    the states after the chunks, decayed to their anchors, that of the first state).

    Args:
        start: ``[b h k v]`` before the first token, in float32
        v: the stream of values ``[b t h v]``
        streams: of the others
        chunks: of these streams
    """
    from fastweights.kernels.triton.device.decay import states

    tiles, log_decay, ends = state_tiles(chunks), streams.log_decay, streams.ends
    read = *strided(streams.q if reverse else streams.k, v, log_decay), ends
    found = v.new_empty(chunks.states_shape, dtype=chunks.state_dtype)

    def walk(start: Tensor | None, *written: Tensor | None, span: int, segments: int) -> None:
        programs = chunks.sequences * segments * tiles.blocks(chunks)
        arguments = (start, *read, *written)
        launch_chunks(states, programs, arguments, chunks, tiles, reverse, span=span)

    decays = log_decay is not None or ends is not None
    return found, walk_time(walk, start, found, chunks, decays, reverse=reverse)


def walk_time(
    walk: Callable[..., None],
    start: Tensor,
    found: Tensor,
    chunks: Chunks,
    decays: bool,
    *,
    reverse: bool,
) -> Tensor:
    """The state ``[b h k v]`` that a walk over the chunks of all time ends with.

    Args:
        walk: over the chunks of segments of `span` chunks, from the states before them (None:
            zeros): writes the state before each chunk, those after the segments and Σ log2 α of
            them, each unless it is None
        start: the state that it begins with, in float32
        found: ``[b h N, k, v]``, what it writes for each chunk
        chunks: of the streams
        decays: whether the state decays
        reverse: whether it goes from the last chunk to the first
    """
    start = start.contiguous()
    last = torch.empty_like(start)
    span = chunks.segment_span(chunks.sequences * state_tiles(chunks).blocks(chunks), found.device)
    segments = -(-chunks.per_sequence // span)
    if segments <= 1:
        walk(start, found, last, None, span=span, segments=1)
        return last
    ends = start.new_empty(chunks.sequences * segments, chunks.keys, chunks.values)
    totals = ends.new_empty(ends.shape[:2]) if decays else None
    walk(None, None, ends, totals, span=span, segments=segments)
    starts = chain_segments(start, ends, totals, last, chunks, reverse=reverse)
    walk(starts, found, None, None, span=span, segments=segments)
    return last


def chain_segments(
    start: Tensor,
    ends: Tensor,
    totals: Tensor | None,
    final: Tensor,
    chunks: Chunks,
    *,
    reverse: bool,
) -> Tensor:
    """The states before segments ``[b h segments, k, v]``, from what each leaves of zeros.

    Args:
        start: before the first segment (the last, in `reverse`)
        ends: what each segment ends with that starts from zeros
        totals: Σ log2 α of each ``[b h segments, k]``; None where nothing decays
        final: ``[b h k v]``, into which the state after the last segment goes
        chunks: of the streams
        reverse: whether a segment precedes the one before it
    """
    from fastweights.kernels.triton.device.decay import segment_starts

    found, tiles = torch.empty_like(ends), state_tiles(chunks)
    programs, segments = chunks.sequences * tiles.blocks(chunks), len(ends) // chunks.sequences
    arguments = (start, ends, totals, found, final, segments, ChunkSizes.of(chunks, tiles))
    launch(segment_starts, (programs,), *arguments, reverse, **tiles.options())
    return found


def chunk_outputs(
    rows: Tensor,
    v: Tensor,
    streams: ChunkStreams,
    scores: Tensor | None,
    states: Tensor,
    chunks: Chunks,
    *,
    strict: bool,
) -> Tensor:
    """What the rows read, ``[b t h v]`` in the dtype of the products.

    Args:
        rows: the queries or erasing keys of `streams`
        v: the values that the states were written with
        streams: what they are decayed by, and the keys
        scores: of `anchored.steep_scores`
        states: of `chunk_states`
        chunks: of these streams
        strict: whether a row sees only the keys of tokens before it
    """
    from fastweights.kernels.triton.device.decay import outputs

    tiles = output_tiles(chunks)
    o = v.new_empty(*rows.shape[:-1], chunks.values, dtype=chunks.kind)
    programs = chunks.count * -(-chunks.values // tiles.values)
    read = *strided(rows, streams.k, v, streams.log_decay), scores, streams.steep, states
    launch_chunks(outputs, programs, (*read, *strided(o)), chunks, tiles, strict)
    return o
