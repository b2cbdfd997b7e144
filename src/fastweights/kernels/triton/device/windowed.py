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
)

LOG2E = tl.constexpr(1.4426950408889634)


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
def part_columns(part, F: tl.constexpr, PART: tl.constexpr, BF: tl.constexpr):
    """Which of the F features are in this part; F where a part is narrower than its tile."""
    columns = tl.arange(0, BF)
    if PART == BF:
        return part * PART + columns
    return tl.where(columns < PART, part * PART + columns, F)


@triton.jit
def load_map(
    W,
    head,
    K: tl.constexpr,
    PART: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
    kind: tl.constexpr,
):
    """W of a head as [BF, BK]; None where features are given."""
    if W is None:
        map = None
    else:
        map = load_matrix(W, head, tl.arange(0, BF), PART, tl.arange(0, BK), K).to(kind)
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
    K: tl.constexpr,
    F: tl.constexpr,
    PART: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
    activate: tl.constexpr,
    kind: tl.constexpr,
):
    """A part of φ of the tokens `rows` as [C, BF], in the dtype of the products; made of the stream
    by `map`, or the stream itself.
    """
    if map is None:
        phi = load_tile(stream, b, head, rows, length, part_columns(part, F, PART, BF), F)
    else:
        x = load_tile(stream, b, head, rows, length, tl.arange(0, BK), K)
        products = multiply(x, tl.trans(map), kind) * (1 - 2 * part)
        phi = activate(products, (tl.arange(0, BF) < PART)[None, :], 1)
    return phi.to(kind)


@triton.jit
def features_transposed(
    stream,
    map,
    b,
    head,
    rows,
    length,
    part,
    K: tl.constexpr,
    F: tl.constexpr,
    PART: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
    activate: tl.constexpr,
    kind: tl.constexpr,
):
    """The same as [BF, C]."""
    if map is None:
        columns = part_columns(part, F, PART, BF)
        phi = load_tile_transposed(stream, b, head, rows, length, columns, F)
    else:
        x = load_tile_transposed(stream, b, head, rows, length, tl.arange(0, BK), K)
        products = multiply(map, x, kind) * (1 - 2 * part)
        phi = activate(products, (tl.arange(0, BF) < PART)[:, None], 0)
    return phi.to(kind)


