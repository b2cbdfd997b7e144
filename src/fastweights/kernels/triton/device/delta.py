"""Chunkwise `Delta`, with keys k that write and keys e that erase,

    S_t = (I - β_t k_tᵀ e_t) diag(α_t) S_{t-1} + β_t k_tᵀ v_t

Chunks, read, write and carry are those of `decay`, and P those of the rows e, strictly below the
diagonal. With S the state before a chunk, its tokens write what their values lack,

    d = v - (e ∘ read) S - P (β ∘ d)        u = β ∘ d        S' = carry ∘ S + (k ∘ write)ᵀ u

whose solution is d = r + R (β ∘ r) for r = v - (e ∘ read) S, by the resolvent R = -P (I + β P)⁻¹,
strictly lower triangular too. So (I + β P)⁻¹ = I + β R, the gradient λ of u by all ways follows
from the one dU by way of outputs and states, as λ = dU + Rᵀ (β ∘ dU), and nothing is divided by β.
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.scores import (
    causal,
    head_read,
    head_write,
    level_pairs,
    load_head_decay,
    pair_decay,
)
from fastweights.kernels.triton.device.tiles import (
    block_of,
    chunk_of,
    load_column,
    load_matrix,
    load_matrix_transposed,
    load_or_zeros,
    load_tile,
    load_tile_transposed,
    multiply,
    multiply_add,
    multiply_wide,
    multiply_wide_add,
    pass_end,
    segment_of,
    state_block,
    store_matrix,
    store_tile,
    store_where_kept,
    zero_matrix,
)


@triton.jit(do_not_specialize=["length"])
def scores(e, k, log_decay, found, length, heads, sizes: tl.constexpr):
    """P ``[b h N, C, C]``: one program per chunk."""
    index, inside = tl.program_id(0), tl.arange(0, sizes.C)
    b, h, _, tokens = chunk_of(index, length, heads, sizes.C)
    products = zero_matrix(sizes.C, sizes.C)
    for first in range(0, sizes.K, sizes.BK):
        columns = first + tl.arange(0, sizes.BK)
        erasing = load_tile(e, b, h, tokens, length, columns, sizes.K)
        keys = load_tile_transposed(k, b, h, tokens, length, columns, sizes.K)
        products = multiply_wide_add(erasing, keys, products, sizes.KIND)
    # P_ij = Σ_c e_ic k_jc 2^(Σ_{j<r≤i} g_r) for j < i
    if log_decay is None:
        products = tl.where(causal(sizes.C, True), products, 0.0)
    else:
        g = load_head_decay(log_decay, b, h, tokens, length)
        products *= pair_decay(g, sizes.C, True, sizes.KIND)
    store_matrix(found, index, inside, sizes.C, inside, sizes.C, products)


@triton.jit(do_not_specialize=["length"])
def solve(scores, beta, resolvent, length, heads, C: tl.constexpr):
    """R = -P (I + β P)⁻¹ of every chunk: one program per chunk.

    It is found by blocks of 16 tokens, those below the diagonal column by column,

        R_ij = -(I + R_ii β_i) (P_ij (I + β_j R_jj) + Σ_{j<m<i} P_im β_m R_mj)

    which is as stable as substitution row by row.

    Args:
        scores: P ``[b h N, C, C]``, strictly lower triangular
        beta: a stream
        resolvent: ``[b h N, C, C]``, which is written
    """
    index, inside = tl.program_id(0), tl.arange(0, 16)
    b, h, first, _ = chunk_of(index, length, heads, C)
    one = inside[:, None] == inside[None, :]
    diagonal = ()
    for i in tl.static_range(C // 16):
        rows = i * 16 + inside
        strengths = load_column(beta, b, h, first + rows, length).to(tl.float32)
        products = load_matrix(scores, index, rows, C, rows, C).to(tl.float32)
        # R_ii = -P_ii (I + β_i P_ii)⁻¹
        block = resolve(products, strengths, 16)
        store_matrix(resolvent, index, rows, C, rows, C, block)
        diagonal += (block,)
    for j in tl.static_range(C // 16):
        columns = j * 16 + inside
        strengths = load_column(beta, b, h, first + columns, length).to(tl.float32)
        # (I + β_j R_jj), then β_m R_mj for m > j
        factors = (tl.where(one, 1.0, strengths[:, None] * diagonal[j]),)
        for i in tl.static_range(C // 16):
            rows = i * 16 + inside
            block = tl.zeros([16, 16], tl.float32)
            if i > j:
                # P_ij (I + β_j R_jj) + Σ_{j<m<i} P_im β_m R_mj
                for m in tl.static_range(j, i):
                    products = load_matrix(scores, index, rows, C, m * 16 + inside, C)
                    block = multiply_add(products, factors[m - j], block, tl.float32)
                strengths = load_column(beta, b, h, first + rows, length).to(tl.float32)
                # R_ij = -(I + R_ii β_i) times that
                left = tl.where(one, 1.0, diagonal[i] * strengths[None, :])
                block = -multiply(left, block, tl.float32)
                factors += (strengths[:, None] * block,)
            if i != j:
                store_matrix(resolvent, index, rows, C, columns, C, block)


@triton.jit
def resolve(products, strengths, C: tl.constexpr):
    """R = -P (I + β P)⁻¹ [C, C] of P strictly lower triangular and β [C].

    Diagonal blocks are joined in pairs, of 1, 2, 4, … C/2 tokens. Where two have the resolvents
    R₁ and R₂, and P₂₁ stands below the diagonal between them, that of both has there

        R₂₁ = -(I + R₂ β) P₂₁ (I + β R₁)
    """
    i = tl.arange(0, C)
    one = i[:, None] == i[None, :]
    # two tokens, each with R = 0: R₂₁ = -P₂₁
    found = tl.where(level_pairs(1, C), -products, 0.0)
    half = 2
    while half < C:
        below = tl.where(level_pairs(half, C), products, 0.0)
        # all pairs at once: P₂₁ meets the R₁ of its columns and the R₂ of its rows
        right = tl.where(one, 1.0, strengths[:, None] * found)
        left = tl.where(one, 1.0, found * strengths[None, :])
        found -= multiply(left, multiply(below, right, tl.float32), tl.float32)
        half *= 2
    return found


@triton.jit(do_not_specialize=["length", "span"])
def states(
    start,
    e,
    k,
    v,
    beta,
    log_decay,
    ends,
    resolvent,
    found,
    written,
    missing,
    final,
    length,
    heads,
    span,
    sizes: tl.constexpr,
):
    """What tokens write, and the states before the chunks of one segment of `span` chunks, one
    after the other.

    One program per sequence, head and segment, and block of V, in this order.

    Args:
        start: ``[b h segments, K, V]`` before each segment; None: zeros
        e, k, v, beta: streams, e and k as `anchored.anchor` leaves them. Without v values are zero
            and the start is the identity: what is found is the map of the segment, V is K
        log_decay: the stream of a decay per head, or None
        ends: ``[b h N, 3, K]`` of a decay per channel, or None
        resolvent: ``[b h N, C, C]``
        found: ``[b h N, K, V]``, or None: the states are not kept
        written, missing: the streams u and d, or None: not kept
        final: ``[b h segments, K, V]`` after each segment, or None
    """
    _, across, place = block_of(sizes.V, sizes.BV)
    sequence, b, h, chunks, begin, stop = segment_of(place, length, heads, span, sizes.C)
    down, inside = tl.arange(0, sizes.BK), tl.arange(0, sizes.C)

    state = load_or_zeros(start, place, down, sizes.K, across, sizes.V)
    # a segment is affine in its state: from I, without values, it ends with its map M
    if start is None and v is None:
        state = tl.where(down[:, None] == across[None, :], 1.0, 0.0)
    for n in range(begin, stop):
        index = tl.cast(sequence, tl.int64) * chunks + n
        state = pass_end(state, ends, index, 0, down, sizes.K)
        if found is not None:
            store_matrix(found, index, down, sizes.K, across, sizes.V, state)
        tokens, end = n * sizes.C + inside, tl.minimum(n * sizes.C + sizes.C, length)
        erasing = load_tile(e, b, h, tokens, length, down, sizes.K)
        keys = load_tile_transposed(k, b, h, tokens, length, down, sizes.K)
        strengths = load_column(beta, b, h, tokens, length).to(tl.float32)[:, None]
        # (e ∘ read) S;  carry ∘ S
        held = multiply_wide(erasing, state, sizes.KIND)
        if log_decay is not None:
            g = load_head_decay(log_decay, b, h, tokens, length)
            held *= head_read(g)[:, None]
            state *= tl.exp2(tl.sum(g, axis=0))
        state = pass_end(state, ends, index, 1, down, sizes.K)
        # d = r + R (β ∘ r) with r = v - (e ∘ read) S
        if v is not None:
            lacking = load_tile(v, b, h, tokens, length, across, sizes.V).to(tl.float32) - held
        else:
            lacking = -held
        system = load_matrix(resolvent, index, inside, sizes.C, inside, sizes.C)
        lacking = multiply_add(system, strengths * lacking, lacking, sizes.KIND)
        values = strengths * lacking  # u = β ∘ d
        store_where_kept(written, b, h, tokens, length, across, sizes.V, values)
        store_where_kept(missing, b, h, tokens, length, across, sizes.V, lacking)
        # S' = carry ∘ S + (k ∘ write)ᵀ u
        if log_decay is not None:
            values *= head_write(log_decay, b, h, tokens, end, sizes.KIND)[:, None]
        state = multiply_wide_add(keys, values.to(sizes.KIND), state, sizes.KIND)
        state = pass_end(state, ends, index, 2, down, sizes.K)
    if final is not None:
        store_matrix(final, place, down, sizes.K, across, sizes.V, state)


@triton.jit(do_not_specialize=["segment", "segments"])
def advance(
    maps,
    ends,
    starts,
    final,
    segment,
    segments,
    sizes: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The state before the next segment, from that before this one: S' = M S + end, and in REVERSE,
    where the next one is before it, S' = Mᵀ S + end.

    One program per sequence and head, block of K and block of V, in this order.

    Args:
        maps: ``[b h segments, K, K]``, M
        ends: ``[b h segments, K, V]``, what each segment ends with that starts from zeros
        starts: ``[b h segments, K, V]``; the next is written
        final: ``[b h, K, V]``, written where no segment is next
    """
    down, across, _, sequence = state_block(sizes)
    index = tl.cast(sequence, tl.int64) * segments + segment

    state = load_matrix(ends, index, down, sizes.K, across, sizes.V)
    for first in range(0, sizes.K, sizes.BK):
        inner = first + tl.arange(0, sizes.BK)
        if REVERSE:
            factor = load_matrix_transposed(maps, index, inner, sizes.K, down, sizes.K)
        else:
            factor = load_matrix(maps, index, down, sizes.K, inner, sizes.K)
        before = load_matrix(starts, index, inner, sizes.K, across, sizes.V)
        state = multiply_add(factor, before, state, tl.float32)
    following = segment - 1 if REVERSE else segment + 1
    if (following >= 0) & (following < segments):
        index = tl.cast(sequence, tl.int64) * segments + following
        store_matrix(starts, index, down, sizes.K, across, sizes.V, state)
    else:
        store_matrix(final, sequence, down, sizes.K, across, sizes.V, state)


