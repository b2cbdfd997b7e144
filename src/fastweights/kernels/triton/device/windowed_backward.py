"""`WindowedLinear` backward: the gradients of queries, of the memory, and of keys and values.

As in `windowed`; in addition every query has a row of `coefficients` ``[b h 5 t]``, by which its
gradient do reaches the sums N and F, whose last columns count the weights:

    dN = near_scale (do ‖ -near_delta)      dF = far_scale (do ‖ -far_delta)

and `share`, minus the gradient of c, which the highest score takes, as c is that: with one
normaliser for both sides c moves the weights of the window against those before it. With a
`log_scale` c is that, has a gradient of its own, and moves no weight that is held at a bound.
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.tiles import (
    load_column,
    load_matrix,
    load_tile,
    load_tile_transposed,
    multiply,
    multiply_add,
    store_column,
    store_tile,
    zero_matrix,
    zeros,
)
from fastweights.kernels.triton.device.windowed import (
    LARGEST,
    LOG2E,
    document_at,
    documents_of,
    first_key,
    fold_segments,
    keep_initial,
    keep_within,
    load_memory,
    load_row,
    near_pairs,
    part_columns,
    query_chunk,
    reading,
    reciprocal_or_zero,
    scores_of,
    sides_there,
    store_apart,
    store_memory,
    store_row,
    store_rows,
    weights_on_scale,
    within_documents,
)

NEAR_SCALE = tl.constexpr(0)
NEAR_DELTA = tl.constexpr(1)
FAR_SCALE = tl.constexpr(2)
FAR_DELTA = tl.constexpr(3)
SHARE = tl.constexpr(4)
COEFFICIENTS = tl.constexpr(5)


@triton.jit
def multiply_apart(a, b, kind: tl.constexpr):
    """a b, behind which shared memory may be written: a wait for wide products is of one warp group
    alone, and the other may still read.
    """
    product = multiply(a, b, kind)
    tl.debug_barrier()
    return product


@triton.jit
def bend(scores, softcap):
    """ds / d(q·k scale) = 1 - tanh² of scores in powers of two."""
    if softcap is None:
        slope = tl.full(scores.shape, 1.0, tl.float32)
    else:
        height = scores / (softcap * LOG2E)
        slope = 1 - height * height
    return slope


@triton.jit
def seen(top):
    """The highest scores, 0 where nothing was seen."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def window_weights(scores, near, top, ON_SCALE: tl.constexpr):
    """e^(s - c) of the pairs that are `near`, as `attend_window` has them; c is 0 where nothing was
    seen.
    """
    if ON_SCALE:
        weights = weights_on_scale(scores, near, top)
    else:
        weights = tl.exp2(tl.where(near, scores, float("-inf")) - seen(top))
    return weights


@triton.jit
def moving(dscores, scores, top, ON_SCALE: tl.constexpr):
    """Gradients of s - c, 0 where that is held at a bound."""
    if ON_SCALE:
        dscores = tl.where(tl.abs(scores - top) <= LARGEST, dscores, 0.0)
    return dscores


@triton.jit
def side_coefficients(upstream, gamma, near_sum, far_sum, o, near_o, far_o, at, V: tl.constexpr):
    """(near_scale, near_delta, far_scale, far_delta) of queries [C]. o is (γ N + F) / its last
    column, or γ N / N's last column + (1 - γ) F / F's, whose averages are near_o and far_o.

    `at`: sequence, head, queries, their number, columns of values.
    """
    b, h, queries, count, values = at
    wide = upstream.to(tl.float32)
    if near_o is None:
        # do·o by either side, over the normaliser of both
        near_delta = tl.sum(wide * load_tile(o, b, h, queries, count, values, V), 1)
        far_delta = near_delta
        far_scale = reciprocal_or_zero(gamma * near_sum + far_sum)
        near_scale = gamma * far_scale
    else:
        # do·o of each side, over its own normaliser and the weights of the sides that are there
        near_delta = tl.sum(wide * load_tile(near_o, b, h, queries, count, values, V), 1)
        far_delta = tl.sum(wide * load_tile(far_o, b, h, queries, count, values, V), 1)
        total = sides_there(gamma, near_sum, far_sum)
        near_scale = gamma * reciprocal_or_zero(total) * reciprocal_or_zero(near_sum)
        far_scale = (1 - gamma) * reciprocal_or_zero(total) * reciprocal_or_zero(far_sum)
    return near_scale, near_delta, far_scale, far_delta