@triton.jit
def store_row(rows, index, tokens, length, x):
    """[C] to the tokens of the row ``[length]`` at this index."""
    places = rows + tl.cast(index, tl.int64) * length + tokens
    tl.store(places, x, mask=(tokens >= 0) & (tokens < length))


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
def absorb(
    S,
    z,
    fk,
    map,
    v,
    documents,
    b,
    g,
    rows,
    last,
    boundary,
    length,
    part,
    columns,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    PART: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
    activate: tl.constexpr,
    kind: tl.constexpr,
):
    """S and z with the tokens `rows` up to `last` that are of the document at the boundary."""
    taken = (rows >= 0) & (rows < length) & (rows <= last)
    if documents is not None:
        taken &= documents_of(documents, b, length, rows, -1) == document_at(
            documents, b, length, boundary
        )
    fkt = features_transposed(
        fk, map, b, g, rows, length, part, K, F, PART, BK, BF, activate, kind
    ).to(tl.float32)
    fkt = tl.where(taken[None, :], fkt, 0.0)
    values = load_tile(v, b, g, rows, length, columns, V)
    return multiply_add(fkt, values, S, kind), z + tl.sum(fkt, 1)


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
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BF: tl.constexpr,
    activate: tl.constexpr,
    KIND: tl.constexpr,
):
    """A segment of chunks of one key head: without `states`, what the memory takes up within it,
    to `sums`; with them, `states` ``[b·g·chunks, F, V]`` and `normalisers` ``[b·g·chunks, F]``
    before each of its chunks, and behind the last chunk `last` ``[b g F V+1]``.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    b, g = head // GROUPS, head % GROUPS
    part, block = tl.program_id(1) % PARTS, tl.program_id(1) // PARTS
    begin = segment * per_segment
    end = tl.minimum(begin + per_segment, chunks)
    features = part_columns(part, F, PART, BF)
    columns = block * BV + tl.arange(0, BV)
    ones = V + tl.zeros([1], tl.int32)
    tokens = tl.arange(0, C)

    map = load_map(W, g, K, PART, BK, BF, KIND)
    S = tl.zeros([BF, BV], tl.float32)
    z = tl.zeros([BF], tl.float32)
    if states is not None:
        # S_0: the initial memory, if its document goes on, and cached tokens before the window
        S = load_matrix(memory, head, features, F, tl.where(columns < V, columns, V + 1), V + 1)
        z = tl.sum(load_matrix(memory, head, features, F, ones, V + 1), 1)
        if documents is not None:
            goes_on = document_at(documents, b, length, cached) == 0
            S, z = tl.where(goes_on, S, 0.0), tl.where(goes_on, z, 0.0)
        for row in range(0, cached - window + 1, C):
            S, z = absorb(
                S,
                z,
                fk,
                map,
                v,
                documents,
                b,
                g,
                row + tokens,
                cached - window,
                cached,
                length,
                part,
                columns,
                K,
                V,
                F,
                PART,
                BK,
                BF,
                activate,
                KIND,
            )
        # what the segments before this one take up
        if sums is not None:
            for earlier in range(segment):
                if documents is not None:
                    start = cached + earlier * per_segment * C
                    goes_on = document_at(documents, b, length, start) == document_at(
                        documents, b, length, start + per_segment * C
                    )
                    S, z = tl.where(goes_on, S, 0.0), tl.where(goes_on, z, 0.0)
                place = head * segments + earlier
                S += load_matrix(sums, place, features, F, columns, V)
                z += tl.sum(load_matrix(normaliser_sums, place, features, F, ones * 0, 1), 1)

    for n in range(begin, end):
        if states is not None:
            place = tl.cast(head, tl.int64) * chunks + n
            store_matrix(states, place, features, F, columns, V, S)
            if block == 0:
                store_matrix(normalisers, place, features, F, ones * 0, 1, z[:, None])
        start = cached + n * C
        boundary = tl.minimum(start + C, length)
        if documents is not None:
            goes_on = document_at(documents, b, length, start) == document_at(
                documents, b, length, boundary
            )
            S, z = tl.where(goes_on, S, 0.0), tl.where(goes_on, z, 0.0)
        rows = start - window + 1 + tokens
        S, z = absorb(
            S,
            z,
            fk,
            map,
            v,
            documents,
            b,
            g,
            rows,
            boundary - window,
            boundary,
            length,
            part,
            columns,
            K,
            V,
            F,
            PART,
            BK,
            BF,
            activate,
            KIND,
        )

    if states is None:
        store_matrix(sums, tl.program_id(0), features, F, columns, V, S)
        if block == 0:
            store_matrix(normaliser_sums, tl.program_id(0), features, F, ones * 0, 1, z[:, None])
    elif end == chunks:
        store_matrix(last, head, features, F, tl.where(columns < V, columns, V + 1), V + 1, S)
        if block == 0:
            store_matrix(last, head, features, F, ones, V + 1, z[:, None])


@triton.jit(do_not_specialize=["length", "cached", "window", "chunks"])
def attend(
    q,
    k,
    v,
    fq,
    fk,
    mix,
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
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BF: tl.constexpr,
    activate: tl.constexpr,
    KIND: tl.constexpr,
):
    """The outputs of one chunk of one query head. For a backward also: near_o and far_o, the
    averages of the two sides, where each has its normaliser; and `statistics` ``[b h 4 t]``, each
    query's highest score, how far back that lies, and the sums of weights in the window and before.
    """
    n = tl.program_id(0) % chunks
    h = tl.program_id(0) // chunks
    b, h = h // HEADS, h % HEADS
    g = h // (HEADS // GROUPS)
    first = cached + n * C
    tokens = tl.arange(0, C)
    rows = first + tokens
    queries = n * C + tokens
    count = length - cached
    keys, values = tl.arange(0, BK), tl.arange(0, BV)

    # N = Σ e^(s - c) (v ‖ 1) over the window
    top = tl.full([C], float("-inf"), tl.float32)
    distance = tl.zeros([C], tl.int32)
    near_sum = tl.zeros([C], tl.float32)
    acc = tl.zeros([C, BV], tl.float32)
    query = load_tile(q, b, h, queries, count, keys, K)
    start = first - window + 1
    start += tl.maximum(-start, 0) // C * C
    for row in range(start, first + C, C):
        columns = row + tokens
        products = multiply(query, load_tile_transposed(k, b, g, columns, length, keys, K), KIND)
        back = rows[:, None] - columns[None, :]
        near = (columns >= 0)[None, :] & (back >= 0) & (back < window)
        near = within_documents(near, documents, b, length, rows[:, None], columns[None, :])
        scores = tl.where(near, scores_of(products, scale, softcap), float("-inf"))
        if SHARED and statistics is not None:
            highest, at = tl.max(scores, 1, return_indices=True)
            distance = tl.where(highest > top, rows - row - at, distance)
            highest = tl.maximum(top, highest)
        else:
            highest = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(top - anchor)
        near_sum = near_sum * fade + tl.sum(weights, 1)
        tile = load_tile(v, b, g, columns, length, values, V)
        acc = multiply_add(weights, tile, acc * fade[:, None], KIND)
        top = highest

    gamma = load_column(mix, b, h, queries, count).to(tl.float32)
    if SHARED:
        acc *= gamma[:, None]
    else:
        average = acc * reciprocal_or_zero(near_sum)[:, None]
        if near_o is not None:
            store_tile(near_o, b, h, queries, count, values, V, average)
        acc = tl.zeros([C, BV], tl.float32)

    # F = φ(q) S + Σ φ(q)·φ(k) (v ‖ 1) over the tokens that S will take up next
    columns = first - window + 1 + tokens
    reads = reading(documents, b, length, first, rows)
    place = (tl.cast(b, tl.int64) * GROUPS + g) * chunks + n
    query_map = load_map(W_q, h, K, PART, BK, BF, KIND)
    key_map = load_map(W_k, g, K, PART, BK, BF, KIND)
    far = tl.zeros([C, C], tl.float32)
    far_sum = tl.zeros([C], tl.float32)
    for part in range(PARTS):
        feature = features_of(
            fq, query_map, b, h, queries, count, part, K, F, PART, BK, BF, activate, KIND
        )
        key = features_transposed(
            fk, key_map, b, g, columns, length, part, K, F, PART, BK, BF, activate, KIND
        )
        far = multiply_add(feature, key, far, KIND)
        feature = tl.where(reads[:, None], feature, 0.0)
        places = part_columns(part, F, PART, BF)
        acc = multiply_add(feature, load_matrix(states, place, places, F, values, V), acc, KIND)
        z = tl.load(normalisers + place * F + places, mask=places < F, other=0.0)
        far_sum += tl.sum(feature.to(tl.float32) * z[None, :], 1)
    behind = (columns >= 0)[None, :] & (rows[:, None] - columns[None, :] >= window)
    behind = within_documents(behind, documents, b, length, rows[:, None], columns[None, :])
    far = tl.where(behind, far, 0.0)
    far_sum += tl.sum(far, 1)
    acc = multiply_add(far, load_tile(v, b, g, columns, length, values, V), acc, KIND)

    # o = (γ N + F) / its last column, or γ N / N's last column + (1 - γ) F / F's
    if SHARED:
        acc *= reciprocal_or_zero(gamma * near_sum + far_sum)[:, None]
    else:
        acc *= reciprocal_or_zero(far_sum)[:, None]
        if far_o is not None:
            store_tile(far_o, b, h, queries, count, values, V, acc)
        total = tl.where(near_sum == 0, 0.0, gamma) + tl.where(far_sum == 0, 0.0, 1 - gamma)
        acc = gamma[:, None] * average + (1 - gamma)[:, None] * acc
        acc *= reciprocal_or_zero(total)[:, None]
    store_tile(o, b, h, queries, count, values, V, acc)
    if statistics is not None:
        sequence = 4 * (b * HEADS + h)
        store_row(statistics, sequence, queries, count, top)
        store_row(statistics, sequence + 1, queries, count, distance.to(tl.float32))
        store_row(statistics, sequence + 2, queries, count, near_sum)
        store_row(statistics, sequence + 3, queries, count, far_sum)
