"""`WindowedLinear` forward: the memory before every chunk of queries, and the outputs.

Tokens are counted along the keys: `cached` ones of the initial state, then the record's own, in all
`length`. Chunk n has the C queries from token c_n = cached + n C on, and reads the memory S_n of
the tokens up to c_n - w; those in the window of its first query and later ones are its tiles of
keys, of which the first, C tokens from c_n - w + 1 on, are what S takes up between n and n + 1:
some are far for some of the queries. `documents` ``[b length]`` numbers the documents, -1 is a
token that nobody sees; None: all tokens are of one.

Features are given, or are made of a stream by W, in parts of PART features: f(x W) and f(-x W).
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
    store_matrix,
    store_tile,
    store_where_kept,
    zero_matrix,
    zeros,
)
from fastweights.recurrence.windowed import LARGEST_LOG_WEIGHT

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(LARGEST_LOG_WEIGHT * 1.4426950408889634)
"""`LARGEST_LOG_WEIGHT` in powers of two."""


@triton.jit
def reciprocal_or_zero(x):
    """1 / x, and 0 for 0."""
    return tl.where(x == 0, 0.0, 1 / tl.where(x == 0, 1.0, x))


@triton.jit
def tanh(x):
    """To float32's accuracy, by its series where 1 - 2 / (1 + e^2x) would cancel."""
    y = x * x
    small = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, small, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E))))


@triton.jit
def scores_of(products, scale, softcap):
    """s of q·k, in powers of two."""
    scores = products * scale
    if softcap is not None:
        scores = softcap * tanh(scores / softcap)
    return scores * LOG2E


@triton.jit
def weights_on_scale(scores, near, log_scale):
    """e^(s - a) of the pairs that are `near`, held within bounds; all in powers of two."""
    bounded = tl.minimum(tl.maximum(scores - log_scale, -LARGEST), LARGEST)
    return tl.where(near, tl.exp2(bounded), 0.0)


@triton.jit
def softmax_features(x, inside, axis: tl.constexpr):
    """Over the features."""
    x = tl.where(inside, x, float("-inf"))
    x = tl.exp2((x - tl.max(x, axis, keep_dims=True)) * LOG2E)
    return x / tl.sum(x, axis, keep_dims=True)


@triton.jit
def exponential_features(x, inside, axis: tl.constexpr):  # noqa: ARG001
    """e^x"""
    return tl.where(inside, tl.exp2(x * LOG2E), 0.0)


@triton.jit
def elu_features(x, inside, axis: tl.constexpr):  # noqa: ARG001
    """1 + ELU(x)"""
    return tl.where(inside, tl.where(x > 0, x + 1, tl.exp2(tl.minimum(x, 0.0) * LOG2E)), 0.0)


@triton.jit
def relu_features(x, inside, axis: tl.constexpr):  # noqa: ARG001
    """The positive part."""
    return tl.where(inside, tl.maximum(x, 0.0), 0.0)


@triton.jit
def part_columns(part, sizes: tl.constexpr):
    """Which of the F features are in this part; F where a part is narrower than its tile."""
    columns = tl.arange(0, sizes.BF)
    if sizes.PART == sizes.BF:
        return part * sizes.PART + columns
    return tl.where(columns < sizes.PART, part * sizes.PART + columns, sizes.F)


@triton.jit
def load_map(W, head, sizes: tl.constexpr):
    """W of a head as [BF, BK]; None where features are given."""
    if W is None:
        map = None
    else:
        map = load_matrix(
            W, head, tl.arange(0, sizes.BF), sizes.PART, tl.arange(0, sizes.BK), sizes.K
        ).to(sizes.KIND)
    return map