@triton.jit(do_not_specialize=["length", "cached", "window", "chunks"])
def window_query_gradients(
    q,
    k,
    v,
    mix,
    documents,
    statistics,
    o,
    near_o,
    far_o,
    do,
    dq,
    dmix,
    dscale,
    coefficients,
    scale,
    softcap,
    length,
    cached,
    window,
    chunks,
    sizes: tl.constexpr,
    SHARED: tl.constexpr,
):
    """dq, dγ and da of one chunk of one query head, and its coefficients."""
    ON_SCALE: tl.constexpr = dscale is not None
    n, b, h, g = query_chunk(chunks, sizes)
    tokens = tl.arange(0, sizes.C)
    first, queries, count = cached + n * sizes.C, n * sizes.C + tokens, length - cached
    keys, values = tl.arange(0, sizes.BK), tl.arange(0, sizes.BV)
    sequence, rows = b * sizes.HEADS + h, first + tokens

    upstream = load_tile(do, b, h, queries, count, values, sizes.V)
    gamma = load_column(mix, b, h, queries, count).to(tl.float32)
    near_sum = load_row(statistics, 4 * sequence + 2, queries, count)
    far_sum = load_row(statistics, 4 * sequence + 3, queries, count)
    at = (b, h, queries, count, values)
    found = side_coefficients(upstream, gamma, near_sum, far_sum, o, near_o, far_o, at, sizes.V)
    near_scale, near_delta, far_scale, far_delta = found

    # N = near (V ‖ 1) with near = e^(s - c):  ds = (dN (V ‖ 1)ᵀ) ⊙ near,  dq = ds K
    top = load_row(statistics, 4 * sequence, queries, count)
    query = load_tile(q, b, h, queries, count, keys, sizes.K)
    gains, moved = zeros(sizes.C), zeros(sizes.C)
    grad = zero_matrix(sizes.C, sizes.BK)
    for row in range(first_key(first, window, sizes.C), first + sizes.C, sizes.C):
        columns = row + tokens
        key = load_tile(k, b, g, columns, length, keys, sizes.K)
        scores = scores_of(multiply(query, tl.trans(key), sizes.KIND), scale, softcap)
        near = near_pairs(documents, b, length, rows, columns, window)
        weights = window_weights(scores, near, top[:, None], ON_SCALE)
        tile = load_tile(v, b, g, columns, length, values, sizes.V)
        dnear = multiply(upstream, tl.trans(tile), sizes.KIND)
        gains += tl.sum(weights * dnear, 1)  # do·N
        dscores = weights * (dnear - near_delta[:, None]) * near_scale[:, None]
        dscores = moving(dscores, scores, top[:, None], ON_SCALE)
        moved += tl.sum(dscores, 1)  # Σ ds = -da
        grad = multiply_add(dscores * bend(scores, softcap), key, grad, sizes.KIND)

    # dγ = do·(N / n - F / f), or dN·N / γ: 0 where a side is empty; the highest score takes it too
    if SHARED:
        dgamma = tl.where(far_sum == 0, 0.0, far_scale * (gains - near_delta * near_sum))
        if ON_SCALE:
            store_column(dscale, b, h, queries, count, -moved)
        else:
            share = gamma * dgamma  # γ dγ = Σ ds = -dc
            distance = load_row(statistics, 4 * sequence + 1, queries, count).to(tl.int32)
            key = load_tile(k, b, g, rows - distance, length, keys, sizes.K)
            grad -= (share * bend(seen(top), softcap))[:, None] * key.to(tl.float32)
            store_row(coefficients, sequence * COEFFICIENTS + SHARE, queries, count, share)
    else:
        dgamma = tl.where((near_sum == 0) | (far_sum == 0), 0.0, near_delta - far_delta)
    store_tile(dq, b, h, queries, count, keys, sizes.K, grad * scale)
    store_column(dmix, b, h, queries, count, dgamma)
    store_rows(coefficients, sequence * COEFFICIENTS, queries, count, found)


