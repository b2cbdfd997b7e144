"""Conjugate gradients of the Mesa rule: all steps of a chunk in one kernel."""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.scores import (
    head_read,
    head_write,
    load_head_decay,
    pair_decay_transposed,
)
from fastweights.kernels.triton.device.tiles import (
    load_column,
    load_matrix,
    load_or_zeros,
    load_tile,
    load_tile_transposed,
    multiply_add,
    segment_of,
    state_block,
    store_matrix,
    store_tile_transposed,
    zeros,
)

ROUNDING = tl.constexpr(2.0**-52)
"""(ε/8)² of float32: squared residuals below this part of ‖b‖² are rounding errors."""


@triton.jit
def ratio(a, b):
    """a / b, and 0 where b is 0."""
    zero = b == 0
    return tl.where(zero, 0.0, a / tl.where(zero, 1.0, b))


@triton.jit
def split(tile, parts: tl.constexpr):
    """A float32 tile as a sum of bfloat16 ones: two hold 16 of its 24 bits, three all."""
    high = tile.to(tl.bfloat16)
    rest = tile - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    if parts == 2:
        found = (high, middle)
    else:
        found = (high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16))
    return found


@triton.jit
def split_stream(tile, parts: tl.constexpr):
    """A tile of a stream as `split` does it; one in bfloat16 is its own only part."""
    return (tile,) if tile.dtype == tl.bfloat16 else split(tile.to(tl.float32), parts)


@triton.jit
def multiply_parts(a, p, total, parts: tl.constexpr):
    """a p + total in float32, of a tile in parts and a float32 one, to 2⁻¹⁶ with two parts and to
    float32's own accuracy with three; small products first.
    """
    pieces = split(p, parts)
    # the product of the parts i and j is 2^(-8 (i + j)) of that of the first
    for order in tl.static_range(parts - 1, -1, -1):
        for i in tl.static_range(order + 1):
            if i < len(a):
                total = multiply_add(a[i], pieces[order - i], total, tl.bfloat16)
    return total


@triton.jit
def load_decays(log_decay, b, h, rows, length):
    """log2 γ [C], 0 where nothing decays."""
    if log_decay is None:
        g = tl.zeros_like(rows).to(tl.float32)
    else:
        g = load_head_decay(log_decay, b, h, rows, length)
    return g


@triton.jit(do_not_specialize=["length", "span", "matrices"])
def gram_states(
    start,
    k,
    beta,
    log_decay,
    found,
    final,
    totals,
    length,
    heads,
    span,
    matrices,
    sizes: tl.constexpr,
    PARTS: tl.constexpr,
):
    """H before the chunks of one segment of `span` chunks, one after the other.

    One program per sequence, head and segment, block of rows and block of columns, in this order.

    Args:
        start: ``[b h segments, K, K]`` before each segment; None: zeros
        k, beta, log_decay: streams; log_decay is None where nothing decays
        found: ``[PARTS, b h N, K, K]``, bfloat16 matrices that H is the sum of; or None: H is not
            kept
        final: ``[b h segments, K, K]`` after each segment, or None
        totals: ``[b h segments, K]``, or None: Σ log2 γ of each segment
        matrices: b h N
    """
    down, across, column_block, place = state_block(sizes)
    sequence, b, h, chunks, begin, end = segment_of(place, length, heads, span, sizes.C)
    gram = load_or_zeros(start, place, down, sizes.K, across, sizes.K)
    total = zeros(sizes.BK)
    for chunk in range(begin, end):
        if found is not None:
            index = tl.cast(sequence, tl.int64) * chunks + chunk
            parts = split(gram, PARTS)
            for part in tl.static_range(PARTS):
                store_matrix(
                    found, index + part * matrices, down, sizes.K, across, sizes.K, parts[part]
                )
        # H ← ∏ γ H + Σ_s (∏_{r>s} γ_r) β_s k_sᵀ k_s
        tokens = chunk * sizes.C + tl.arange(0, sizes.C)
        strength = load_column(beta, b, h, tokens, length).to(tl.float32)
        if log_decay is not None:
            sums = tl.sum(load_head_decay(log_decay, b, h, tokens, length), 0)
            end = tl.minimum(length, (chunk + 1) * sizes.C)
            strength *= head_write(log_decay, b, h, tokens, end, tl.float32)
            gram *= tl.exp2(sums)
            total += sums
        keys = split_stream(load_tile_transposed(k, b, h, tokens, length, down, sizes.K), PARTS)
        values = load_tile(k, b, h, tokens, length, across, sizes.K).to(tl.float32)
        gram = multiply_parts(keys, values * strength[:, None], gram, PARTS)
    if final is not None:
        store_matrix(final, place, down, sizes.K, across, sizes.K, gram)
    if totals is not None:
        places = tl.cast(place, tl.int64) * sizes.K + down
        tl.store(totals + places, total, mask=(down < sizes.K) & (column_block == 0))