@triton.jit
def write_gradients(d_state, d_written, streams, at, down, across, sizes: tl.constexpr):
    """dU = Pᵀ dO + (k ∘ write) dS' of a chunk [C, BV], where `d_written` is the stream of Pᵀ dO.

    `streams`: k, log_decay; `at`: batch, head, tokens, their number, the one behind the chunk.
    """
    k, log_decay = streams
    b, h, tokens, length, end = at
    keys = load_tile(k, b, h, tokens, length, down, sizes.K)
    d_values = load_tile(d_written, b, h, tokens, length, across, sizes.V).to(tl.float32)
    if log_decay is None:
        d_values = multiply_wide_add(keys, d_state, d_values, sizes.KIND)
    else:
        write = head_write(log_decay, b, h, tokens, end, sizes.KIND)
        d_values += multiply_wide(keys, d_state, sizes.KIND) * write[:, None]
    return d_values


@triton.jit
def decay_state(state, log_decay, at):
    """carry ∘ S of a chunk, of a decay per head; `at` as in `write_gradients`."""
    b, h, tokens, length, end = at
    if log_decay is not None:
        state *= tl.exp2(tl.sum(load_head_decay(log_decay, b, h, tokens, length), axis=0))
    return state


@triton.jit
def add_read_gradients(d_state, d_erased, streams, at, down, across, sizes: tl.constexpr):
    """dS with (q ∘ read)ᵀ dO - (e ∘ read)ᵀ (β ∘ λ), where `d_erased` is β ∘ λ [C, BV].

    `streams`: q, e, dO, log_decay; `at` as in `write_gradients`.
    """
    q, e, d_o, log_decay = streams
    b, h, tokens, length, end = at
    queries = load_tile_transposed(q, b, h, tokens, length, down, sizes.K)
    upstream = load_tile(d_o, b, h, tokens, length, across, sizes.V)
    # read has a number per token: it goes on dO and β ∘ λ instead of q and e
    if log_decay is not None:
        read = head_read(load_head_decay(log_decay, b, h, tokens, length))[:, None]
        upstream, d_erased = upstream * read, d_erased * read
    d_state = multiply_wide_add(queries, upstream.to(sizes.KIND), d_state, sizes.KIND)
    erasing = load_tile_transposed(e, b, h, tokens, length, down, sizes.K)
    return multiply_wide_add(erasing, -d_erased, d_state, sizes.KIND)


