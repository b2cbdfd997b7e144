"""Inner products of a chunk's rows with its keys, decayed in between, and what decays towards its
ends.

With g_r = log2 α_r ≤ 0 of the chunk's tokens, P_ij = Σ_c row_ic key_jc 2^(Σ_{j<r≤i} g_rc) for j ≤ i
(STRICT: j < i), read_i = 2^(Σ_{r≤i} g_r), write_j = 2^(Σ_{r>j} g_r) and carry = 2^(Σ_r g_r). The
rows are queries, or the keys of an erasing rule.

In float32 a sum that stands in an exponent is never a difference of other sums, so that −inf and
steep decays are exact: they are cumulative sums, but those between two tokens of decays per
channel. In half precision those of a decay per head are differences of one cumulative sum, of g no
less than `LEAST`: it is 2^14 at most, where float32's step is a quarter of bfloat16's.

Sums of decays per channel are products with matrices of 0 and 1 on tensor cores, g in parts that
bfloat16 holds; a pair of tokens meets at an anchor between them, so that the exponents of both its
sides are ≤ 0:

    level s = 1, 2, 4, … C/2: rows in the upper and keys in the lower half of a block of 2 s
    tokens; the anchor is the last token of the lower half

and where all channels of a chunk decay mildly, all its pairs meet in its middle (`anchored`).
Exponents are made anew for every block of channels, from tiles that the cache still has: kept, they
would not fit the registers.
A function whose name ends in `_transposed` makes the same as [K, C], or [keys, rows], to be the
right side of a product.
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.tiles import (
    load_column,
    load_tile,
    load_tile_transposed,
    multiply_add,
    zero_matrix,
)

LOG2_E = tl.constexpr(1.4426950408889634)
MILD = tl.constexpr(-60.0)
"""The log2 decay over half a chunk above which all pairs may meet in its middle: 2^±60 times a row
or key stays far inside float32's and bfloat16's range.
"""
LEAST = tl.constexpr(-256.0)
"""A log2 decay that leaves nothing in float32, whatever else is added to it."""
EMPTY = tl.constexpr(-1e4)
"""Stands for −inf in matrix products: 2^-10000 is 0, and 0 times it too."""


@triton.jit
def tied_key(log_decay):
    """1 - α = -expm1(log α), in float32 exact to its last bits for any log α ≤ 0."""
    x = log_decay.to(tl.float32)
    # Taylor's series to x^8 / 8!, whose next term is below float32's precision for x > -1/2
    series = 1.0 + x * (1.0 / 8)
    for n in tl.static_range(7, 1, -1):
        series = 1.0 + x * series * (1.0 / n)
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp2(x * LOG2_E))


@triton.jit
def load_decay(log_decay, b, h, rows, length, columns, width: tl.constexpr):
    """log2 α of the tokens `rows`, per channel: [C, K] in float32, 0 outside of the stream."""
    tile = load_tile(log_decay, b, h, rows, length, columns, width)
    return tile.to(tl.float32) * LOG2_E


@triton.jit
def load_decay_transposed(log_decay, b, h, rows, length, columns, width: tl.constexpr):
    """The same as [K, C]."""
    tile = load_tile_transposed(log_decay, b, h, rows, length, columns, width)
    return tile.to(tl.float32) * LOG2_E


@triton.jit
def load_head_decay(log_decay, b, h, rows, length):
    """log2 α of the tokens `rows`, one per head: [C] in float32, 0 outside of the stream."""
    return load_column(log_decay, b, h, rows, length).to(tl.float32) * LOG2_E


@triton.jit
def load_keys(k, log_decay, b, h, rows, length, columns, width: tl.constexpr):
    """The keys [C, K]: those given, or 1 - α where k is None."""
    if k is not None:
        keys = load_tile(k, b, h, rows, length, columns, width)
    else:
        keys = tied_key(load_tile(log_decay, b, h, rows, length, columns, width))
    return keys


@triton.jit
def load_keys_transposed(k, log_decay, b, h, rows, length, columns, width: tl.constexpr):
    """The same as [K, C]."""
    if k is not None:
        keys = load_tile_transposed(k, b, h, rows, length, columns, width)
    else:
        keys = tied_key(load_tile_transposed(log_decay, b, h, rows, length, columns, width))
    return keys


@triton.jit
def causal(C: tl.constexpr, STRICT: tl.constexpr):
    """Which rows i see which keys j: [C, C]."""
    i = tl.arange(0, C)
    return i[:, None] > i[None, :] if STRICT else i[:, None] >= i[None, :]


@triton.jit
def causal_transposed(C: tl.constexpr, STRICT: tl.constexpr):
    """The same as [keys, rows]."""
    i = tl.arange(0, C)
    return i[:, None] < i[None, :] if STRICT else i[:, None] <= i[None, :]


# One decay per head: g [C].


@triton.jit
def head_sums(g):
    """Σ_{r≤i} g_r [C] of g no less than `LEAST`."""
    return tl.cumsum(tl.maximum(g, LEAST), axis=0)


@triton.jit
def pair_decay(g, C: tl.constexpr, STRICT: tl.constexpr, kind: tl.constexpr):
    """2^(Σ_{j<r≤i} g_r) [C, C], 0 where row i does not see key j."""
    if kind == tl.float32:
        i = tl.arange(0, C)
        # column j has g_r of r > j only: summed down to row i, Σ_{j<r≤i} g_r
        sums = tl.cumsum(tl.where(i[:, None] > i[None, :], g[:, None], 0.0), axis=0)
    else:
        ends = head_sums(g)
        # G_i - G_j with G_i = Σ_{r≤i} g_r, which is ≤ 0 where row i sees key j
        sums = tl.minimum(ends[:, None] - ends[None, :], 0.0)
    return tl.where(causal(C, STRICT), tl.exp2(sums), 0.0)


@triton.jit
def pair_decay_transposed(g, C: tl.constexpr, STRICT: tl.constexpr, kind: tl.constexpr):
    """The same as [keys, rows]."""
    if kind == tl.float32:
        i = tl.arange(0, C)
        sums = tl.cumsum(tl.where(i[:, None] < i[None, :], g[None, :], 0.0), axis=1)
    else:
        ends = head_sums(g)
        sums = tl.minimum(ends[None, :] - ends[:, None], 0.0)
    return tl.where(causal_transposed(C, STRICT), tl.exp2(sums), 0.0)


@triton.jit
def pair_decay_both(g, C: tl.constexpr, kind: tl.constexpr):
    """That of both tokens of a pair [C, C]: of i and j at (i, j) and at (j, i)."""
    if kind == tl.float32:
        later = pair_decay_transposed(g, C, False, kind)
        found = tl.where(causal(C, False), pair_decay(g, C, False, kind), later)
    else:
        ends = head_sums(g)
        # -|G_i - G_j| is the exponent of the pair, whichever of the two is the row
        found = tl.exp2(-tl.abs(ends[:, None] - ends[None, :]))
    return found


@triton.jit
def head_read(g):
    """2^(Σ_{r≤i} g_r) [C]."""
    return tl.exp2(tl.cumsum(g, axis=0))


@triton.jit
def head_write(log_decay, b, h, rows, end, kind: tl.constexpr):
    """2^(Σ_{r>j} g_r) [C] of the chunk's `rows`, which ends before the token `end`."""
    if kind == tl.float32:
        # token j takes the g of the one behind it: from the end to j, Σ_{r>j} g_r
        sums = tl.cumsum(load_head_decay(log_decay, b, h, rows + 1, end), axis=0, reverse=True)
    else:
        g = tl.maximum(load_head_decay(log_decay, b, h, rows, end), LEAST)
        sums = tl.sum(g, axis=0) - tl.cumsum(g, axis=0)  # G_end - G_j
    return tl.exp2(sums)


