"""RMSNorm and LayerNorm, with a gate behind them, and their gradients."""

import triton
import triton.language as tl


@triton.jit
def load_rows(matrix, step, rows, count, columns, WIDTH: tl.constexpr):
    """[R, C] in float32 of a matrix whose rows are `step` apart, 0 outside of it."""
    places = matrix + tl.cast(rows, tl.int64)[:, None] * step + columns[None, :]
    inside = (rows < count)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(matrix, rows, count, columns, WIDTH: tl.constexpr, tile):
    """[R, C] to a matrix whose rows follow one another."""
    places = matrix + tl.cast(rows, tl.int64)[:, None] * WIDTH + columns[None, :]
    inside = (rows < count)[:, None] & (columns < WIDTH)[None, :]
    tl.store(places, tile.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def load_weight(weight, columns, WIDTH: tl.constexpr):
    """[1, C] in float32."""
    loaded = tl.load(weight + columns, mask=columns < WIDTH, other=0.0)
    return loaded.to(tl.float32)[None, :]


@triton.jit
def standardize(x, columns, eps, WIDTH: tl.constexpr, CENTER: tl.constexpr):
    """x̂ = r (x - mean), or r x, with r = 1 / √(mean square + ε): (x̂ [R, C], r [R, 1])."""
    if CENTER:
        mean = tl.sum(x, 1)[:, None] / WIDTH
        # columns past WIDTH held 0 and would hold -mean: they stay out of the mean square
        x = tl.where((columns < WIDTH)[None, :], x - mean, 0.0)
    r = tl.rsqrt(tl.sum(x * x, 1)[:, None] / WIDTH + eps)
    return x * r, r


@triton.jit(do_not_specialize=["count"])
def normalize(
    y,
    x,
    x_step,
    weight,
    gate,
    gate_step,
    count,
    eps,
    WIDTH: tl.constexpr,
    CENTER: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = x̂ ⊙ w ⊙ g, or ⊙ SiLU(g), for a tile of rows."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = load_rows(x, x_step, rows, count, columns, WIDTH)
    tile, r = standardize(tile, columns, eps, WIDTH, CENTER)
    if weight is not None:
        tile = tile * load_weight(weight, columns, WIDTH)
    if gate is not None:
        g = load_rows(gate, gate_step, rows, count, columns, WIDTH)
        if SILU:
            g = g * tl.sigmoid(g)
        tile = tile * g
    store_rows(y, rows, count, columns, WIDTH, tile)


@triton.jit(do_not_specialize=["count"])
def normalize_back(
    d_x,
    d_gate,
    d_weight,
    d_y,
    d_step,
    x,
    x_step,
    weight,
    gate,
    gate_step,
    count,
    eps,
    WIDTH: tl.constexpr,
    CENTER: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Of TILES tiles of rows, with a the gate that is multiplied by: da = dy ⊙ x̂ ⊙ w,
    dw = Σ_rows dy ⊙ a ⊙ x̂, and as r falls with every x, dx = r (p - x̂ mean(p ⊙ x̂)) for
    p = dy ⊙ a ⊙ w, less r mean(p) where the mean was subtracted.
    """
    columns = tl.arange(0, COLUMNS)
    sums = tl.zeros([1, COLUMNS], dtype=tl.float32)
    for n in range(TILES):
        rows = (tl.program_id(0) * TILES + n) * ROWS + tl.arange(0, ROWS)
        tile = load_rows(x, x_step, rows, count, columns, WIDTH)
        tile, r = standardize(tile, columns, eps, WIDTH, CENTER)
        p = load_rows(d_y, d_step, rows, count, columns, WIDTH)
        if gate is not None:
            g = load_rows(gate, gate_step, rows, count, columns, WIDTH)
            # da = dy ⊙ x̂ ⊙ w, of a = g or SiLU(g)
            d_a = p * tile
            if weight is not None:
                d_a = d_a * load_weight(weight, columns, WIDTH)
            if SILU:
                s = tl.sigmoid(g)
                # (g σ(g))' = σ(g) (1 + g (1 - σ(g)))
                d_a = d_a * s * (1 + g * (1 - s))
                g = g * s
            store_rows(d_gate, rows, count, columns, WIDTH, d_a)
            # dy ⊙ a: its sum with x̂ is dw, times w it is p
            p = p * g
        if d_weight is not None:
            sums += tl.sum(p * tile, 0)[None, :]
        if weight is not None:
            p = p * load_weight(weight, columns, WIDTH)
        change = p - tile * (tl.sum(p * tile, 1)[:, None] / WIDTH)
        if CENTER:
            change = change - tl.sum(p, 1)[:, None] / WIDTH
        store_rows(d_x, rows, count, columns, WIDTH, r * change)
    if d_weight is not None:
        own = tl.program_id(0) + tl.arange(0, 1)
        store_rows(d_weight, own, own + 1, columns, WIDTH, sums)