@triton.jit(do_not_specialize=["length", "span"])
def state_gradients(
    after,
    q,
    e,
    k,
    beta,
    log_decay,
    ends,
    resolvent,
    d_o,
    d_written,
    missing,
    found,
    d_v,
    d_erased,
    d_beta,
    before,
    length,
    heads,
    span,
    sizes: tl.constexpr,
):
    """The gradients of states, values and β of one segment of `span` chunks, from the last to the
    first.

    One program per sequence, head and segment, and block of V, in this order.

    Args:
        after: ``[b h segments, K, V]``: of the state after each segment; None: zeros
        q, e, k, beta: streams, q, e and k as `anchored.anchor` leaves them
        log_decay, ends: as in `states`
        resolvent: ``[b h N, C, C]``
        d_o: the stream of the outputs' gradients
        d_written: the stream of what the outputs in its chunk give u, Pᵀ dO for the rows q
        missing: the stream d, or None: only `before` is written
        found: ``[b h N, K, V]``: of the state after each chunk
        d_v, d_erased: the streams that are written: of v, and of the reading that it lacks
        d_beta: the stream of β's gradient, a column per block of V
        before: ``[b h segments, K, V]``: of the state before each segment, or None
    """
    v_blocks: tl.constexpr = (sizes.V + sizes.BV - 1) // sizes.BV
    block, across, place = block_of(sizes.V, sizes.BV)
    sequence, b, h, chunks, begin, stop = segment_of(place, length, heads, span, sizes.C)
    down, inside = tl.arange(0, sizes.BK), tl.arange(0, sizes.C)

    d_state = load_or_zeros(after, place, down, sizes.K, across, sizes.V)
    for passed in range(stop - begin):
        n = stop - 1 - passed
        index = tl.cast(sequence, tl.int64) * chunks + n
        tokens, end = n * sizes.C + inside, tl.minimum(n * sizes.C + sizes.C, length)
        at = (b, h, tokens, length, end)
        strengths = load_column(beta, b, h, tokens, length).to(tl.float32)[:, None]
        d_state = pass_end(d_state, ends, index, 2, down, sizes.K)  # dS̃ = 2^tail ∘ dS'
        if missing is not None:
            store_matrix(found, index, down, sizes.K, across, sizes.V, d_state)
        # dU = Pᵀ dO + (k ∘ write) dS'
        d_values = write_gradients(d_state, d_written, (k, log_decay), at, down, across, sizes)
        d_state = pass_end(decay_state(d_state, log_decay, at), ends, index, 1, down, sizes.K)
        # λ = dU + Rᵀ (β ∘ dU)
        system = load_matrix_transposed(resolvent, index, inside, sizes.C, inside, sizes.C)
        d_values = multiply_wide_add(system, strengths * d_values, d_values, sizes.KIND)
        erased = strengths * d_values
        if missing is not None:
            # dβ = Σ λ ∘ d, dv = β ∘ λ, and what d lacks of the reading has -β ∘ λ
            lacking = load_tile(missing, b, h, tokens, length, across, sizes.V).to(tl.float32)
            strength = tl.sum(d_values * lacking, axis=1)[:, None]
            store_tile(d_beta, b, h, tokens, length, block + tl.arange(0, 1), v_blocks, strength)
            store_tile(d_v, b, h, tokens, length, across, sizes.V, erased)
            store_tile(d_erased, b, h, tokens, length, across, sizes.V, -erased)
        # dS = (q ∘ read)ᵀ dO + carry ∘ dS' - (e ∘ read)ᵀ (β ∘ λ)
        streams = (q, e, d_o, log_decay)
        d_state = add_read_gradients(d_state, erased, streams, at, down, across, sizes)
        d_state = pass_end(d_state, ends, index, 0, down, sizes.K)  # dS = 2^head ∘ that
    if before is not None:
        store_matrix(before, place, down, sizes.K, across, sizes.V, d_state)
