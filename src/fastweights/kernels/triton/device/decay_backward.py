"""The backward of rows that read a decayed state: of the queries of `Decay`, and of the erasing
keys of rules that read what they correct.

With P, read, write and carry of `scores`, the state S before a chunk and S' after it,

    o = P V + (rows ∘ read) S          S' = carry ∘ S + (k ∘ write)ᵀ V

so that with dP = dO Vᵀ, where a row sees a key,

    dS    = (rows ∘ read)ᵀ dO + carry ∘ dS'
    drows = (dP with the keys, decayed) + read ∘ (dO Sᵀ)
    dk    = (dPᵀ with the rows, decayed) + write ∘ (V dS'ᵀ)
    dV    = Pᵀ dO + (k ∘ write) dS'

Streams that decay per channel, and the states that are kept of them, are those of `anchored`.
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.scores import (
    causal,
    causal_transposed,
    head_read,
    head_write,
    load_head_decay,
    pair_decay_both,
    pair_decay_transposed,
)
from fastweights.kernels.triton.device.tiles import (
    block_of,
    chunk_of,
    load_end,
    load_matrix,
    load_matrix_transposed,
    load_tile,
    load_tile_transposed,
    multiply_add,
    multiply_wide_add,
    store_matrix,
    store_tile,
    zero_matrix,
    zeros,
)


@triton.jit(do_not_specialize=["length"])
def value_gradients(
    rows,
    k,
    log_decay,
    d_o,
    scores,
    steep,
    d_states,
    d_v,
    length,
    heads,
    sizes: tl.constexpr,
    STRICT: tl.constexpr,
):
    """dV = Pᵀ dO + (k ∘ write) dS': one program per chunk and block of V, in this order.

    Args:
        rows, k, d_o: streams
        log_decay: the stream of a decay per head, or None
        scores, steep: P ``[b h N, C, C]`` of the steep chunks, and which ``[b h N]`` are; or None
        d_states: ``[b h N, K, V]``: of the state after each chunk; None: only Pᵀ dO is found
        d_v: the stream that is written
    """
    _, across, index = block_of(sizes.V, sizes.BV)
    b, h, start, tokens = chunk_of(index, length, heads, sizes.C)
    inside, end = tl.arange(0, sizes.C), tl.minimum(start + sizes.C, length)

    # k rowsᵀ and k dS', summed over blocks of K, before anything decays
    total = zero_matrix(sizes.C, sizes.BV)
    weights = zero_matrix(sizes.C, sizes.C)
    for first in range(0, sizes.K, sizes.BK):
        columns = first + tl.arange(0, sizes.BK)
        keys = load_tile(k, b, h, tokens, length, columns, sizes.K)
        queries = load_tile_transposed(rows, b, h, tokens, length, columns, sizes.K)
        weights = multiply_wide_add(keys, queries, weights, sizes.KIND)
        if d_states is not None:
            d_state = load_matrix(d_states, index, columns, sizes.K, across, sizes.V)
            total = multiply_wide_add(keys, d_state, total, sizes.KIND)
    # Pᵀ: a pair decays from its key to its row; (k ∘ write) dS': a key to the end of its chunk
    if log_decay is not None:
        g = load_head_decay(log_decay, b, h, tokens, length)
        weights *= pair_decay_transposed(g, sizes.C, STRICT, sizes.KIND)
        total *= head_write(log_decay, b, h, tokens, end, sizes.KIND)[:, None]
    else:
        weights = tl.where(causal_transposed(sizes.C, STRICT), weights, 0.0)
    # where a chunk decays too steeply for its middle, P was computed by levels
    if steep is not None:
        steeply = tl.load(steep + index) != 0
        if steeply:
            weights = load_matrix_transposed(scores, index, inside, sizes.C, inside, sizes.C)
            weights = weights.to(tl.float32)
    upstream = load_tile(d_o, b, h, tokens, length, across, sizes.V)
    total = multiply_wide_add(weights, upstream, total, sizes.KIND)
    store_tile(d_v, b, h, tokens, length, across, sizes.V, total)


@triton.jit
def reader_products(
    v, d_o, states, d_states, b, h, index, tokens, length, columns, sizes: tl.constexpr
):
    """(dP, dO Sᵀ, V dS'ᵀ [C, K], Σ dS' ∘ S over values [K]); the last two are 0 without d_states,
    that before them without states.

    dP = dO Vᵀ is that of both tokens of a pair [C, C]: dP_ij at (i, j) and at (j, i) for j ≤ i.
    """
    products = zero_matrix(sizes.C, sizes.C)
    transposed = zero_matrix(sizes.C, sizes.C)
    of_rows = zero_matrix(sizes.C, sizes.BK)
    of_keys = zero_matrix(sizes.C, sizes.BK)
    of_carry = zeros(sizes.BK)
    for first in range(0, sizes.V, sizes.BV):
        across = first + tl.arange(0, sizes.BV)
        values = load_tile(v, b, h, tokens, length, across, sizes.V)
        upstream = load_tile(d_o, b, h, tokens, length, across, sizes.V)
        products = multiply_add(upstream, tl.trans(values), products, sizes.KIND)
        transposed = multiply_add(values, tl.trans(upstream), transposed, sizes.KIND)
        if states is not None:
            # dO Sᵀ, what rows ∘ read get
            state = load_matrix(states, index, columns, sizes.K, across, sizes.V)
            of_rows = multiply_wide_add(upstream, tl.trans(state), of_rows, sizes.KIND)
        if d_states is not None:
            # V dS'ᵀ, what k ∘ write get, and Σ S ∘ dS', what carry gets
            d_state = load_matrix(d_states, index, columns, sizes.K, across, sizes.V)
            of_keys = multiply_wide_add(values, tl.trans(d_state), of_keys, sizes.KIND)
            of_carry += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
    pairs = tl.where(causal(sizes.C, False), products, transposed)
    if tl.bfloat16 == sizes.KIND:
        # as its products will take it; float16 has not its range
        pairs = pairs.to(sizes.KIND)
    return pairs, of_rows, of_keys, of_carry


@triton.jit
def store_sum(stream, before, b, h, tokens, length, columns, width: tl.constexpr, tile):
    """The tile, and what was found before, to a stream; neither need be there."""
    if stream is not None:
        if before is not None:
            tile += load_tile(before, b, h, tokens, length, columns, width)
        store_tile(stream, b, h, tokens, length, columns, width, tile)


@triton.jit(do_not_specialize=["length"])
def reader_gradients(
    rows,
    k,
    v,
    log_decay,
    d_o,
    ends,
    steep,
    states,
    d_states,
    d_rows,
    d_k,
    d_log_decay,
    d_ends,
    d_k_before,
    length,
    heads,
    sizes: tl.constexpr,
    STRICT: tl.constexpr,
):
    """The gradients of rows, keys and log decays: one program per chunk and block of K, in this
    order.

    A second reader of the same states adds to the gradients of keys that the first found, and
    leaves out d_states: what keys leave in the states is counted once.

    Args:
        rows, k, log_decay, d_o: as in `value_gradients`
        v: the stream of values
        ends, steep: of `anchored.anchor`, or None
        states: ``[b h N, K, V]`` before each chunk
        d_states: ``[b h N, K, V]``: of the state after each chunk, or None
        d_rows, d_k: the streams that are written, or None
        d_log_decay: likewise, with a column for what each block of K finds
        d_ends: ``[b h N, 1, K]``, of Σ log α of a decay per channel over each chunk, or None
        d_k_before: a stream that is added to d_k, or None
    """
    k_blocks: tl.constexpr = (sizes.K + sizes.BK - 1) // sizes.BK
    block, columns, index = block_of(sizes.K, sizes.BK)
    b, h, start, tokens = chunk_of(index, length, heads, sizes.C)

    pairs, d_queries, d_keys, d_carry = reader_products(
        v, d_o, states, d_states, b, h, index, tokens, length, columns, sizes
    )
    queries = load_tile(rows, b, h, tokens, length, columns, sizes.K)
    keys = load_tile(k, b, h, tokens, length, columns, sizes.K)
    # read ∘ (dO Sᵀ);  write ∘ (V dS'ᵀ);  of log carry: Σ k ∘ (write ∘ V dS'ᵀ) + carry Σ S ∘ dS'
    if log_decay is not None:
        g = load_head_decay(log_decay, b, h, tokens, length)
        end = tl.minimum(start + sizes.C, length)
        d_queries *= head_read(g)[:, None]
        d_keys *= head_write(log_decay, b, h, tokens, end, sizes.KIND)[:, None]
        carried = tl.sum(d_carry, axis=0) * tl.exp2(tl.sum(g, axis=0))
        d_end = tl.sum(keys * d_keys) + carried
        pairs = pairs * pair_decay_both(g, sizes.C, sizes.KIND)
    # the pairs of steep chunks are left to `anchored.steep_gradients`
    if steep is not None:
        pairs = tl.where(tl.load(steep + index) == 0, pairs, 0.0)
    # of Σ log α per channel: Σ k' ∘ (V dS̃ᵀ) + 2^passed Σ S̃ ∘ dS̃
    if d_ends is not None:
        carried = tl.sum(tl.exp2(load_end(ends, index, 1, columns, sizes.K)), axis=1) * d_carry
        d_end = tl.sum(keys * d_keys, axis=0) + carried
        store_matrix(d_ends, index, tl.arange(0, 1), 1, columns, sizes.K, d_end[None, :])
    # dP with the keys;  dPᵀ with the rows
    seen = tl.where(causal(sizes.C, STRICT), pairs, 0.0)
    d_queries = multiply_wide_add(seen, keys, d_queries, sizes.KIND)
    seen = tl.where(causal_transposed(sizes.C, STRICT), pairs, 0.0)
    d_keys = multiply_wide_add(seen, queries, d_keys, sizes.KIND)
    if d_log_decay is not None:
        # as in `anchored.store_channel_decay_gradient`: what token t decays is all that was written
        # before it and read after it, so Σ_{s≥t} (rows ∘ drows - k ∘ dk) of the chunk, and its end
        d_sums = tl.sum(queries * d_queries - keys * d_keys, axis=1)
        found = tl.cumsum(d_sums, axis=0, reverse=True) + d_end
        found = tl.where(g == float("-inf"), 0.0, found)[:, None]
        column = block + tl.arange(0, 1)
        store_tile(d_log_decay, b, h, tokens, length, column, k_blocks, found)
    store_sum(d_rows, None, b, h, tokens, length, columns, sizes.K, d_queries)
    store_sum(d_k, d_k_before, b, h, tokens, length, columns, sizes.K, d_keys)