# A decay per channel: g [C, K], transposed [K, C].


@triton.jit
def add_up(chosen, g, kind: tl.constexpr):
    """Σ_r chosen_ir g_r [C, K], as `add_up_finite`, of g that is `EMPTY` where it is below."""
    return add_up_finite(chosen, tl.maximum(g, EMPTY), kind)


@triton.jit
def add_up_finite(chosen, x, kind: tl.constexpr):
    """Σ_r chosen_ir x_r [C, K], of x to as many digits as products of this kind have.

    Args:
        chosen: [C, C] of 0, 1 and -1
        x: [C, K]
        kind: the dtype of the streams
    """
    # x as a sum of bfloat16 parts of 8 bits each, whose products with 0 and ±1 are exact
    chosen = chosen.to(tl.bfloat16)
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    sums = tl.dot(chosen, first, input_precision="tf32x3")
    sums = tl.dot(chosen, second, sums, input_precision="tf32x3")
    if kind == tl.float32:
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(chosen, third, sums, input_precision="tf32x3")
    return sums


@triton.jit
def add_up_transposed(g, chosen, kind: tl.constexpr):
    """Σ_r g_r chosen_ri [K, C], as `add_up`."""
    chosen = chosen.to(tl.bfloat16)
    g = tl.maximum(g, EMPTY)
    first = g.to(tl.bfloat16)
    rest = g - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    sums = tl.dot(first, chosen, input_precision="tf32x3")
    sums = tl.dot(second, chosen, sums, input_precision="tf32x3")
    if kind == tl.float32:
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(third, chosen, sums, input_precision="tf32x3")
    return sums


