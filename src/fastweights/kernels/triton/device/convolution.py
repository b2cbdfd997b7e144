"""The short causal convolution, its gradients, and one token of it."""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.tiles import (
    load_column,
    load_tile,
    rows_of,
    store_matrix,
    store_tile,
)


@triton.jit
def load_seen(tail, x, b, first, rows, length, columns, WIDTH: tl.constexpr, BEFORE: tl.constexpr):
    """Inputs [R, C] in float32, of which the last BEFORE before row 0 are in the tail; `first` is
    the lowest of `rows`.
    """
    seen = load_tile(x, b, 0, rows, length, columns, WIDTH).to(tl.float32)
    if first < 0:
        seen += load_tile(tail, b, 0, rows + BEFORE, BEFORE, columns, WIDTH).to(tl.float32)
    return seen


@triton.jit
def keep_shared(tile, document, b, rows, others, length, BEFORE: tl.constexpr):
    """The tile, 0 where the inputs `rows` and `others` [R] are of two documents."""
    if document is not None:
        own = load_column(document, b, 0, rows + BEFORE, length + BEFORE)
        other = load_column(document, b, 0, others + BEFORE, length + BEFORE)
        tile = tl.where((own == other)[:, None], tile, 0.0)
    return tile


@triton.jit
def load_channels(values, row, columns, WIDTH: tl.constexpr):
    """[C] in float32 of a row of [· WIDTH]."""
    return tl.load(values + row * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length", "tiles"])
def convolve(
    y,
    following,
    d_y,
    tail,
    x,
    taps,
    bias,
    document,
    length,
    tiles,
    WIDTH: tl.constexpr,
    BEFORE: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """z_t = Σ_j taps_j ⊙ x_{t-n+j} + bias, and y = z or SiLU(z), for a tile of tokens; the last
    tile's program writes the tail that follows. Where dy is given, y = dy ⊙ SiLU'(z) instead.
    """
    b, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tile * ROWS + tl.arange(0, ROWS)

    z = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for j in range(BEFORE + 1):
        others = rows - (BEFORE - j)  # taps_j reads x_{t-n+j}
        first = tile * ROWS - (BEFORE - j)
        seen = load_seen(tail, x, b, first, others, length, columns, WIDTH, BEFORE)
        seen = keep_shared(seen, document, b, rows, others, length, BEFORE)
        z += load_channels(taps, j, columns, WIDTH)[None, :] * seen
    if bias is not None:
        z += load_channels(bias, 0, columns, WIDTH)[None, :]
    if d_y is not None:
        upstream = load_tile(d_y, b, 0, rows, length, columns, WIDTH).to(tl.float32)
        s = tl.sigmoid(z)
        # (z σ(z))' = σ(z) (1 + z (1 - σ(z)))
        z = upstream * s * (1 + z * (1 - s))
    elif SILU:
        z = z * tl.sigmoid(z)
    store_tile(y, b, 0, rows, length, columns, WIDTH, z)

    if following is not None:  # noqa: SIM102, the compiler's condition and the program's
        if tile == tiles - 1:
            # the last n inputs, 0 where they are of another document than the last token
            kept = tl.arange(0, KEPT)
            newest = length - BEFORE + kept
            last = load_seen(tail, x, b, length - BEFORE, newest, length, columns, WIDTH, BEFORE)
            last = keep_shared(last, document, b, newest, length - 1 + 0 * kept, length, BEFORE)
            store_tile(following, b, 0, kept, BEFORE, columns, WIDTH, last)


@triton.jit(do_not_specialize=["length", "programs"])
def convolve_back(
    d_tail,
    d_x,
    d_weights,
    d_z,
    d_following,
    tail,
    x,
    taps,
    document,
    length,
    programs,
    WIDTH: tl.constexpr,
    BEFORE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Of TILES tiles of inputs, the tail's in front: dx_s = Σ_i taps_{n-i} ⊙ dz_{s+i}, and for
    their part of the sums dtaps_{n-i} = Σ_s dz_{s+i} ⊙ x_s and dbias = Σ_s dz_s, which stands
    behind the taps.
    """
    b, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = tl.arange(0, WEIGHTS)[:, None]
    sums = tl.zeros([WEIGHTS, COLUMNS], dtype=tl.float32)
    for n in range(TILES):
        first = (program * TILES + n) * ROWS - BEFORE
        rows = first + tl.arange(0, ROWS)
        seen = load_seen(tail, x, b, first, rows, length, columns, WIDTH, BEFORE)
        gradient = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for i in range(BEFORE + 1):
            # input s is read by token s + i with the tap n - i
            upstream = load_tile(d_z, b, 0, rows + i, length, columns, WIDTH).to(tl.float32)
            upstream = keep_shared(upstream, document, b, rows, rows + i, length, BEFORE)
            gradient += load_channels(taps, BEFORE - i, columns, WIDTH)[None, :] * upstream
            if d_weights is not None:
                part = tl.sum(upstream * seen, 0)[None, :]  # Σ_s dz_{s+i} ⊙ x_s
                sums += tl.where(places == BEFORE - i, part, 0.0)
        if BIAS and d_weights is not None:
            own = load_tile(d_z, b, 0, rows, length, columns, WIDTH).to(tl.float32)
            sums += tl.where(places == BEFORE + 1, tl.sum(own, 0)[None, :], 0.0)
        if d_following is not None:
            # the last n inputs are the next tail as they are
            kept = rows - (length - BEFORE)
            later = load_tile(d_following, b, 0, kept, BEFORE, columns, WIDTH).to(tl.float32)
            end = length - 1 + 0 * rows
            gradient += keep_shared(later, document, b, rows, end, length, BEFORE)
        store_tile(d_x, b, 0, rows, length, columns, WIDTH, gradient)
        if d_tail is not None:  # noqa: SIM102
            if first < 0:
                # inputs before row 0 are the tail's
                store_tile(d_tail, b, 0, rows + BEFORE, BEFORE, columns, WIDTH, gradient)
    if d_weights is not None:
        height: tl.constexpr = BEFORE + 1 + (1 if BIAS else 0)
        at = tl.arange(0, WEIGHTS)
        store_matrix(d_weights, tl.program_id(0), at, height, columns, WIDTH, sums)


@triton.jit
def convolve_token(
    y,
    following,
    tail,
    x,
    taps,
    bias,
    WIDTH: tl.constexpr,
    BEFORE: tl.constexpr,
    SILU: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One token. The next tail may be written over the last: a thread keeps to its channels and
    stores an input after it has loaded the one behind.
    """
    b = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    z = tl.zeros([COLUMNS], dtype=tl.float32)
    for j in tl.static_range(BEFORE):
        # x_{t-n+j} has place j in the tail, and j - 1 in the next
        place = rows_of(tail, b, 0) + j * tail.time + columns
        seen = tl.load(place, mask=inside, other=0.0)
        z += load_channels(taps, j, columns, WIDTH) * seen.to(tl.float32)
        if j > 0:
            tl.store(rows_of(following, b, 0) + (j - 1) * WIDTH + columns, seen, mask=inside)
    own = tl.load(rows_of(x, b, 0) + columns, mask=inside, other=0.0)
    z += load_channels(taps, BEFORE, columns, WIDTH) * own.to(tl.float32)
    if BEFORE > 0:
        tl.store(rows_of(following, b, 0) + (BEFORE - 1) * WIDTH + columns, own, mask=inside)
    if bias is not None:
        z += load_channels(bias, 0, columns, WIDTH)
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(rows_of(y, b, 0) + columns, z.to(y.data.dtype.element_ty), mask=inside)
