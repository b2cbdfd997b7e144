"""Chunkwise `Decay`: the states before all chunks, the scores inside them, and the outputs.

A chunk has C tokens, N = ⌈T/C⌉; chunk n of a sequence's head has the index (b H + h) N + n. With P,
read, write and carry of `scores`, and S the state before a chunk,

    o = P V + (rows ∘ read) S          S' = carry ∘ S + (k ∘ write)ᵀ V
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.scores import (
    causal,
    channel_read,
    channel_read_transposed,
    channel_write_transposed,
    head_read,
    head_write,
    level_pairs,
    level_scores,
    load_decay,
    load_decay_transposed,
    load_head_decay,
    load_keys_transposed,
    mild_scores,
    pair_decay,
    plain_scores,
)
from fastweights.kernels.triton.device.tiles import (
    block_of,
    chunk_of,
    load_matrix,
    load_or_zeros,
    load_tile,
    load_tile_transposed,
    multiply_add,
    multiply_wide_add,
    segment_of,
    state_block,
    store_matrix,
    store_tile,
)


@triton.jit
def state_factors(
    log_decay,
    at,
    columns,
    K: tl.constexpr,
    C: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    REVERSE: tl.constexpr,
    KIND: tl.constexpr,
):
    """What the keys of a chunk are multiplied by [K, C], or [1, C] of a decay per head (write; in
    REVERSE the rows by read), and Σ log2 α of the chunk.

    `at`: batch, head, tokens, how many there are, the token behind the chunk.
    """
    b, h, tokens, length, end = at
    if PER_CHANNEL:
        g = load_decay_transposed(log_decay, b, h, tokens, length, columns, K)
        sums = tl.sum(g, axis=1)
        if REVERSE:
            factors = channel_read_transposed(g, C, KIND)
        else:
            factors = channel_write_transposed(log_decay, b, h, tokens, end, columns, K, C, KIND)
    else:
        g = load_head_decay(log_decay, b, h, tokens, length)
        sums = tl.sum(g, axis=0)
        if REVERSE:
            factors = head_read(g)[None, :]
        else:
            factors = head_write(log_decay, b, h, tokens, end, KIND)[None, :]
    return factors, sums


@triton.jit(do_not_specialize=["length", "span"])
def states(
    start,
    k,
    v,
    log_decay,
    found,
    final,
    totals,
    length,
    heads,
    span,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    REVERSE: tl.constexpr,
    KIND: tl.constexpr,
):
    """The states before the chunks of one segment of `span` chunks, one after the other. REVERSE:
    from the last to the first, for rows as k and dO as v: the gradients of the states after them.

    One program per sequence, head and segment, block of K and block of V, in this order.

    Args:
        start: ``[b h segments, K, V]`` before each segment; None: zeros
        k, v, log_decay: streams; k is None where the key is 1 - α, log_decay where nothing decays
        found: ``[b h N, K, V]``, or None: the states are not kept
        final: ``[b h segments, K, V]`` after each segment, or None
        totals: ``[b h segments, K]``, or None: Σ log2 α of each segment
    """
    down, across, v_block, place = state_block(K, V, BK, BV)
    sequence, b, h, chunks, begin, end = segment_of(place, length, heads, span, C)
    state = load_or_zeros(start, place, down, K, across, V)
    if totals is not None:
        total = tl.zeros([BK], tl.float32)
    for i in range(begin, end):
        n = begin + end - 1 - i if REVERSE else i
        if found is not None:
            index = tl.cast(sequence, tl.int64) * chunks + n
            store_matrix(found, index, down, K, across, V, state)
        tokens = n * C + tl.arange(0, C)
        keys = load_keys_transposed(k, log_decay, b, h, tokens, length, down, K).to(tl.float32)
        values = load_tile(v, b, h, tokens, length, across, V)
        # S' = carry ∘ S + (k ∘ write)ᵀ V;  dS = carry ∘ dS' + (rows ∘ read)ᵀ dO
        if log_decay is not None:
            at = (b, h, tokens, length, tl.minimum(n * C + C, length))
            factors, sums = state_factors(log_decay, at, down, K, C, PER_CHANNEL, REVERSE, KIND)
            keys *= factors
            state *= tl.exp2(sums)[:, None] if PER_CHANNEL else tl.exp2(sums)
        state = multiply_add(keys, values, state, KIND)
        if totals is not None:
            total += sums
    if final is not None:
        store_matrix(final, place, down, K, across, V, state)
    if totals is not None:
        places = tl.cast(place, tl.int64) * K + down
        tl.store(totals + places, total, mask=(down < K) & (v_block == 0))


@triton.jit(do_not_specialize=["segments"])
def segment_starts(
    start,
    ends,
    totals,
    found,
    final,
    segments,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The states before segments, from what each leaves of zeros: S' = 2^total ∘ S + end.

    One program per sequence and head, block of K and block of V, in this order. In REVERSE the last
    segment comes first.

    Args:
        start, final: ``[b h, K, V]`` before the first segment and after the last
        ends: ``[b h segments, K, V]``
        totals: ``[b h segments, K]``: Σ log2 α; None: nothing decays
        found: ``[b h segments, K, V]``
    """
    down, across, _, sequence = state_block(K, V, BK, BV)
    state = load_matrix(start, sequence, down, K, across, V)
    for passed in range(segments):
        segment = segments - 1 - passed if REVERSE else passed
        index = tl.cast(sequence, tl.int64) * segments + segment
        store_matrix(found, index, down, K, across, V, state)
        if totals is not None:
            total = tl.load(totals + index * K + down, mask=down < K, other=0.0)
            state *= tl.exp2(total)[:, None]
        state += load_matrix(ends, index, down, K, across, V)
    store_matrix(final, sequence, down, K, across, V, state)


