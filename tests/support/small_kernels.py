"""Kernels small enough that what the compiler makes of them is known."""

import triton
import triton.language as tl

from fastweights.kernels.triton.device import tiles


@triton.jit(do_not_specialize=["length"])
def square(
    stream, result, length, width: tl.constexpr, C: tl.constexpr, transposes: tl.constexpr = False
):
    """o = exp2(tile tileᵀ) tile of every chunk; `transposes` a product before multiplying it."""
    rows = tl.program_id(0) * C + tl.arange(0, C)
    columns = tl.arange(0, width)
    tile = tiles.load_tile(stream, 0, 0, rows, length, columns, width)
    turned = tiles.load_tile_transposed(stream, 0, 0, rows, length, columns, width)
    kind: tl.constexpr = tile.dtype
    scores = tl.exp2(tiles.multiply(tile, turned, kind))
    if transposes:
        scores = tl.trans(scores)
    found = tiles.multiply(scores, tile, kind)
    tiles.store_tile(result, 0, 0, rows, length, columns, width, found)


@triton.jit
def exact(a, b, result):
    """A float32 product that no tensor core makes."""
    rows, columns = tl.arange(0, 64)[:, None] * 64, tl.arange(0, 64)[None, :]
    found = tl.dot(tl.load(a + rows + columns), tl.load(b + rows + columns), input_precision="ieee")
    tl.store(result + rows + columns, found)


@triton.jit
def fill(result, width):
    """Zeros."""
    places = tl.arange(0, 64)
    tl.store(result + places, tl.zeros([64], tl.float32), mask=places < width)