@triton.jit
def features_of(
    stream,
    map,
    b,
    head,
    rows,
    length,
    part,
    sizes: tl.constexpr,
    activate: tl.constexpr,
):
    """A part of φ of the tokens `rows` as [C, BF], in the dtype of the products; made of the stream
    by `map`, or the stream itself.

    """
    if map is None:
        phi = load_tile(stream, b, head, rows, length, part_columns(part, sizes), sizes.F)
    else:
        x = load_tile(stream, b, head, rows, length, tl.arange(0, sizes.BK), sizes.K)
        # x W in part 0, -x W in part 1
        products = multiply(x, tl.trans(map), sizes.KIND) * (1 - 2 * part)
        phi = activate(products, (tl.arange(0, sizes.BF) < sizes.PART)[None, :], 1)
    return phi.to(sizes.KIND)


@triton.jit
def features_transposed(
    stream,
    map,
    b,
    head,
    rows,
    length,
    part,
    sizes: tl.constexpr,
    activate: tl.constexpr,
):
    """The same as [BF, C]."""
    if map is None:
        columns = part_columns(part, sizes)
        phi = load_tile_transposed(stream, b, head, rows, length, columns, sizes.F)
    else:
        x = load_tile_transposed(stream, b, head, rows, length, tl.arange(0, sizes.BK), sizes.K)
        products = multiply(map, x, sizes.KIND) * (1 - 2 * part)
        phi = activate(products, (tl.arange(0, sizes.BF) < sizes.PART)[:, None], 0)
    return phi.to(sizes.KIND)


@triton.jit
def store_row(rows, index, tokens, length, x):
    """[C] to the tokens of the row ``[length]`` at this index."""
    places = rows + tl.cast(index, tl.int64) * length + tokens
    tl.store(places, x, mask=(tokens >= 0) & (tokens < length))


@triton.jit
def store_rows(rows, index, tokens, length, found):
    """Several [C] to rows that follow each other from this index on."""
    for i in tl.static_range(len(found)):
        store_row(rows, index + i, tokens, length, found[i])


@triton.jit
def load_row(rows, index, tokens, length):
    """[C] from where `store_row` puts it, 0 outside."""
    places = rows + tl.cast(index, tl.int64) * length + tokens
    return tl.load(places, mask=(tokens >= 0) & (tokens < length), other=0.0)


@triton.jit
def document_at(documents, b, length, position):
    """Of one token; behind the last one, of that."""
    return tl.load(documents + tl.cast(b, tl.int64) * length + tl.minimum(position, length - 1))


@triton.jit
def documents_of(documents, b, length, rows, other: tl.constexpr):
    """Of the tokens `rows` of any shape."""
    inside = (rows >= 0) & (rows < length)
    return tl.load(documents + tl.cast(b, tl.int64) * length + rows, mask=inside, other=other)


@triton.jit
def within_documents(pairs, documents, b, length, queries, keys):
    """Which of these `pairs` are in one document: `queries` [C, 1] and `keys` [1, C], or the
    reverse.
    """
    if documents is not None:
        pairs &= documents_of(documents, b, length, queries, -2) == documents_of(
            documents, b, length, keys, -1
        )
    return pairs


@triton.jit
def reading(documents, b, length, first, rows):
    """Which of a chunk's queries are of the document of its first, whose memory it is: [C]."""
    reads = rows < length
    if documents is not None:
        reads &= documents_of(documents, b, length, rows, -2) == document_at(
            documents, b, length, first
        )
    return reads


@triton.jit
def keep_within(S, z, documents, b, length, first, second):
    """S and z, or zeros where the tokens `first` and `second` are of two documents."""
    if documents is not None:
        goes_on = document_at(documents, b, length, first) == document_at(
            documents, b, length, second
        )
        S, z = tl.where(goes_on, S, 0.0), tl.where(goes_on, z, 0.0)
    return S, z


@triton.jit
def keep_initial(S, z, documents, b, length, cached):
    """S and z, or zeros where the first token after the cache begins a document."""
    if documents is not None:
        goes_on = document_at(documents, b, length, cached) == 0
        S, z = tl.where(goes_on, S, 0.0), tl.where(goes_on, z, 0.0)
    return S, z


