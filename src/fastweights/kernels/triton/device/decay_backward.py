"""The backward of rows that read a decayed state: of the queries of `Decay`, and of the erasing
keys of rules that read what they correct.

With P, read, write and carry of `scores`, the state S before a chunk and S' after it,

    o = P V + (rows ∘ read) S          S' = carry ∘ S + (k ∘ write)ᵀ V

so that with dP = dO Vᵀ, where a row sees a key,

    dS    = (rows ∘ read)ᵀ dO + carry ∘ dS'
    drows = (dP with the keys, decayed) + read ∘ (dO Sᵀ)
    dk    = (dPᵀ with the rows, decayed) + write ∘ (V dS'ᵀ)
    dV    = Pᵀ dO + (k ∘ write) dS'
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.scores import (
    MILD,
    add_up_finite,
    causal,
    causal_transposed,
    channel_read,
    channel_suffix,
    head_read,
    head_write,
    level_sums,
    load_decay,
    load_head_decay,
    load_keys,
    middle_sums,
    pair_decay_both,
    pair_decay_transposed,
    reaches,
)
from fastweights.kernels.triton.device.tiles import (
    block_of,
    chunk_of,
    load_matrix,
    load_tile,
    load_tile_transposed,
    multiply_add,
    multiply_wide,
    multiply_wide_add,
    store_tile,
)


@triton.jit(do_not_specialize=["length"])
def value_gradients(
    rows,
    k,
    log_decay,
    d_o,
    scores,
    d_states,
    d_v,
    length,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STRICT: tl.constexpr,
    KIND: tl.constexpr,
):
    """dV = Pᵀ dO + (k ∘ write) dS': one program per chunk and block of V, in this order.

    Args:
        rows, k, log_decay, d_o: streams; k is None where the key is 1 - α, log_decay where nothing
            decays
        scores: P of a decay per channel ``[b h N, C, C]``; None for others, whose P is made here
        d_states: ``[b h N, K, V]``: of the state after each chunk; None: only Pᵀ dO is found
        d_v: the stream that is written
    """
    _, across, index = block_of(V, BV)
    b, h, start, tokens = chunk_of(index, length, heads, C)
    inside, end = tl.arange(0, C), tl.minimum(start + C, length)

    total = tl.zeros([C, BV], tl.float32)
    if scores is None:
        weights = tl.zeros([C, C], tl.float32)
    for first in range(0, K, BK):
        columns = first + tl.arange(0, BK)
        keys = load_keys(k, log_decay, b, h, tokens, length, columns, K)
        if scores is None:
            queries = load_tile_transposed(rows, b, h, tokens, length, columns, K)
            weights = multiply_add(keys, queries, weights, KIND)
        if d_states is not None:
            d_state = load_matrix(d_states, index, columns, K, across, V)
            if scores is not None:
                write = channel_suffix(log_decay, b, h, tokens, end, columns, K, C, KIND)
                keys = keys.to(tl.float32) * write
            total = multiply_wide_add(keys, d_state, total, KIND)
    if scores is not None:
        places = tl.cast(index, tl.int64) * (C * C) + inside[None, :] * C + inside[:, None]
        weights = tl.load(scores + places)
    elif log_decay is not None:
        g = load_head_decay(log_decay, b, h, tokens, length)
        weights *= pair_decay_transposed(g, C, STRICT, KIND)
        total *= head_write(log_decay, b, h, tokens, end, KIND)[:, None]
    else:
        weights = tl.where(causal_transposed(C, STRICT), weights, 0.0)
    upstream = load_tile(d_o, b, h, tokens, length, across, V)
    total = multiply_wide_add(weights, upstream, total, KIND)
    store_tile(d_v, b, h, tokens, length, across, V, total)


@triton.jit
def reader_products(
    v,
    d_o,
    states,
    d_states,
    b,
    h,
    index,
    tokens,
    length,
    columns,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    kind: tl.constexpr,
):
    """(dP, dO Sᵀ, V dS'ᵀ [C, K], Σ dS' ∘ S over values [K]); the last two are 0 without d_states.

    dP = dO Vᵀ is that of both tokens of a pair [C, C]: dP_ij at (i, j) and at (j, i) for j ≤ i.
    """
    products = tl.zeros([C, C], tl.float32)
    transposed = tl.zeros([C, C], tl.float32)
    of_rows = tl.zeros([C, BK], tl.float32)
    of_keys = tl.zeros([C, BK], tl.float32)
    of_carry = tl.zeros([BK], tl.float32)
    for first in range(0, V, BV):
        across = first + tl.arange(0, BV)
        values = load_tile(v, b, h, tokens, length, across, V)
        upstream = load_tile(d_o, b, h, tokens, length, across, V)
        products = multiply_add(upstream, tl.trans(values), products, kind)
        transposed = multiply_add(values, tl.trans(upstream), transposed, kind)
        state = load_matrix(states, index, columns, K, across, V)
        of_rows = multiply_wide_add(upstream, tl.trans(state), of_rows, kind)
        if d_states is not None:
            d_state = load_matrix(d_states, index, columns, K, across, V)
            of_keys = multiply_wide_add(values, tl.trans(d_state), of_keys, kind)
            of_carry += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
    pairs = tl.where(causal(C, False), products, transposed)
    if kind == tl.bfloat16:
        # as its products will take it; float16 has not its range
        pairs = pairs.to(kind)
    return pairs, of_rows, of_keys, of_carry


@triton.jit
def store_sum(stream, before, b, h, tokens, length, columns, width: tl.constexpr, tile):
    """The tile, and what was found before, to a stream; neither need be there."""
    if stream is not None:
        if before is not None:
            tile += load_tile(before, b, h, tokens, length, columns, width)
        store_tile(stream, b, h, tokens, length, columns, width, tile)


@triton.jit
def store_channel_decay_gradient(
    stream,
    before,
    k,
    log_decay,
    at,
    d_keys,
    d_sums,
    d_end,
    K: tl.constexpr,
    C: tl.constexpr,
    KIND: tl.constexpr,
):
    """d log α of a decay per channel.

    With c_t = Σ_{r≤t} log α_r, rows hold e^(c_t), keys e^(-c_t), what keys leave in S' e^(c_end -
    c_t), and the state before the chunk e^(c_end) there.

    Args:
        at: batch, head, tokens, how many there are, columns
        d_keys: dk [C, K]
        d_sums: rows ∘ drows - k ∘ dk
        d_end: what c_end gets [K]
    """
    b, h, tokens, length, columns = at
    found = add_up_finite(causal_transposed(C, False), d_sums, KIND) + d_end[None, :]
    g = load_decay(log_decay, b, h, tokens, length, columns, K)
    if k is None:
        # the tied key is 1 - α
        found -= tl.exp2(g) * d_keys
    found = tl.where(g == float("-inf"), 0.0, found)
    store_sum(stream, before, b, h, tokens, length, columns, K, found)


@triton.jit(do_not_specialize=["length"])
def reader_gradients(
    rows,
    k,
    v,
    log_decay,
    d_o,
    states,
    d_states,
    d_rows,
    d_k,
    d_log_decay,
    d_k_before,
    length,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STRICT: tl.constexpr,
    KIND: tl.constexpr,
):
    """The gradients of rows, keys and log decays of a decay per head, or none: one program per
    chunk and block of K, in this order.

    A second reader of the same states adds to the gradients of keys that the first found, and
    leaves out d_states: what keys leave in the states is counted once.

    Args:
        rows, k, log_decay, d_o: as in `value_gradients`
        v: the stream of values
        states: ``[b h N, K, V]`` before each chunk
        d_states: ``[b h N, K, V]``: of the state after each chunk, or None
        d_rows, d_k: the streams that are written, or None
        d_log_decay: likewise, with a column for what each block of K finds
        d_k_before: a stream that is added to d_k, or None
    """
    k_blocks: tl.constexpr = (K + BK - 1) // BK
    block, columns, index = block_of(K, BK)
    b, h, start, tokens = chunk_of(index, length, heads, C)

    pairs, d_queries, d_keys, d_carry = reader_products(
        v, d_o, states, d_states, b, h, index, tokens, length, columns, K, V, C, BK, BV, KIND
    )
    queries = load_tile(rows, b, h, tokens, length, columns, K)
    keys = load_tile(k, b, h, tokens, length, columns, K)
    if log_decay is not None:
        g = load_head_decay(log_decay, b, h, tokens, length)
        end = tl.minimum(start + C, length)
        d_queries *= head_read(g)[:, None]
        d_keys *= head_write(log_decay, b, h, tokens, end, KIND)[:, None]
        carried = tl.sum(d_carry, axis=0) * tl.exp2(tl.sum(g, axis=0))
        d_end = tl.sum(tl.sum(keys * d_keys, axis=1), axis=0) + carried
        pairs = pairs * pair_decay_both(g, C, KIND)
    seen = tl.where(causal(C, STRICT), pairs, 0.0)
    d_queries = multiply_wide_add(seen, keys, d_queries, KIND)
    seen = tl.where(causal_transposed(C, STRICT), pairs, 0.0)
    d_keys = multiply_wide_add(seen, queries, d_keys, KIND)
    if d_log_decay is not None:
        # as in `store_channel_decay_gradient`
        d_sums = tl.sum(queries * d_queries - keys * d_keys, axis=1)
        found = tl.cumsum(d_sums, axis=0, reverse=True) + d_end
        found = tl.where(g == float("-inf"), 0.0, found)[:, None]
        column = block + tl.arange(0, 1)
        store_tile(d_log_decay, b, h, tokens, length, column, k_blocks, found)
    store_sum(d_rows, None, b, h, tokens, length, columns, K, d_queries)
    store_sum(d_k, d_k_before, b, h, tokens, length, columns, K, d_keys)


@triton.jit(do_not_specialize=["length"])
def channel_reader_gradients(
    rows,
    k,
    v,
    log_decay,
    d_o,
    states,
    d_states,
    d_rows,
    d_k,
    d_log_decay,
    d_k_before,
    d_log_decay_before,
    steep,
    length,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STRICT: tl.constexpr,
    KIND: tl.constexpr,
):
    """As `reader_gradients`, of decays per channel that are mild.

    Args:
        rows, v, log_decay, d_o, states, d_states: as there
        k: the stream of keys; None: 1 - α
        d_rows, d_k, d_log_decay: the streams that are written, or None; that of a tied key is in
            d_log_decay
        d_k_before, d_log_decay_before: streams that are added to them, or None
        steep: ``[b h N, blocks of K]``: which are left to `steep_reader_gradients`
    """
    _, columns, index = block_of(K, BK)
    b, h, _, tokens = chunk_of(index, length, heads, C)

    g = load_decay(log_decay, b, h, tokens, length, columns, K)
    mild = tl.min(reaches(g, C), axis=0) > MILD
    tl.store(steep + tl.program_id(0), 1 - mild.to(tl.int32))
    if mild:
        pairs, d_queries, d_keys, d_carry = reader_products(
            v, d_o, states, d_states, b, h, index, tokens, length, columns, K, V, C, BK, BV, KIND
        )
        # rows and keys meet in the chunk's middle: `up` is a row's decay from there, `down` a
        # key's to there, so that read = up 2^head and write = down 2^tail
        g = load_decay(log_decay, b, h, tokens, length, columns, K)
        first = (tl.arange(0, C) < C // 2)[:, None]
        head = tl.exp2(tl.sum(tl.where(first, g, 0.0), axis=0))
        tail = tl.exp2(tl.sum(tl.where(first, 0.0, g), axis=0))
        sums = middle_sums(g, C, KIND)
        up, down = tl.exp2(sums), tl.exp2(-sums)
        keys = load_keys(k, log_decay, b, h, tokens, length, columns, K) * down
        d_keys *= tail[None, :]
        d_end = tl.sum(keys * d_keys, axis=0) + d_carry * head * tail
        seen = tl.where(causal(C, STRICT), pairs, 0.0)
        d_queries = multiply_wide_add(seen, keys, d_queries * head[None, :], KIND)
        queries = load_tile(rows, b, h, tokens, length, columns, K) * up
        seen = tl.where(causal_transposed(C, STRICT), pairs, 0.0)
        d_keys = multiply_wide_add(seen, queries, d_keys, KIND)
        d_sums = queries * d_queries - keys * d_keys
        store_sum(d_rows, None, b, h, tokens, length, columns, K, d_queries * up)
        d_keys *= down
        store_sum(d_k, d_k_before, b, h, tokens, length, columns, K, d_keys)
        if d_log_decay is not None:
            at = (b, h, tokens, length, columns)
            store_channel_decay_gradient(
                d_log_decay, d_log_decay_before, k, log_decay, at, d_keys, d_sums, d_end, K, C, KIND
            )


@triton.jit(do_not_specialize=["length"])
def steep_reader_gradients(
    rows,
    k,
    v,
    log_decay,
    d_o,
    states,
    d_states,
    d_rows,
    d_k,
    d_log_decay,
    d_k_before,
    d_log_decay_before,
    steep,
    length,
    heads,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STRICT: tl.constexpr,
    KIND: tl.constexpr,
):
    """What `channel_reader_gradients` left, by levels; its arguments."""
    if tl.load(steep + tl.program_id(0)) == 0:
        return
    _, columns, index = block_of(K, BK)
    b, h, start, tokens = chunk_of(index, length, heads, C)

    pairs, d_queries, d_keys, d_carry = reader_products(
        v, d_o, states, d_states, b, h, index, tokens, length, columns, K, V, C, BK, BV, KIND
    )
    g = load_decay(log_decay, b, h, tokens, length, columns, K)
    d_queries *= channel_read(g, C, KIND)
    end = tl.minimum(start + C, length)
    d_keys *= channel_suffix(log_decay, b, h, tokens, end, columns, K, C, KIND)
    keys = load_keys(k, log_decay, b, h, tokens, length, columns, K)
    d_end = tl.sum(keys * d_keys, axis=0) + d_carry * tl.exp2(tl.sum(g, axis=0))
    i = tl.arange(0, C)
    if not STRICT:
        # a token with its own key: nothing decays
        own = tl.where(i[:, None] == i[None, :], pairs, 0.0).to(tl.float32)
        own = tl.sum(own, axis=1)[:, None]
        d_queries += own * keys
        d_keys += own * load_tile(rows, b, h, tokens, length, columns, K)
    half = 1
    while half < C:
        # a token is in one half of its block: a row that meets the keys of the other half, or a
        # key that meets its rows; one product serves both
        upper = ((i & half) != 0)[:, None]
        g = load_decay(log_decay, b, h, tokens, length, columns, K)
        decay = tl.exp2(level_sums(g, half, C, KIND))
        queries = load_tile(rows, b, h, tokens, length, columns, K)
        keys = load_keys(k, log_decay, b, h, tokens, length, columns, K)
        met = tl.where(upper, queries, keys).to(tl.float32) * decay
        place = i // half
        meeting = tl.where((place[:, None] ^ place[None, :]) == 1, pairs, 0.0)
        given = multiply_wide(meeting, met, KIND) * decay
        d_queries += tl.where(upper, given, 0.0)
        d_keys += tl.where(upper, 0.0, given)
        half *= 2
    store_sum(d_rows, None, b, h, tokens, length, columns, K, d_queries)
    store_sum(d_k, d_k_before, b, h, tokens, length, columns, K, d_keys)
    if d_log_decay is not None:
        queries = load_tile(rows, b, h, tokens, length, columns, K)
        keys = load_keys(k, log_decay, b, h, tokens, length, columns, K)
        d_sums = queries * d_queries - keys * d_keys
        at = (b, h, tokens, length, columns)
        store_channel_decay_gradient(
            d_log_decay, d_log_decay_before, k, log_decay, at, d_keys, d_sums, d_end, K, C, KIND
        )