@triton.jit(do_not_specialize=["length"])
def scores(
    rows,
    k,
    log_decay,
    found,
    steep,
    length,
    heads,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    STRICT: tl.constexpr,
    KIND: tl.constexpr,
):
    """P of the chunks that decay mildly in every channel: one program per chunk.

    Args:
        rows: the stream of queries, or of the keys of an erasing rule
        k, log_decay: as in `states`
        found: ``[b h N, C, C]``
        steep: ``[b h N]``: whether a chunk is left to `steep_scores`
    """
    index, inside = tl.program_id(0), tl.arange(0, C)
    b, h, _, tokens = chunk_of(index, length, heads, C)
    products, mild = mild_scores(rows, k, log_decay, b, h, tokens, length, K, C, BK, KIND)
    tl.store(steep + index, 1 - mild.to(tl.int32))
    if mild:
        total = tl.where(causal(C, STRICT), products, 0.0)
        store_matrix(found, index, inside, C, inside, C, total)


@triton.jit(do_not_specialize=["length"])
def steep_scores(
    rows,
    k,
    log_decay,
    found,
    steep,
    length,
    heads,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    STRICT: tl.constexpr,
    KIND: tl.constexpr,
):
    """P of the chunks that `scores` left, by levels; its arguments."""
    index, inside = tl.program_id(0), tl.arange(0, C)
    if tl.load(steep + index) == 0:
        return
    b, h, _, tokens = chunk_of(index, length, heads, C)
    total = tl.zeros([C, C], tl.float32)
    if not STRICT:
        # a token with its own key: nothing decays
        products = plain_scores(rows, k, log_decay, b, h, tokens, length, K, C, BK, KIND)
        total = tl.where(inside[:, None] == inside[None, :], products, total)
    half = 1
    while half < C:
        products = level_scores(rows, k, log_decay, b, h, tokens, length, half, K, C, BK, KIND)
        total = tl.where(level_pairs(half, C), products, total)
        half *= 2
    store_matrix(found, index, inside, C, inside, C, total)


@triton.jit(do_not_specialize=["length"])
def outputs(
    rows,
    k,
    v,
    log_decay,
    scores,
    states,
    o,
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
    """o = P V + (rows ∘ read) S: one program per chunk and block of V, in this order.

    Args:
        rows, k, log_decay: as in `scores`
        v: any values of the width V
        scores: P of a decay per channel; None for others, whose P is made here
        states: ``[b h N, K, V]`` before each chunk
        o: the stream that is written
    """
    _, across, index = block_of(V, BV)
    b, h, _, tokens = chunk_of(index, length, heads, C)
    inside = tl.arange(0, C)

    total = tl.zeros([C, BV], tl.float32)
    if scores is None:
        weights = tl.zeros([C, C], tl.float32)
    for first in range(0, K, BK):
        columns = first + tl.arange(0, BK)
        queries = load_tile(rows, b, h, tokens, length, columns, K)
        state = load_matrix(states, index, columns, K, across, V)
        if scores is None:
            keys = load_tile_transposed(k, b, h, tokens, length, columns, K)
            weights = multiply_add(queries, keys, weights, KIND)
        else:
            g = load_decay(log_decay, b, h, tokens, length, columns, K)
            queries = queries.to(tl.float32) * channel_read(g, C, KIND)
        total = multiply_wide_add(queries, state, total, KIND)
    if scores is not None:
        weights = load_matrix(scores, index, inside, C, inside, C)
    elif log_decay is not None:
        g = load_head_decay(log_decay, b, h, tokens, length)
        weights *= pair_decay(g, C, STRICT, KIND)
        total *= head_read(g)[:, None]
    else:
        weights = tl.where(causal(C, STRICT), weights, 0.0)
    values = load_tile(v, b, h, tokens, length, across, V)
    total = multiply_add(weights, values, total, KIND)
    store_tile(o, b, h, tokens, length, across, V, total)