@triton.jit
def load_memory(memory, index, features, sizes: tl.constexpr, columns):
    """S [BF, BV] and z [BF] of ``[F, V+1]``, whose last column is z."""
    # columns of S from V on are 0, though z stands in column V
    inside = tl.where(columns < sizes.V, columns, sizes.V + 1)
    S = load_matrix(memory, index, features, sizes.F, inside, sizes.V + 1)
    last = sizes.V + tl.zeros([1], tl.int32)
    return S, tl.sum(load_matrix(memory, index, features, sizes.F, last, sizes.V + 1), 1)


@triton.jit
def store_memory(memory, index, features, sizes: tl.constexpr, columns, block, S, z):
    """S and, by the first block of columns, z to where `load_memory` reads them."""
    inside = tl.where(columns < sizes.V, columns, sizes.V + 1)
    store_matrix(memory, index, features, sizes.F, inside, sizes.V + 1, S)
    if block == 0:
        last = sizes.V + tl.zeros([1], tl.int32)
        store_matrix(memory, index, features, sizes.F, last, sizes.V + 1, z[:, None])


@triton.jit
def store_apart(states, normalisers, index, features, sizes: tl.constexpr, columns, block, S, z):
    """S to ``[F, V]`` and, by the first block of columns, z to ``[F]``."""
    store_matrix(states, index, features, sizes.F, columns, sizes.V, S)
    if block == 0:
        store_matrix(normalisers, index, features, sizes.F, tl.zeros([1], tl.int32), 1, z[:, None])


@triton.jit
def add_apart(S, z, states, normalisers, index, features, sizes: tl.constexpr, columns):
    """S and z with those that `store_apart` has stored."""
    S += load_matrix(states, index, features, sizes.F, columns, sizes.V)
    z += tl.sum(load_matrix(normalisers, index, features, sizes.F, tl.zeros([1], tl.int32), 1), 1)
    return S, z


