"""What all kernels share: tiles of streams in and out of memory, and products of float32 tiles."""

import triton
import triton.language as tl


@triton.jit
def zeros(length: tl.constexpr):
    """[length] in float32."""
    return tl.zeros([length], tl.float32)


@triton.jit
def zero_matrix(height: tl.constexpr, width: tl.constexpr):
    """[height, width] in float32."""
    return tl.zeros([height, width], tl.float32)


@triton.jit
def rows_of(stream, b, h):
    """The pointer to the first token of a sequence's head."""
    return stream.data + tl.cast(b, tl.int64) * stream.batch + tl.cast(h, tl.int64) * stream.head


@triton.jit
def offsets(rows, step, columns):
    """Of elements, 64 bits wide."""
    return tl.cast(rows, tl.int64)[:, None] * step + columns[None, :]


@triton.jit
def load_tile(stream, b, h, rows, length, columns, width: tl.constexpr):
    """The tokens `rows` [C] of a stream, columns [D]: [C, D], 0 outside of the stream."""
    places = rows_of(stream, b, h) + offsets(rows, stream.time, columns)
    inside = ((rows >= 0) & (rows < length))[:, None] & (columns < width)[None, :]
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def load_tile_transposed(stream, b, h, rows, length, columns, width: tl.constexpr):
    """The same as [D, C]."""
    places = rows_of(stream, b, h) + tl.cast(rows, tl.int64)[None, :] * stream.time
    inside = ((rows >= 0) & (rows < length))[None, :] & (columns < width)[:, None]
    return tl.load(places + columns[:, None], mask=inside, other=0.0)


@triton.jit
def load_column(stream, b, h, rows, length):
    """The tokens `rows` of a stream of width 1: [C], 0 outside of the stream."""
    places = rows_of(stream, b, h) + tl.cast(rows, tl.int64) * stream.time
    return tl.load(places, mask=(rows >= 0) & (rows < length), other=0.0)


@triton.jit
def store_tile(stream, b, h, rows, length, columns, width: tl.constexpr, tile):
    """[C, D] to where `load_tile` reads it, in the stream's dtype."""
    places = rows_of(stream, b, h) + offsets(rows, stream.time, columns)
    inside = ((rows >= 0) & (rows < length))[:, None] & (columns < width)[None, :]
    tl.store(places, tile.to(stream.data.dtype.element_ty), mask=inside)


@triton.jit
def store_where_kept(stream, b, h, rows, length, columns, width: tl.constexpr, tile):
    """A tile to a stream, if that is wanted."""
    if stream is not None:
        store_tile(stream, b, h, rows, length, columns, width, tile)


@triton.jit
def store_tile_transposed(stream, b, h, rows, length, columns, width: tl.constexpr, tile):
    """[D, C] to where `load_tile_transposed` reads it, in the stream's dtype."""
    places = rows_of(stream, b, h) + tl.cast(rows, tl.int64)[None, :] * stream.time
    inside = ((rows >= 0) & (rows < length))[None, :] & (columns < width)[:, None]
    tl.store(places + columns[:, None], tile.to(stream.data.dtype.element_ty), mask=inside)