@triton.jit(do_not_specialize=["length", "cached", "window", "chunks"])
def memory_query_gradients(
    v,
    fk,
    documents,
    states,
    normalisers,
    coefficients,
    do,
    dfq,
    length,
    cached,
    window,
    chunks,
    sizes: tl.constexpr,
):
    """dφ(q) of one chunk of one query head."""
    n, b, h, g = query_chunk(chunks, sizes)
    first = cached + n * sizes.C
    tokens = tl.arange(0, sizes.C)
    rows, columns = first + tokens, first - window + 1 + tokens
    queries = n * sizes.C + tokens
    count = length - cached
    values = tl.arange(0, sizes.BV)
    upstream = load_tile(do, b, h, queries, count, values, sizes.V)
    row = (b * sizes.HEADS + h) * COEFFICIENTS
    far_scale = load_row(coefficients, row + FAR_SCALE, queries, count)
    far_delta = load_row(coefficients, row + FAR_DELTA, queries, count)

    # F = far (V ‖ 1) + φ(q) (S ‖ z) with far = φ(q)·φ(k):  dφ(q) = (dF (V ‖ 1)ᵀ) φ(k) + dF (S ‖ z)ᵀ
    behind = (columns >= 0)[None, :] & (rows[:, None] - columns[None, :] >= window)
    behind = within_documents(behind, documents, b, length, rows[:, None], columns[None, :])
    tile = load_tile(v, b, g, columns, length, values, sizes.V)
    # dfar = dF (V ‖ 1)ᵀ of the pairs that are far
    dfar = multiply(upstream, tl.trans(tile), sizes.KIND) - far_delta[:, None]
    dfar = tl.where(behind, dfar * far_scale[:, None], 0.0)
    # far_scale do, of the queries that read S: dF without its last column
    reads = tl.where(reading(documents, b, length, first, rows), far_scale, 0.0)
    upstream = upstream.to(tl.float32) * reads[:, None]
    place = (tl.cast(b, tl.int64) * sizes.GROUPS + g) * chunks + n
    for part in range(sizes.PARTS):
        places = part_columns(part, sizes)
        dphi = multiply(dfar, load_tile(fk, b, g, columns, length, places, sizes.F), sizes.KIND)
        state = load_matrix(states, place, places, sizes.F, values, sizes.V)
        dphi = multiply_add(upstream, tl.trans(state), dphi, sizes.KIND)
        z = tl.load(normalisers + place * sizes.F + places, mask=places < sizes.F, other=0.0)
        dphi -= (reads * far_delta)[:, None] * z[None, :]  # the part of z in dF (S ‖ z)ᵀ
        store_tile(dfq, b, h, queries, count, places, sizes.F, dphi)