@triton.jit
def fold_segments(
    S,
    z,
    left,
    documents,
    b,
    length,
    cached,
    span,
    where,
    sizes: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """S and z through all segments before this one (REVERSE: behind it), by what each of them has
    left.

    `left`: sums, normaliser_sums, head; `span`: tokens of a segment, which it is, how many there
    are; `where`: features, columns.
    """
    sums, normaliser_sums, head = left
    tokens, segment, segments = span
    features, columns = where
    for i in range(segments - 1 - segment if REVERSE else segment):
        other = segments - 1 - i if REVERSE else i
        start = cached + other * tokens
        # S ← S + what the segment has left, or that alone where a document begins in it
        S, z = keep_within(S, z, documents, b, length, start, start + tokens)
        place = head * segments + other
        S, z = add_apart(S, z, sums, normaliser_sums, place, features, sizes, columns)
    return S, z


@triton.jit
def absorb(
    S,
    z,
    fk,
    values,
    documents,
    at,
    rows,
    last,
    boundary,
    sizes: tl.constexpr,
    activate: tl.constexpr,
    map,
):
    """S and z with the tokens `rows` up to `last` that are of the document at the boundary.

    `fk` and its `map`; `values`: v, its columns; `at`: sequence, head, number of tokens,
    part; `sizes` as in `features_of`.
    """
    v, columns = values
    b, g, length, part = at
    taken = (rows >= 0) & (rows < length) & (rows <= last)
    if documents is not None:
        taken &= documents_of(documents, b, length, rows, -1) == document_at(
            documents, b, length, boundary
        )
    fkt = features_transposed(fk, map, b, g, rows, length, part, sizes, activate)
    fkt = tl.where(taken[None, :], fkt.to(tl.float32), 0.0)
    tile = load_tile(v, b, g, rows, length, columns, sizes.V)
    # S + Σ φ(k)ᵀ v, z + Σ φ(k)
    return multiply_add(fkt, tile, S, sizes.KIND), z + tl.sum(fkt, 1)


@triton.jit(do_not_specialize=["length", "cached", "window", "chunks", "per_segment", "segments"])
def sum_memory(
    fk,
    W,
    v,
    documents,
    memory,
    sums,
    normaliser_sums,
    states,
    normalisers,
    last,
    length,
    cached,
    window,
    chunks,
    per_segment,
    segments,
    sizes: tl.constexpr,
    activate: tl.constexpr,
):
    """A segment of chunks of one key head: without `states`, what the memory takes up within it,
    to `sums`; with them, `states` ``[b·g·chunks, F, V]`` and `normalisers` ``[b·g·chunks, F]``
    before each of its chunks, and behind the last chunk `last` ``[b g F V+1]``.
    """
    segment, head = tl.program_id(0) % segments, tl.program_id(0) // segments
    b, g = head // sizes.GROUPS, head % sizes.GROUPS
    part, block = tl.program_id(1) % sizes.PARTS, tl.program_id(1) // sizes.PARTS
    begin, end = segment * per_segment, tl.minimum((segment + 1) * per_segment, chunks)
    features = part_columns(part, sizes)
    columns, tokens = block * sizes.BV + tl.arange(0, sizes.BV), tl.arange(0, sizes.C)
    map = load_map(W, g, sizes)
    at = (b, g, length, part)

    S, z = zero_matrix(sizes.BF, sizes.BV), zeros(sizes.BF)
    if states is not None:
        # S_0: the initial memory, if its document goes on, and cached tokens before the window
        S, z = load_memory(memory, head, features, sizes, columns)
        S, z = keep_initial(S, z, documents, b, length, cached)
        last_row = cached - window
        for row in range(0, last_row + 1, sizes.C):
            S, z = absorb(
                *(S, z, fk, (v, columns), documents, at, row + tokens, last_row, cached),
                *(sizes, activate),
                map=map,
            )
        # what the segments before this one take up
        if sums is not None:
            span = (per_segment * sizes.C, segment, segments)
            left, where = (sums, normaliser_sums, head), (features, columns)
            S, z = fold_segments(
                S, z, left, documents, b, length, cached, span, where, sizes, False
            )

    for n in range(begin, end):
        if states is not None:
            place = tl.cast(head, tl.int64) * chunks + n
            store_apart(states, normalisers, place, features, sizes, columns, block, S, z)
        # S_{n+1} = S_n + Σ φ(k_i)ᵀ (v_i ‖ 1), c_n - w < i ≤ c_{n+1} - w, of one document
        start = cached + n * sizes.C
        boundary = tl.minimum(start + sizes.C, length)
        S, z = keep_within(S, z, documents, b, length, start, boundary)
        rows = start - window + 1 + tokens
        S, z = absorb(
            *(S, z, fk, (v, columns), documents, at, rows, boundary - window, boundary),
            *(sizes, activate),
            map=map,
        )

    if states is None:
        store_apart(sums, normaliser_sums, tl.program_id(0), features, sizes, columns, block, S, z)
    elif end == chunks:
        store_memory(last, head, features, sizes, columns, block, S, z)


@triton.jit
def query_chunk(chunks, sizes: tl.constexpr):
    """The chunk of queries of this program: (which, its sequence, query head and key head)"""
    h = tl.program_id(0) // chunks
    b, h = h // sizes.HEADS, h % sizes.HEADS
    return tl.program_id(0) % chunks, b, h, h // (sizes.HEADS // sizes.GROUPS)


@triton.jit
def sides_there(gamma, near_sum, far_sum):
    """What the sides that are not empty weigh together."""
    return tl.where(near_sum == 0, 0.0, gamma) + tl.where(far_sum == 0, 0.0, 1 - gamma)


@triton.jit
def first_key(first, window, C: tl.constexpr):
    """Where the first tile of keys begins that queries from `first` on may see."""
    start = first - window + 1
    # whole tiles before token 0 are passed over
    return start + tl.maximum(-start, 0) // C * C


@triton.jit
def near_pairs(documents, b, length, rows, columns, window):
    """Which keys `columns` are in the windows of the queries `rows`, and in their documents."""
    back = rows[:, None] - columns[None, :]
    near = (columns >= 0)[None, :] & (back >= 0) & (back < window)
    return within_documents(near, documents, b, length, rows[:, None], columns[None, :])


@triton.jit
def load_scale(log_scale, b, h, queries, count):
    """a of queries [C] in powers of two; None where c is the highest score."""
    if log_scale is None:
        found = None
    else:
        found = load_column(log_scale, b, h, queries, count).to(tl.float32) * LOG2E
    return found


@triton.jit
def attend_window(
    query,
    keys,
    values,
    documents,
    at,
    rows,
    window,
    scale,
    softcap,
    sizes: tl.constexpr,
    DISTANCES: tl.constexpr,
    log_scale,
):
    """N = Σ e^(s - c) (v ‖ 1) of the queries `rows` over their windows: (c, how far back the
    highest score lies, the last column of N [C], the others [C, BV]). With a `log_scale` [C] that
    is c; without one it is the highest score.

    `keys`, `values`: stream, columns; `at`: sequence, key head, number of tokens,
    the first query.
    """
    k, key_columns = keys
    v, value_columns = values
    b, g, length, first = at
    top = zeros(sizes.C) - float("inf") if log_scale is None else log_scale
    distance = zeros(sizes.C).to(tl.int32)
    total = zeros(sizes.C)
    acc = zero_matrix(sizes.C, sizes.BV)
    for row in range(first_key(first, window, sizes.C), first + sizes.C, sizes.C):
        columns = row + tl.arange(0, sizes.C)
        key = load_tile_transposed(k, b, g, columns, length, key_columns, sizes.K)
        scores = scores_of(multiply(query, key, sizes.KIND), scale, softcap)
        near = near_pairs(documents, b, length, rows, columns, window)
        if log_scale is not None:
            weights = weights_on_scale(scores, near, log_scale[:, None])
        else:
            scores = tl.where(near, scores, float("-inf"))
            if DISTANCES:
                # the gradient of c will go to the key of the highest score: how far back it lies
                highest, place = tl.max(scores, 1, return_indices=True)
                distance = tl.where(highest > top, rows - row - place, distance)
                highest = tl.maximum(top, highest)
            else:
                highest = tl.maximum(top, tl.max(scores, 1))
            # what was summed up so far fades to the new c, which is 0 where nothing was seen yet
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(scores - anchor[:, None])
            fade = tl.exp2(top - anchor)
            total, acc, top = total * fade, acc * fade[:, None], highest
        # N + Σ e^(s - c) (v ‖ 1) of the tile
        total += tl.sum(weights, 1)
        tile = load_tile(v, b, g, columns, length, value_columns, sizes.V)
        acc = multiply_add(weights, tile, acc, sizes.KIND)
    return top, distance.to(tl.float32), total, acc


@triton.jit
def attend_memory(
    acc,
    queries,
    keys,
    values,
    memory,
    documents,
    at,
    rows,
    window,
    sizes: tl.constexpr,
    activate: tl.constexpr,
):
    """F = φ(q) S + Σ φ(q)·φ(k) (v ‖ 1) of the queries `rows`, over the tokens that S will take up
    next: (its last column [C], `acc` and the others).

    `queries`: stream, W, head, tokens, their number; `keys`: stream, W; `values`:
    stream, columns; `memory`: S, z, their place; `at`: sequence, key
    head, number of tokens, the first query.
    """
    fq, W_q, h, tokens, count = queries
    fk, W_k = keys
    v, value_columns = values
    states, normalisers, place = memory
    b, g, length, first = at
    query_map = load_map(W_q, h, sizes)
    key_map = load_map(W_k, g, sizes)
    columns = first - window + 1 + tl.arange(0, sizes.C)
    # the queries of the document that S is of
    reads = reading(documents, b, length, first, rows)
    far = zero_matrix(sizes.C, sizes.C)
    total = zeros(sizes.C)
    for part in range(sizes.PARTS):
        # φ(q)·φ(k) and φ(q) (S ‖ z), summed over the parts of the features
        feature = features_of(fq, query_map, b, h, tokens, count, part, sizes, activate)
        key = features_transposed(fk, key_map, b, g, columns, length, part, sizes, activate)
        far = multiply_add(feature, key, far, sizes.KIND)
        tl.debug_barrier()  # see `multiply_apart`
        feature = tl.where(reads[:, None], feature, 0.0)
        places = part_columns(part, sizes)
        state = load_matrix(states, place, places, sizes.F, value_columns, sizes.V)
        acc = multiply_add(feature, state, acc, sizes.KIND)
        z = tl.load(normalisers + place * sizes.F + places, mask=places < sizes.F, other=0.0)
        total += tl.sum(feature.to(tl.float32) * z[None, :], 1)
    # a token that S will take up is far for the queries whose windows it has left
    behind = (columns >= 0)[None, :] & (rows[:, None] - columns[None, :] >= window)
    behind = within_documents(behind, documents, b, length, rows[:, None], columns[None, :])
    far = tl.where(behind, far, 0.0)
    total += tl.sum(far, 1)
    tile = load_tile(v, b, g, columns, length, value_columns, sizes.V)
    return total, multiply_add(far, tile, acc, sizes.KIND)


@triton.jit(do_not_specialize=["length", "cached", "window", "chunks"])
def attend(
    q,
    k,
    v,
    fq,
    fk,
    mix,
    log_scale,
    W_q,
    W_k,
    documents,
    states,
    normalisers,
    o,
    near_o,
    far_o,
    statistics,
    scale,
    softcap,
    length,
    cached,
    window,
    chunks,
    sizes: tl.constexpr,
    SHARED: tl.constexpr,
    activate: tl.constexpr,
):
    """The outputs of one chunk of one query head. For a backward also: near_o and far_o, the
    averages of the two sides, where each has its normaliser; and `statistics` ``[b h 4 t]``, each
    query's c, how far back the highest score lies, and the sums of weights near and before.
    """
    n, b, h, g = query_chunk(chunks, sizes)
    first, count, tokens = cached + n * sizes.C, length - cached, tl.arange(0, sizes.C)
    queries, rows, at = n * sizes.C + tokens, first + tokens, (b, g, length, first)
    asking, columns = (fq, W_q, h, queries, count), tl.arange(0, sizes.BV)
    keys, values = (k, tl.arange(0, sizes.BK)), (v, columns)

    # N = Σ e^(s - c) (v ‖ 1) over the window
    query = load_tile(q, b, h, queries, count, tl.arange(0, sizes.BK), sizes.K)
    top, back, near_sum, acc = attend_window(
        *(query, keys, values, documents, at, rows, window, scale, softcap),
        *(sizes, SHARED and statistics is not None),
        log_scale=load_scale(log_scale, b, h, queries, count),
    )
    gamma = load_column(mix, b, h, queries, count).to(tl.float32)
    if SHARED:
        acc *= gamma[:, None]
    else:
        average = acc * reciprocal_or_zero(near_sum)[:, None]
        store_where_kept(near_o, b, h, queries, count, columns, sizes.V, average)
        acc = zero_matrix(sizes.C, sizes.BV)

    # F = φ(q) S + Σ φ(q)·φ(k) (v ‖ 1) over the tokens that S will take up next
    memory = (states, normalisers, (tl.cast(b, tl.int64) * sizes.GROUPS + g) * chunks + n)
    far_sum, acc = attend_memory(
        *(acc, asking, (fk, W_k), values, memory, documents, at, rows, window),
        *(sizes, activate),
    )

    # o = (γ N + F) / its last column, or γ N / N's last column + (1 - γ) F / F's
    if SHARED:
        acc *= reciprocal_or_zero(gamma * near_sum + far_sum)[:, None]
    else:
        acc *= reciprocal_or_zero(far_sum)[:, None]
        store_where_kept(far_o, b, h, queries, count, columns, sizes.V, acc)
        acc = gamma[:, None] * average + (1 - gamma)[:, None] * acc
        acc *= reciprocal_or_zero(sides_there(gamma, near_sum, far_sum))[:, None]
    store_tile(o, b, h, queries, count, columns, sizes.V, acc)
    if statistics is not None:
        found = (top, back, near_sum, far_sum)
        store_rows(statistics, 4 * (b * sizes.HEADS + h), queries, count, found)