@triton.jit
def apply(grams, keys, keys_transposed, weights, read, p, parts: tl.constexpr):
    """H_t p_t of a chunk's tokens, ``[K, C]``."""
    # ∏_{r≤t} γ_r H p_t, of H before the chunk
    product = multiply_parts(grams, p, tl.zeros_like(p), parts) * read[None, :]
    # Σ_{s≤t} β_s (∏_{s<r≤t} γ_r) (p_t·k_s) k_s, of the chunk's own tokens
    scores = multiply_parts(keys, p, tl.zeros_like(weights), parts) * weights
    return multiply_parts(keys_transposed, scores, product, parts)


@triton.jit
def load_grams(states, place, matrices, columns, K: tl.constexpr, parts: tl.constexpr):
    """(H of a chunk in its parts, its diagonal [K])"""
    grams = ()
    diagonal = tl.zeros(columns.shape, tl.float32)
    for part in tl.static_range(parts):
        index = place + part * matrices
        grams = grams + (load_matrix(states, index, columns, K, columns, K),)
        places = states + index * (K * K) + columns * (K + 1)
        diagonal += tl.load(places, mask=columns < K, other=0.0).to(tl.float32)
    return grams, diagonal


@triton.jit
def iterate(system, fixed, wanted, guess, tol, max_steps, C: tl.constexpr, parts: tl.constexpr):
    """(x, the steps of every token [C]) of (H + Λ) x = b, until all tokens have converged.

    A first pass takes the guess as a step of size 1 from 0, which is not counted: with a product of
    its own before the loop, NVIDIA's assembler of CUDA 12.8 makes wrong addresses of the others.

    `system`: what `apply` takes of the chunk; `fixed`: Λ; `wanted`: b; `tol`: at which part of the
    guess's a residual is small enough.
    """
    grams, keys, keys_transposed, weights, read = system
    found, left, direction = tl.zeros_like(wanted), wanted, guess
    enough = tl.sum(wanted * wanted, 0) * ROUNDING
    # ‖r‖² of a token that has converged is 0 from then on: it stays where it is
    residual = tl.full([C], 1.0, tl.float32)
    taken = tl.zeros([C], tl.int32)
    step = -1
    while (step < max_steps) & (tl.max(residual, 0) > 0):
        taken += ((residual > 0) & (step >= 0)).to(tl.int32)
        # size = ‖r‖² / p·(H + Λ) p;  x + size p;  r - size (H + Λ) p
        product = apply(grams, keys, keys_transposed, weights, read, direction, parts)
        product += fixed * direction
        size = ratio(residual, tl.sum(direction * product, 0))
        size = tl.where(step < 0, 1.0, size)
        found += size[None, :] * direction
        left -= size[None, :] * product
        # p' = r' + ‖r'‖² / ‖r‖² p
        after = tl.sum(left * left, 0)
        turn = tl.where(step < 0, 0.0, ratio(after, residual))
        direction = left + turn[None, :] * direction
        # ‖r‖² is small enough at tol² ‖b - (H + Λ) guess‖², or where it is rounding
        enough = tl.where(step < 0, tl.maximum(tol * tol * after, enough), enough)
        residual = tl.where((after > enough) & (residual > 0), after, 0.0)
        step += 1
    return found, taken