@triton.jit(do_not_specialize=["length", "cached", "chunks", "per_segment", "segments"])
def sum_memory_gradients(
    fq,
    do,
    documents,
    coefficients,
    dlast,
    sums,
    normaliser_sums,
    dstates,
    dnormalisers,
    dmemory,
    length,
    cached,
    chunks,
    per_segment,
    segments,
    sizes: tl.constexpr,
):
    """A segment of chunks of one key head, from the last to the first: without `dstates`, what its
    queries leave to the memory before it, to `sums`; with them, the gradients ``[b·g·(chunks+1), F,
    V]`` and ``[b·g·(chunks+1), F]`` of S and z before each chunk and behind the last, and of the
    initial memory.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    b, g = head // sizes.GROUPS, head % sizes.GROUPS
    part, block = tl.program_id(1) % sizes.PARTS, tl.program_id(1) // sizes.PARTS
    begin, end = segment * per_segment, tl.minimum((segment + 1) * per_segment, chunks)
    features = part_columns(part, sizes)
    columns = block * sizes.BV + tl.arange(0, sizes.BV)
    count = length - cached

    D = zero_matrix(sizes.BF, sizes.BV)
    d = zeros(sizes.BF)
    if dstates is not None:
        # the gradient behind the last token, and what the segments behind this one leave
        D, d = load_memory(dlast, head, features, sizes, columns)
        if sums is not None:
            span = (per_segment * sizes.C, segment, segments)
            left, where = (sums, normaliser_sums, head), (features, columns)
            D, d = fold_segments(D, d, left, documents, b, length, cached, span, where, sizes, True)
        if end == chunks:
            place = tl.cast(head, tl.int64) * (chunks + 1) + chunks
            store_apart(dstates, dnormalisers, place, features, sizes, columns, block, D, d)

    for step in range(end - begin):
        n = end - 1 - step
        start = cached + n * sizes.C
        queries = n * sizes.C + tl.arange(0, sizes.C)
        # dS_n has dS_{n+1}, but where a document begins in between
        D, d = keep_within(D, d, documents, b, length, start, start + sizes.C)
        # dS = φ(q)ᵀ dF of the queries that read S, head by head
        reads = reading(documents, b, length, start, cached + queries)
        for h in range(g * (sizes.HEADS // sizes.GROUPS), (g + 1) * (sizes.HEADS // sizes.GROUPS)):
            row = (b * sizes.HEADS + h) * COEFFICIENTS
            far_scale = load_row(coefficients, row + FAR_SCALE, queries, count)
            far_scale = tl.where(reads, far_scale, 0.0)
            far_delta = load_row(coefficients, row + FAR_DELTA, queries, count)
            feature = load_tile_transposed(fq, b, h, queries, count, features, sizes.F)
            upstream = load_tile(do, b, h, queries, count, columns, sizes.V).to(tl.float32)
            D = multiply_add(feature, upstream * far_scale[:, None], D, sizes.KIND)
            # dz = -Σ φ(q) far_scale far_delta, by the last column of dF
            d -= tl.sum(feature.to(tl.float32) * (far_scale * far_delta)[None, :], 1)
        if dstates is not None:
            place = tl.cast(head, tl.int64) * (chunks + 1) + n
            store_apart(dstates, dnormalisers, place, features, sizes, columns, block, D, d)

    if dstates is None:
        place = tl.program_id(0)
        store_apart(sums, normaliser_sums, place, features, sizes, columns, block, D, d)
    elif begin == 0:
        D, d = keep_initial(D, d, documents, b, length, cached)
        store_memory(dmemory, head, features, sizes, columns, block, D, d)


@triton.jit(do_not_specialize=["length", "cached", "window", "chunks", "lowest_tile", "tiles"])
def memory_key_gradients(
    v,
    fq,
    fk,
    documents,
    coefficients,
    dstates,
    dnormalisers,
    do,
    dv,
    dfk,
    length,
    cached,
    window,
    chunks,
    lowest_tile,
    tiles,
    sizes: tl.constexpr,
):
    """dφ(k), and what dv is by F, of one tile of one key head: tile n are the keys that S takes up
    between the chunks n and n + 1, and of those it is before that far for some queries of chunk n.
    """
    n = lowest_tile + tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    b, g = head // sizes.GROUPS, head % sizes.GROUPS
    tokens = tl.arange(0, sizes.C)
    rows = cached + n * sizes.C - window + 1 + tokens
    count = length - cached
    values = tl.arange(0, sizes.BV)
    value = load_tile(v, b, g, rows, length, values, sizes.V)
    dvalue = zero_matrix(sizes.C, sizes.BV)

    after = tl.maximum(n + 1, 0)
    boundary = tl.minimum(cached + after * sizes.C, length)
    # what S_{n+1} (S_0, for earlier tiles) has: up to c_{n+1} - w, of the document at c_{n+1}
    taken = (rows <= boundary - window) & (after <= chunks)
    if documents is not None:
        taken &= documents_of(documents, b, length, rows, -1) == document_at(
            documents, b, length, boundary
        )
    place = tl.cast(head, tl.int64) * (chunks + 1) + tl.minimum(after, chunks)
    queries = n * sizes.C + tokens
    columns = cached + queries
    # the queries of chunk n for which they are far, while S_n lacks them
    behind = columns[None, :] - rows[:, None] >= window
    behind = within_documents(behind, documents, b, length, columns[None, :], rows[:, None])
    first_head = g * (sizes.HEADS // sizes.GROUPS)
    # tiles before the first chunk and behind the last have no queries
    readers = tl.where((n >= 0) & (n < chunks), sizes.HEADS // sizes.GROUPS, 0)
    for part in range(sizes.PARTS):
        # of what S takes up, φ(k)ᵀ (v ‖ 1):  dφ(k) = (v ‖ 1) dSᵀ,  dv = φ(k) dS
        places = part_columns(part, sizes)
        feature = load_tile(fk, b, g, rows, length, places, sizes.F)
        state = load_matrix(dstates, place, places, sizes.F, values, sizes.V)
        d = tl.load(dnormalisers + place * sizes.F + places, mask=places < sizes.F, other=0.0)
        dphi = multiply(value, tl.trans(state), sizes.KIND) + d[None, :]
        written = multiply_apart(feature, state, sizes.KIND)
        dphi = tl.where(taken[:, None], dphi, 0.0)
        dvalue += tl.where(taken[:, None], written, 0.0)
        # F = far (v ‖ 1) with far = φ(q)·φ(k):  dφ(k) = dfarᵀ φ(q),  dv = farᵀ dF
        for h in range(first_head, first_head + readers):
            query = load_tile(fq, b, h, queries, count, places, sizes.F)
            upstream = load_tile(do, b, h, queries, count, values, sizes.V)
            row = (b * sizes.HEADS + h) * COEFFICIENTS
            far_scale = load_row(coefficients, row + FAR_SCALE, queries, count)
            far_delta = load_row(coefficients, row + FAR_DELTA, queries, count)
            far_scale = tl.where(behind, far_scale[None, :], 0.0)
            far = multiply_apart(feature, tl.trans(query), sizes.KIND) * far_scale
            dvalue = multiply_add(far, upstream, dvalue, sizes.KIND)
            dfar = multiply_apart(value, tl.trans(upstream), sizes.KIND) - far_delta[None, :]
            dphi = multiply_add(dfar * far_scale, query, dphi, sizes.KIND)
        store_tile(dfk, b, g, rows, length, places, sizes.F, dphi)
    store_tile(dv, b, g, rows, length, values, sizes.V, dvalue)


@triton.jit(do_not_specialize=["length", "cached", "window", "chunks", "lowest_tile", "tiles"])
def window_key_gradients(
    q,
    k,
    v,
    documents,
    statistics,
    coefficients,
    do,
    far_dv,
    dk,
    dv,
    scale,
    softcap,
    length,
    cached,
    window,
    chunks,
    lowest_tile,
    tiles,
    sizes: tl.constexpr,
    SHARED: tl.constexpr,
    ON_SCALE: tl.constexpr,
):
    """dk and dv of one tile of one key head: of N, and `far_dv` of F."""
    n = lowest_tile + tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    b, g = head // sizes.GROUPS, head % sizes.GROUPS
    tokens = tl.arange(0, sizes.C)
    rows = cached + n * sizes.C - window + 1 + tokens
    count = length - cached
    keys, values = tl.arange(0, sizes.BK), tl.arange(0, sizes.BV)
    # the chunks with queries in whose windows a key of the tile is, head by head
    lowest = tl.maximum(n - (window + sizes.C - 2) // sizes.C, 0)
    visits = tl.maximum(tl.minimum(n + 1, chunks) - lowest, 0)

    # N = near (v ‖ 1) with near = e^(s - c):  dk = dsᵀ q,  dv = nearᵀ dN
    key = load_tile(k, b, g, rows, length, keys, sizes.K)
    value = load_tile(v, b, g, rows, length, values, sizes.V)
    dkey = zero_matrix(sizes.C, sizes.BK)
    dvalue = load_tile(far_dv, b, g, rows, length, values, sizes.V).to(tl.float32)
    for visit in range(visits * (sizes.HEADS // sizes.GROUPS)):
        h = g * (sizes.HEADS // sizes.GROUPS) + visit // visits
        queries = (lowest + visit % visits) * sizes.C + tokens
        columns = cached + queries
        query = load_tile(q, b, h, queries, count, keys, sizes.K)
        upstream = load_tile(do, b, h, queries, count, values, sizes.V)
        row = b * sizes.HEADS + h
        top = load_row(statistics, 4 * row, queries, count)
        near_scale = load_row(coefficients, row * COEFFICIENTS + NEAR_SCALE, queries, count)
        near_delta = load_row(coefficients, row * COEFFICIENTS + NEAR_DELTA, queries, count)
        scores = scores_of(multiply(key, tl.trans(query), sizes.KIND), scale, softcap)
        back = columns[None, :] - rows[:, None]
        near = (back >= 0) & (back < window)
        near = within_documents(near, documents, b, length, columns[None, :], rows[:, None])
        weights = window_weights(scores, near, top[None, :], ON_SCALE) * near_scale[None, :]
        dvalue = multiply_add(weights, upstream, dvalue, sizes.KIND)
        # ds = near ⊙ ((v ‖ 1) dNᵀ), 0 at a bound
        dscores = weights * (multiply(value, tl.trans(upstream), sizes.KIND) - near_delta[None, :])
        dscores = moving(dscores, scores, top[None, :], ON_SCALE)
        if SHARED and not ON_SCALE:
            # dc = -share goes to the key whose score is c
            share = load_row(coefficients, row * COEFFICIENTS + SHARE, queries, count)
            distance = load_row(statistics, 4 * row + 1, queries, count).to(tl.int32)
            dscores -= tl.where(back == distance[None, :], share[None, :], 0.0)
        dkey = multiply_add(dscores * bend(scores, softcap), query, dkey, sizes.KIND)
    store_tile(dk, b, g, rows, length, keys, sizes.K, dkey * scale)
    store_tile(dv, b, g, rows, length, values, sizes.V, dvalue)