@triton.jit
def level_sums(g, half, C: tl.constexpr, kind: tl.constexpr):
    """The exponents [C, K], ≤ 0, of the level s = `half`: of rows Σ_{a<r≤i} g_r from the anchor a
    on (upper halves), of keys Σ_{j<r≤a} g_r up to it (lower halves).
    """
    i = tl.arange(0, C)
    anchor = (i // (2 * half)) * (2 * half) + half - 1
    # (a, i] for rows i, behind their anchor a; (j, a] for keys j, up to it
    first, last = tl.minimum(i, anchor), tl.maximum(i, anchor)
    chosen = (i[None, :] > first[:, None]) & (i[None, :] <= last[:, None])
    return add_up(chosen, g, kind)


@triton.jit
def level_sums_transposed(g, half, C: tl.constexpr, kind: tl.constexpr):
    """The same as [K, C]."""
    i = tl.arange(0, C)
    anchor = (i // (2 * half)) * (2 * half) + half - 1
    first, last = tl.minimum(i, anchor), tl.maximum(i, anchor)
    chosen = (i[:, None] > first[None, :]) & (i[:, None] <= last[None, :])
    return add_up_transposed(g, chosen, kind)


@triton.jit
def level_pairs(half, C: tl.constexpr):
    """Which rows meet which keys at this level: [C, C]."""
    i = tl.arange(0, C)
    same = (i // (2 * half))[:, None] == (i // (2 * half))[None, :]
    return same & ((i & half) != 0)[:, None] & ((i & half) == 0)[None, :]


@triton.jit
def level_scores(rows, k, log_decay, b, h, tokens, length, half, sizes: tl.constexpr):
    """Decayed inner products [C, C] of the pairs that meet at the level s = `half`, no others."""
    products = zero_matrix(sizes.C, sizes.C)
    for first in range(0, sizes.K, sizes.BK):
        columns = first + tl.arange(0, sizes.BK)
        g = load_decay(log_decay, b, h, tokens, length, columns, sizes.K)
        right = load_tile(rows, b, h, tokens, length, columns, sizes.K).to(tl.float32)
        # Σ_c (row_ic 2^(Σ_{a<r≤i} g_rc)) (key_jc 2^(Σ_{j<r≤a} g_rc)), by blocks of channels
        right *= tl.exp2(level_sums(g, half, sizes.C, sizes.KIND))
        g = load_decay_transposed(log_decay, b, h, tokens, length, columns, sizes.K)
        keys = load_keys_transposed(k, log_decay, b, h, tokens, length, columns, sizes.K)
        left = keys.to(tl.float32) * tl.exp2(level_sums_transposed(g, half, sizes.C, sizes.KIND))
        products = multiply_add(right, left, products, sizes.KIND)
    return products


@triton.jit
def plain_scores(rows, k, log_decay, b, h, tokens, length, sizes: tl.constexpr):
    """Inner products [C, C] as if nothing decayed."""
    products = zero_matrix(sizes.C, sizes.C)
    for first in range(0, sizes.K, sizes.BK):
        columns = first + tl.arange(0, sizes.BK)
        right = load_tile(rows, b, h, tokens, length, columns, sizes.K)
        left = load_keys_transposed(k, log_decay, b, h, tokens, length, columns, sizes.K)
        products = multiply_add(right, left, products, sizes.KIND)
    return products