@triton.jit(do_not_specialize=["length", "chunks", "matrices", "max_steps"])
def conjugate_gradients(
    right,
    k,
    beta,
    log_decay,
    ridge,
    states,
    x,
    steps,
    length,
    heads,
    chunks,
    matrices,
    max_steps,
    tol,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    ONE_RIDGE: tl.constexpr,
):
    """x_t = (H_t + Λ_t)⁻¹ b_t by the iteration of `ConjugateGradient`, until all tokens of a chunk
    have converged; one program per sequence, head and chunk.

    With H before the chunk, H_t p = ∏_{r≤t} γ_r H p + Σ_{s≤t} β_s (∏_{s<r≤t} γ_r) (p·k_s) k_s
    (MesaNet app. C). Tokens are the columns of all tiles: what stays the same in every step is then
    the left side of products, which need not lie in registers.

    Args:
        right: b, a stream as k, beta, log_decay, which is None where nothing decays, and ridge
        states: the H, ``[PARTS, b h chunks, K, K]``, of ``matrices = b h chunks``
        x: a stream, which takes the solutions
        steps: ``[b h t]``, takes the number of steps of every token; or None
        tol: at which part of its first norm a residual is small enough
        ONE_RIDGE: whether all tokens share Λ
    """
    place = tl.cast(tl.program_id(0), tl.int64)
    head, chunk = place // chunks, tl.cast(place % chunks, tl.int32)
    b, h = head // heads, head % heads
    tokens = chunk * C + tl.arange(0, C)
    columns = tl.arange(0, BK)

    key = load_tile(k, b, h, tokens, length, columns, K)
    keys, keys_transposed = split_stream(key, PARTS), split_stream(tl.trans(key), PARTS)
    grams, diagonal_gram = load_grams(states, place, matrices, columns, K, PARTS)

    # weights: β_s ∏_{s<r≤t} γ_r [s, t], read: ∏_{r≤t} γ_r
    g = load_decays(log_decay, b, h, tokens, length)
    read = head_read(g)
    strength = load_column(beta, b, h, tokens, length).to(tl.float32)
    weights = pair_decay_transposed(g, C, False, tl.float32) * strength[:, None]

    # Λ, 1 outside of the streams; diag(H_t + Λ) = Λ + ∏ γ diag H + Σ_s β_s (∏ γ) k_s²
    shown = tl.arange(0, 1) if ONE_RIDGE else tokens
    inside = (shown < length)[None, :] & (columns < K)[:, None]
    fixed = load_tile_transposed(ridge, b, h, shown, length, columns, K).to(tl.float32)
    fixed = tl.where(inside, fixed, 1.0)
    wide = tl.trans(key).to(tl.float32)
    diagonal = fixed + diagonal_gram[:, None] * read[None, :]
    diagonal = multiply_parts(split(wide * wide, PARTS), weights, diagonal, PARTS)

    # b of size 1, from x = b / diag
    wanted = load_tile_transposed(right, b, h, tokens, length, columns, K).to(tl.float32)
    scale = tl.max(tl.abs(wanted), 0)
    wanted = ratio(wanted, scale[None, :])
    system = (grams, keys, keys_transposed, weights, read)
    found, taken = iterate(system, fixed, wanted, wanted / diagonal, tol, max_steps, C, PARTS)
    # x of b is that times the size of b
    store_tile_transposed(x, b, h, tokens, length, columns, K, found * scale[None, :])
    if steps is not None:
        tl.store(steps + head * length + tokens, taken, mask=tokens < length)
