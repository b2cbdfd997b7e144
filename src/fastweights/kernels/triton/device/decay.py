"""Chunkwise `Decay`: the states before all chunks, and the outputs.

A chunk has C tokens, N = ⌈T/C⌉; chunk n of a sequence's head has the index (b H + h) N + n. With P,
read, write and carry of `scores`, and S the state before a chunk,

    o = P V + (rows ∘ read) S          S' = carry ∘ S + (k ∘ write)ᵀ V

Streams that decay per channel, and the states that are kept of them, are those of `anchored`.
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.scores import (
    causal,
    head_read,
    head_write,
    load_head_decay,
    pair_decay,
)
from fastweights.kernels.triton.device.tiles import (
    block_of,
    chunk_of,
    load_end,
    load_matrix,
    load_or_zeros,
    load_tile,
    load_tile_transposed,
    multiply_add,
    multiply_wide_add,
    pass_end,
    segment_of,
    state_block,
    store_matrix,
    store_tile,
    zero_matrix,
    zeros,
)


@triton.jit(do_not_specialize=["length", "span"])
def states(
    start,
    k,
    v,
    log_decay,
    ends,
    found,
    final,
    totals,
    length,
    heads,
    span,
    sizes: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The states before the chunks of one segment of `span` chunks, one after the other. REVERSE:
    from the last to the first, for rows as k and dO as v: the gradients of the states after them.

    One program per sequence, head and segment, block of K and block of V, in this order.

    Args:
        start: ``[b h segments, K, V]`` before each segment; None: zeros
        k, v: streams
        log_decay: the stream of a decay per head, or None
        ends: ``[b h N, 3, K]`` of a decay per channel, or None
        found: ``[b h N, K, V]``, or None: the states are not kept
        final: ``[b h segments, K, V]`` after each segment, or None
        totals: ``[b h segments, K]``, or None: Σ log2 α of each segment
    """
    down, across, v_block, place = state_block(sizes)
    sequence, b, h, chunks, begin, end = segment_of(place, length, heads, span, sizes.C)
    state = load_or_zeros(start, place, down, sizes.K, across, sizes.V)
    if totals is not None:
        total = zeros(sizes.BK)
    for i in range(begin, end):
        n = begin + end - 1 - i if REVERSE else i
        index = tl.cast(sequence, tl.int64) * chunks + n
        tokens = n * sizes.C + tl.arange(0, sizes.C)
        # of a decay per channel S̃ = 2^head ∘ S is kept, in REVERSE dS̃ = 2^tail ∘ dS'
        state = pass_end(state, ends, index, 2 if REVERSE else 0, down, sizes.K)
        if found is not None:
            store_matrix(found, index, down, sizes.K, across, sizes.V, state)
        keys = load_tile_transposed(k, b, h, tokens, length, down, sizes.K)
        values = load_tile(v, b, h, tokens, length, across, sizes.V)
        # S' = carry ∘ S + (k ∘ write)ᵀ V;  dS = carry ∘ dS' + (rows ∘ read)ᵀ dO
        if log_decay is not None:
            g = load_head_decay(log_decay, b, h, tokens, length)
            sums = tl.sum(g, axis=0)
            if REVERSE:
                factors = head_read(g)
            else:
                stop = tl.minimum(n * sizes.C + sizes.C, length)
                factors = head_write(log_decay, b, h, tokens, stop, sizes.KIND)
            keys = (keys * factors[None, :]).to(sizes.KIND)
            state *= tl.exp2(sums)
        # S' = 2^tail ∘ (2^passed ∘ S̃ + k'ᵀ V);  dS = 2^head ∘ (2^passed ∘ dS̃ + rows'ᵀ dO)
        state = pass_end(state, ends, index, 1, down, sizes.K)
        state = multiply_wide_add(keys, values, state, sizes.KIND)
        state = pass_end(state, ends, index, 0 if REVERSE else 2, down, sizes.K)
        if totals is not None:
            if ends is not None:
                # a chunk's Σ log2 α is head + passed + tail
                for which in tl.static_range(3):
                    total += tl.sum(load_end(ends, index, which, down, sizes.K), axis=1)
            else:
                total += sums
    if final is not None:
        store_matrix(final, place, down, sizes.K, across, sizes.V, state)
    if totals is not None:
        places = tl.cast(place, tl.int64) * sizes.K + down
        tl.store(totals + places, total, mask=(down < sizes.K) & (v_block == 0))


@triton.jit(do_not_specialize=["segments"])
def segment_starts(
    start,
    ends,
    totals,
    found,
    final,
    segments,
    sizes: tl.constexpr,
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
    down, across, _, sequence = state_block(sizes)
    state = load_matrix(start, sequence, down, sizes.K, across, sizes.V)
    for passed in range(segments):
        segment = segments - 1 - passed if REVERSE else passed
        index = tl.cast(sequence, tl.int64) * segments + segment
        store_matrix(found, index, down, sizes.K, across, sizes.V, state)
        if totals is not None:
            total = tl.load(totals + index * sizes.K + down, mask=down < sizes.K, other=0.0)
            state *= tl.exp2(total)[:, None]
        state += load_matrix(ends, index, down, sizes.K, across, sizes.V)
    store_matrix(final, sequence, down, sizes.K, across, sizes.V, state)


@triton.jit(do_not_specialize=["length"])
def outputs(
    rows,
    k,
    v,
    log_decay,
    scores,
    steep,
    states,
    o,
    length,
    heads,
    sizes: tl.constexpr,
    STRICT: tl.constexpr,
):
    """o = P V + (rows ∘ read) S: one program per chunk and block of V, in this order.

    Args:
        rows, k, log_decay: streams; log_decay of a decay per head, or None
        v: any values of the width V
        scores, steep: P ``[b h N, C, C]`` of the steep chunks, and which ``[b h N]`` are; or None
        states: ``[b h N, K, V]`` before each chunk
        o: the stream that is written
    """
    _, across, index = block_of(sizes.V, sizes.BV)
    b, h, _, tokens = chunk_of(index, length, heads, sizes.C)
    inside = tl.arange(0, sizes.C)

    # rows kᵀ and rows S, summed over blocks of K, before anything decays
    total = zero_matrix(sizes.C, sizes.BV)
    weights = zero_matrix(sizes.C, sizes.C)
    for first in range(0, sizes.K, sizes.BK):
        columns = first + tl.arange(0, sizes.BK)
        queries = load_tile(rows, b, h, tokens, length, columns, sizes.K)
        state = load_matrix(states, index, columns, sizes.K, across, sizes.V)
        keys = load_tile_transposed(k, b, h, tokens, length, columns, sizes.K)
        weights = multiply_wide_add(queries, keys, weights, sizes.KIND)
        total = multiply_wide_add(queries, state, total, sizes.KIND)
    # P: a pair decays from its key to its row; (rows ∘ read) S: the state to a row
    if log_decay is not None:
        g = load_head_decay(log_decay, b, h, tokens, length)
        weights *= pair_decay(g, sizes.C, STRICT, sizes.KIND)
        total *= head_read(g)[:, None]
    else:
        weights = tl.where(causal(sizes.C, STRICT), weights, 0.0)
    # where a chunk decays too steeply for its middle, P was computed by levels
    if steep is not None:
        steeply = tl.load(steep + index) != 0
        if steeply:
            weights = load_matrix(scores, index, inside, sizes.C, inside, sizes.C).to(tl.float32)
    values = load_tile(v, b, h, tokens, length, across, sizes.V)
    total = multiply_add(weights, values, total, sizes.KIND)
    store_tile(o, b, h, tokens, length, across, sizes.V, total)