@triton.jit
def store_column(stream, b, h, rows, length, column):
    """[C] to where `load_column` reads it."""
    places = rows_of(stream, b, h) + tl.cast(rows, tl.int64) * stream.time
    inside = (rows >= 0) & (rows < length)
    tl.store(places, column.to(stream.data.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(matrices, index, rows, height: tl.constexpr, columns, width: tl.constexpr):
    """[R, C] of the matrix [height, width] at this index, 0 outside of it."""
    places = tl.cast(index, tl.int64) * (height * width) + rows[:, None] * width + columns[None, :]
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    return tl.load(matrices + places, mask=inside, other=0.0)


@triton.jit
def load_or_zeros(matrices, index, rows, height: tl.constexpr, columns, width: tl.constexpr):
    """As `load_matrix`, in float32; zeros where there are no matrices."""
    if matrices is None:
        found = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    else:
        found = load_matrix(matrices, index, rows, height, columns, width).to(tl.float32)
    return found


@triton.jit
def load_matrix_transposed(
    matrices, index, rows, height: tl.constexpr, columns, width: tl.constexpr
):
    """The same as [C, R]."""
    places = tl.cast(index, tl.int64) * (height * width) + rows[None, :] * width + columns[:, None]
    inside = (rows < height)[None, :] & (columns < width)[:, None]
    return tl.load(matrices + places, mask=inside, other=0.0)


@triton.jit
def load_end(ends, index, which: tl.constexpr, columns, width: tl.constexpr):
    """One [D, 1] of a chunk's ``[3, width]`` ends."""
    return load_matrix_transposed(ends, 3 * index + which, tl.arange(0, 1), 1, columns, width)


@triton.jit
def pass_end(state, ends, index, which: tl.constexpr, columns, width: tl.constexpr):
    """2^end ∘ S of a state [D, ·] and one of the ends of a chunk; S without ends."""
    if ends is not None:
        state *= tl.exp2(load_end(ends, index, which, columns, width))
    return state


@triton.jit
def store_matrix(matrices, index, rows, height: tl.constexpr, columns, width: tl.constexpr, tile):
    """[R, C] to where `load_matrix` reads it, in the dtype of the matrices."""
    places = tl.cast(index, tl.int64) * (height * width) + rows[:, None] * width + columns[None, :]
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    tl.store(matrices + places, tile.to(matrices.dtype.element_ty), mask=inside)


@triton.jit
def multiply(a, b, kind: tl.constexpr):
    """a b in float32. `kind` is the dtype of the operands: float32 ones are multiplied in three
    products of their parts (to float32's own accuracy), half-precision ones on tensor cores as they
    are.
    """
    if kind == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    return tl.dot(a.to(kind), b.to(kind), input_precision="tf32x3")


@triton.jit
def multiply_add(a, b, c, kind: tl.constexpr):
    """a b + c in float32, as `multiply`."""
    if kind == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="tf32x3")
    return tl.dot(a.to(kind), b.to(kind), c, input_precision="tf32x3")


@triton.jit
def multiply_wide(a, b, kind: tl.constexpr):
    """As `multiply`, of operands that float16 may not hold: in float32 they are multiplied in TF32,
    which has float16's precision and float32's range.
    """
    if kind == tl.float16 and (a.dtype == tl.float32 or b.dtype == tl.float32):
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32")
    return multiply(a, b, kind)


@triton.jit
def multiply_wide_add(a, b, c, kind: tl.constexpr):
    """a b + c, as `multiply_wide`."""
    if kind == tl.float16 and (a.dtype == tl.float32 or b.dtype == tl.float32):
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="tf32")
    return multiply_add(a, b, c, kind)


@triton.jit
def chunk_of(index, length, heads, C: tl.constexpr):
    """(batch, head, first token, tokens [C]) of a chunk."""
    chunks = tl.cdiv(length, C)
    sequence, n = index // chunks, index % chunks
    return sequence // heads, sequence % heads, n * C, n * C + tl.arange(0, C)


@triton.jit
def block_of(width: tl.constexpr, B: tl.constexpr):
    """(which block of columns a program has, the columns [B], what is left of its number)"""
    blocks: tl.constexpr = (width + B - 1) // B
    block = tl.program_id(0) % blocks
    return block, block * B + tl.arange(0, B), tl.program_id(0) // blocks


@triton.jit
def state_block(sizes: tl.constexpr):
    """(rows [BK], columns [BV], which block of columns, what is left of a program's number)"""
    k_blocks: tl.constexpr = (sizes.K + sizes.BK - 1) // sizes.BK
    block, across, place = block_of(sizes.V, sizes.BV)
    return place % k_blocks * sizes.BK + tl.arange(0, sizes.BK), across, block, place // k_blocks


@triton.jit
def segment_of(place, length, heads, span, C: tl.constexpr):
    """(sequence, batch, head, its number of chunks, the first of a segment, the one behind it)"""
    chunks = tl.cdiv(length, C)
    segments = tl.cdiv(chunks, span)
    sequence, begin = place // segments, place % segments * span
    end = tl.minimum(begin + span, chunks)
    return sequence, sequence // heads, sequence % heads, chunks, begin, end
