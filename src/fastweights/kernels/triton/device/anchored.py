"""Chunks whose channels decay each by itself, read as if nothing decayed inside them.

With read, write and carry of `scores`, a channel that decays mildly over a chunk has its anchor in
the middle: `up` is a row's decay from there, `down` a key's to there, and

    read = up ∘ 2^head      write = down ∘ 2^tail      carry = 2^(head + tail)

A steep channel has up = read, down = write, and its state decays by 2^passed. So the streams
rows' = rows ∘ up and k' = k ∘ down, and the states as they are kept, S̃ = 2^head ∘ S and
dS̃ = 2^tail ∘ dS', obey what holds where nothing decays,

    o = P V + rows' S̃                      S' = 2^tail ∘ (2^passed ∘ S̃ + k'ᵀ V)
    drows' = dP k' + dO S̃ᵀ                 dS = 2^head ∘ (2^passed ∘ dS̃ + rows'ᵀ dO)
    dk' = dPᵀ rows' + V dS̃ᵀ                dV = Pᵀ dO + k' dS̃

but that P = rows' k'ᵀ only in chunks without a steep channel; in others it is made by levels.
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.decay_backward import reader_products, store_sum
from fastweights.kernels.triton.device.scores import (
    EMPTY,
    MILD,
    add_up,
    add_up_finite,
    causal_transposed,
    level_pairs,
    level_scores,
    level_sums,
    load_decay,
    load_keys,
    plain_scores,
)
from fastweights.kernels.triton.device.tiles import (
    block_of,
    chunk_of,
    load_matrix,
    load_tile,
    multiply_wide,
    store_matrix,
    store_tile,
    store_where_kept,
    zero_matrix,
    zeros,
)


@triton.jit
def channel_sums(g, C: tl.constexpr, kind: tl.constexpr):
    """(log2 up, log2 down [C, K], whether a channel is steep) of g [C, K]."""
    i = tl.arange(0, C)
    reached = tl.where(i[None, :] <= i[:, None], 1.0, 0.0)
    lower = tl.where(i[None, :] < C // 2, 1.0, 0.0)
    # 1 from the middle to a row behind it, -1 from a row to the middle behind it: what the first
    # token decays by lies before all pairs
    rows = add_up(reached - lower, g, kind)
    keys = -rows
    steep = tl.max(tl.abs(rows)) > -MILD
    if steep:
        # a steep channel: Σ_{r≤i} g_r of rows, as read, and Σ_{r>j} g_r of keys, as write
        steeply = tl.max(tl.abs(rows), axis=0)[None, :] > -MILD
        rows = tl.where(steeply, add_up(reached, g, kind), rows)
        keys = tl.where(steeply, add_up(1.0 - reached, g, kind), keys)
    return rows, keys, steep


@triton.jit
def store_ends(ends, index, rows, keys, first, columns, sizes: tl.constexpr):
    """head, passed and tail, from what stands in the first token's row and the last one's.

    As read = up 2^head is what the `first` token [1, K] decays by, and write = down 2^tail is 1 for
    the last.
    """
    i = tl.arange(0, sizes.C)[:, None]
    places = ends + tl.cast(index, tl.int64) * (3 * sizes.K) + columns[None, :]
    inside = (columns < sizes.K)[None, :]
    # head = log2 read - log2 up of the first token, tail = log2 write - log2 down of the last
    outer = tl.where(i == 0, first - rows, -keys)
    at_ends = inside & ((i == 0) | (i == sizes.C - 1))
    tl.store(places + tl.where(i == 0, 0, 2 * sizes.K), outer, mask=at_ends)
    # passed: log2 up + log2 down of the last token, Σ_r g_r in a steep channel, 0 in a mild one
    tl.store(places + (0 * i + sizes.K), rows + keys, mask=inside & (i == sizes.C - 1))


@triton.jit
def store_anchored(rows, found, factors, b, h, tokens, length, columns, width: tl.constexpr):
    """The tokens of a stream times `factors` [C, K], if it is there."""
    if rows is not None:
        tile = load_tile(rows, b, h, tokens, length, columns, width)
        store_tile(found, b, h, tokens, length, columns, width, tile * factors)


@triton.jit(do_not_specialize=["length"])
def anchor(
    q, e, k, log_decay, reading, erasing, writing, ends, steep, length, heads, sizes: tl.constexpr
):
    """Rows and keys as all that follows reads them: one program per chunk and block of K, in this
    order.

    Args:
        q, e, k, log_decay: streams; q and e may be None, k is None where the key is 1 - α
        reading, erasing, writing: the streams q', e' and k', which are written
        ends: ``[b h N, 3, K]``, which is written: head, passed and tail
        steep: ``[b h N]`` zeros: 1 is written where a channel of the chunk is steep
    """
    _, columns, index = block_of(sizes.K, sizes.BK)
    b, h, start, tokens = chunk_of(index, length, heads, sizes.C)
    g = load_decay(log_decay, b, h, tokens, length, columns, sizes.K)
    rows, keys, steeply = channel_sums(g, sizes.C, sizes.KIND)
    if steeply:
        tl.store(steep + index, 1)
    first = load_decay(log_decay, b, h, start + tl.arange(0, 1), length, columns, sizes.K)
    store_ends(ends, index, rows, keys, tl.maximum(first, EMPTY), columns, sizes)
    up, down = tl.exp2(rows), tl.exp2(keys)
    # q' = q ∘ up, e' = e ∘ up, k' = k ∘ down
    store_anchored(q, reading, up, b, h, tokens, length, columns, sizes.K)
    store_anchored(e, erasing, up, b, h, tokens, length, columns, sizes.K)
    keys = load_keys(k, log_decay, b, h, tokens, length, columns, sizes.K)
    store_tile(writing, b, h, tokens, length, columns, sizes.K, keys * down)


@triton.jit(do_not_specialize=["length"])
def steep_scores(
    rows,
    k,
    log_decay,
    found,
    steep,
    length,
    heads,
    sizes: tl.constexpr,
    STRICT: tl.constexpr,
):
    """P of the steep chunks, by levels: one program per chunk.

    Args:
        rows: the stream of queries, or of the keys of an erasing rule
        k, log_decay: as in `anchor`
        found: ``[b h N, C, C]``, written for the steep chunks only
        steep: ``[b h N]``, of `anchor`
    """
    index, inside = tl.program_id(0), tl.arange(0, sizes.C)
    if tl.load(steep + index) == 0:
        return
    b, h, _, tokens = chunk_of(index, length, heads, sizes.C)
    total = zero_matrix(sizes.C, sizes.C)
    if not STRICT:
        # a token with its own key: nothing decays
        products = plain_scores(rows, k, log_decay, b, h, tokens, length, sizes)
        total = tl.where(inside[:, None] == inside[None, :], products, total)
    # the pairs j < i: each meets at one level, the first whose blocks hold both tokens
    half = 1
    while half < sizes.C:
        products = level_scores(rows, k, log_decay, b, h, tokens, length, half, sizes)
        total = tl.where(level_pairs(half, sizes.C), products, total)
        half *= 2
    store_matrix(found, index, inside, sizes.C, inside, sizes.C, total)


@triton.jit
def store_channel_decay_gradient(
    stream, before, log_decay, at, d_keys, d_sums, d_end, TIED: tl.constexpr, sizes: tl.constexpr
):
    """d log α of a decay per channel.

    With c_t = Σ_{r≤t} log α_r, rows hold e^(c_t), keys e^(-c_t), what keys leave in S' e^(c_end -
    c_t), and the state before the chunk e^(c_end) there.

    Args:
        at: batch, head, tokens, how many there are, columns
        d_keys: dk [C, K]
        d_sums: rows ∘ drows - k ∘ dk
        d_end: what c_end gets [K]
        TIED: whether the key is 1 - α
    """
    b, h, tokens, length, columns = at
    # α_t is in the c_s of all s ≥ t: d log α_t = Σ_{s≥t} d_sums_s + d_end
    later = tl.where(causal_transposed(sizes.C, False), 1.0, 0.0)
    found = add_up_finite(later, d_sums, sizes.KIND) + d_end[None, :]
    g = load_decay(log_decay, b, h, tokens, length, columns, sizes.K)
    if TIED:
        # k = 1 - α: dk / d log α = -α
        found -= tl.exp2(g) * d_keys
    found = tl.where(g == float("-inf"), 0.0, found)
    store_sum(stream, before, b, h, tokens, length, columns, sizes.K, found)


@triton.jit(do_not_specialize=["length"])
def release(
    reading,
    erasing,
    writing,
    log_decay,
    d_reading,
    d_erasing,
    d_writing,
    d_ends,
    d_q,
    d_e,
    d_k,
    d_log_decay,
    length,
    heads,
    sizes: tl.constexpr,
    TIED: tl.constexpr,
):
    """The gradients of the streams of `anchor`, from those of what it wrote, but for what the pairs
    of steep chunks give them: one program per chunk and block of K, in this order.

    Args:
        reading, erasing, writing, log_decay: as there
        d_reading, d_erasing, d_writing: the streams of their gradients; None: not asked for
        d_ends: ``[b h N, 1, K]``, of the sums of log α over whole chunks
        d_q, d_e, d_k, d_log_decay: the streams that are written, or None; that of a tied key is in
            d_log_decay
        TIED: whether it is
    """
    _, columns, index = block_of(sizes.K, sizes.BK)
    b, h, _, tokens = chunk_of(index, length, heads, sizes.C)
    g = load_decay(log_decay, b, h, tokens, length, columns, sizes.K)
    rows, keys, _ = channel_sums(g, sizes.C, sizes.KIND)
    up, down = tl.exp2(rows), tl.exp2(keys)
    d_sums, d_keys = zero_matrix(sizes.C, sizes.BK), zero_matrix(sizes.C, sizes.BK)
    if d_reading is not None:
        d_rows = load_tile(d_reading, b, h, tokens, length, columns, sizes.K).to(tl.float32)
        # dq = up ∘ dq', so that c_t gets q ∘ dq = q' ∘ dq'; e likewise
        d_sums += load_tile(reading, b, h, tokens, length, columns, sizes.K) * d_rows
        store_where_kept(d_q, b, h, tokens, length, columns, sizes.K, d_rows * up)
    if d_erasing is not None:
        d_rows = load_tile(d_erasing, b, h, tokens, length, columns, sizes.K).to(tl.float32)
        d_sums += load_tile(erasing, b, h, tokens, length, columns, sizes.K) * d_rows
        store_where_kept(d_e, b, h, tokens, length, columns, sizes.K, d_rows * up)
    if d_writing is not None:
        d_keys = load_tile(d_writing, b, h, tokens, length, columns, sizes.K).to(tl.float32)
        # dk = down ∘ dk': c_t gets -k ∘ dk = -k' ∘ dk'
        d_sums -= load_tile(writing, b, h, tokens, length, columns, sizes.K) * d_keys
        d_keys *= down
        store_where_kept(d_k, b, h, tokens, length, columns, sizes.K, d_keys)
    if d_log_decay is not None:
        d_end = tl.sum(load_matrix(d_ends, index, tl.arange(0, 1), 1, columns, sizes.K), axis=0)
        at = (b, h, tokens, length, columns)
        store_channel_decay_gradient(
            d_log_decay, None, log_decay, at, d_keys, d_sums, d_end, TIED, sizes
        )


@triton.jit(do_not_specialize=["length"])
def steep_gradients(
    rows,
    k,
    v,
    log_decay,
    d_o,
    steep,
    d_rows,
    d_k,
    d_log_decay,
    length,
    heads,
    sizes: tl.constexpr,
    STRICT: tl.constexpr,
):
    """Adds what the pairs of steep chunks give, by levels, to what `release` wrote: one program per
    chunk.

    Args:
        rows, k, log_decay, steep: as in `steep_scores`
        v, d_o: the streams of values and of the gradient of what the rows read
        d_rows, d_k, d_log_decay: streams, or None
    """
    index, i = tl.program_id(0), tl.arange(0, sizes.C)
    if tl.load(steep + index) == 0:
        return
    b, h, _, tokens = chunk_of(index, length, heads, sizes.C)
    # dP_ij = do_i · v_j at (i, j) and at (j, i)
    pairs = reader_products(v, d_o, None, None, b, h, index, tokens, length, i, sizes)[0]
    for first in range(0, sizes.K, sizes.BK):
        columns = first + tl.arange(0, sizes.BK)
        queries = load_tile(rows, b, h, tokens, length, columns, sizes.K)
        keys = load_keys(k, log_decay, b, h, tokens, length, columns, sizes.K)
        d_queries, d_keys = zero_matrix(sizes.C, sizes.BK), zero_matrix(sizes.C, sizes.BK)
        if not STRICT:
            # a token with its own key: nothing decays
            own = tl.where(i[:, None] == i[None, :], pairs, 0.0).to(tl.float32)
            own = tl.sum(own, axis=1)[:, None]
            d_queries += own * keys
            d_keys += own * queries
        half = 1
        while half < sizes.C:
            # a token is in one half of its block: a row that meets the keys of the other half, or
            # a key that meets its rows; one product serves both
            upper = ((i & half) != 0)[:, None]
            g = load_decay(log_decay, b, h, tokens, length, columns, sizes.K)
            decay = tl.exp2(level_sums(g, half, sizes.C, sizes.KIND))
            met = tl.where(upper, queries, keys).to(tl.float32) * decay
            # drow_i = Σ_j dP_ij key_j 2^(Σ_{j<r≤i} g_r), dkey_j = Σ_i dP_ij row_i 2^(Σ_{j<r≤i} g_r)
            place = i // half
            meeting = tl.where((place[:, None] ^ place[None, :]) == 1, pairs, 0.0)
            given = multiply_wide(meeting, met, sizes.KIND) * decay
            d_queries += tl.where(upper, given, 0.0)
            d_keys += tl.where(upper, 0.0, given)
            half *= 2
        store_sum(d_rows, d_rows, b, h, tokens, length, columns, sizes.K, d_queries)
        store_sum(d_k, d_k, b, h, tokens, length, columns, sizes.K, d_keys)
        if d_log_decay is not None:
            at, d_end = (b, h, tokens, length, columns), zeros(sizes.BK)
            d_sums, tied = queries * d_queries - keys * d_keys, k is None
            store_channel_decay_gradient(
                d_log_decay, d_log_decay, log_decay, at, d_keys, d_sums, d_end, tied, sizes
            )
