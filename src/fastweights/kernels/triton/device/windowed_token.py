"""One token of `WindowedLinear`: its outputs, and the cache and memory behind it."""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.tiles import load_matrix, rows_of
from fastweights.kernels.triton.device.windowed import (
    LOG2E,
    load_memory,
    part_columns,
    reciprocal_or_zero,
    scores_of,
    sides_there,
    store_memory,
    weights_on_scale,
)


@triton.jit
def load_token(stream, b, h, columns, width: tl.constexpr):
    """[D] of the one token of a stream."""
    return tl.load(rows_of(stream, b, h) + columns, mask=columns < width, other=0.0)


@triton.jit
def load_number(stream, b, h):
    """[1] of the one token of a stream that is one wide, in float32."""
    return load_token(stream, b, h, tl.zeros([1], tl.int32), 1).to(tl.float32)


@triton.jit
def load_oldest(cache, own, head, b, g, cached, columns, width: tl.constexpr):
    """[D] of the oldest token in float32: the first in the cache ``[b g s ·]``, or if there is none
    the token itself.
    """
    places = cache + tl.cast(head, tl.int64) * cached * width + columns
    old = tl.load(places, mask=(columns < width) & (cached > 0), other=0.0)
    new = load_token(own, b, g, columns, width)
    return tl.where(cached > 0, old.to(tl.float32), new.to(tl.float32))


@triton.jit
def load_tokens(cache, own, head, b, g, cached, rows, columns, width: tl.constexpr):
    """The tokens `rows` [N, D] in float32: those of the cache ``[b g s ·]``, and behind them the
    token itself.
    """
    places = cache + (tl.cast(head, tl.int64) * cached + rows[:, None]) * width + columns[None, :]
    inside = (rows < cached)[:, None] & (columns < width)[None, :]
    old = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    new = load_token(own, b, g, columns, width).to(tl.float32)
    return tl.where((rows == cached)[:, None], new[None, :], old)


@triton.jit
def follow(cache, own, following, head, b, g, cached, gone, rows, columns, width: tl.constexpr):
    """The tokens `rows` but the first `gone` to the cache behind this one."""
    tile = load_tokens(cache, own, head, b, g, cached, rows, columns, width)
    kept = cached + 1 - gone
    place = tl.cast(head, tl.int64) * kept + rows - gone
    inside = ((rows >= gone) & (rows <= cached))[:, None] & (columns < width)[None, :]
    tl.store(
        following + place[:, None] * width + columns[None, :],
        tile.to(following.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def map_vector(x, W, head, part, sizes: tl.constexpr, activate: tl.constexpr):
    """A part of φ of x [BK]: [BF]. `sizes`: K, F, PART, BK, BF."""
    map = load_matrix(
        W, head, tl.arange(0, sizes.BF), sizes.PART, tl.arange(0, sizes.BK), sizes.K
    ).to(tl.float32)
    # x W in part 0, -x W in part 1
    products = tl.sum(map * x[None, :], 1) * (1 - 2 * part)
    return activate(products, tl.arange(0, sizes.BF) < sizes.PART, 0)


@triton.jit
def age_by_one(ages, next_ages, cached, gone, rows, FORGOTTEN: tl.constexpr):
    """The ages of the tokens `rows` but the first `gone`, one older, to those behind this token."""
    age = tl.load(ages + rows, mask=rows < cached, other=0)
    age = tl.where(age < FORGOTTEN, age + 1, age)
    tl.store(next_ages + rows - gone, age, mask=(rows >= gone) & (rows <= cached))


@triton.jit
def leaves_window(ages, cached, window):
    """Whether the oldest token leaves the window, so that the memory takes it up: [1]."""
    # its age is w - 1 for this token, and would be w for the next
    oldest = tl.load(ages + tl.zeros([1], tl.int32), mask=cached > 0, other=0)
    return oldest == tl.maximum(window - 1, 0)


@triton.jit
def leaving_features(oldest, at, part, sizes: tl.constexpr, activate: tl.constexpr):
    """A part of φ of the oldest key [BF], if that leaves the window, else 0.

    `oldest`: keys and features of the cache, those of the token itself, W, whether it leaves; `at`:
    key head among all, sequence, key head, tokens in the cache.
    """
    keys, features, k, fk, W, leaves = oldest
    head, b, g, cached = at
    if W is None:
        columns = part_columns(part, sizes)
        found = load_oldest(features, fk, head, b, g, cached, columns, sizes.F)
    else:
        key = load_oldest(keys, k, head, b, g, cached, tl.arange(0, sizes.BK), sizes.K)
        found = map_vector(key, W, g, part, sizes, activate)
    return tl.where(leaves, found, 0.0)


@triton.jit
def attend_cache(asking, keys, values, ages, at, limits, sizes: tl.constexpr):
    """N = Σ e^(s - c) (v ‖ 1) over the window: (its last column [1], the others [BV]).

    `asking`: the streams of queries and of c, None for the highest score, and the query head;
    `keys`, `values`: what is cached, the token's stream, columns; `ages` of the cache; `at` as in
    `leaving_features`; `limits`: window, scale, softcap.
    """
    q, log_scale, h = asking
    window, scale, softcap = limits
    cached_keys, k, key_columns = keys
    cached_values, v, value_columns = values
    head, b, g, cached = at
    query = load_token(q, b, h, key_columns, sizes.K).to(tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros(value_columns.shape, tl.float32)
    for row in range(0, cached + 1, sizes.C):
        rows = row + tl.arange(0, sizes.C)
        tile = load_tokens(cached_keys, k, head, b, g, cached, rows, key_columns, sizes.K)
        scores = scores_of(tl.sum(tile * query[None, :], 1), scale, softcap)
        age = tl.load(ages + rows, mask=rows < cached, other=0)
        seen = (rows <= cached) & (age < window)
        if log_scale is not None:
            a = load_number(log_scale, b, h) * LOG2E
            weights = weights_on_scale(scores, seen, a)
        else:
            scores = tl.where(seen, scores, float("-inf"))
            # what was summed up so far fades to the new c, which is 0 where nothing was seen yet
            highest = tl.maximum(top, tl.max(scores, 0))
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            weights, fade = tl.exp2(scores - anchor), tl.exp2(top - anchor)
            total, acc, top = total * fade, acc * fade, highest
        # N + Σ e^(s - c) (v ‖ 1) of the tile
        total += tl.sum(weights, 0)
        tile = load_tokens(cached_values, v, head, b, g, cached, rows, value_columns, sizes.V)
        acc += tl.sum(tile * weights[:, None], 0)
    return total, acc


@triton.jit
def read_memory(
    asking,
    memory,
    leaving,
    at,
    sizes: tl.constexpr,
    activate: tl.constexpr,
):
    """F = φ(q) S, without a window φ(q) S': (its last column [1], the others [BV]).

    `asking`: the stream of the features of queries, W, the query head; `memory`: S, its columns;
    `leaving`: what `leaving_features` takes, its value, whether it is read; `at` as there.
    """
    fq, W_q, h = asking
    states, columns = memory
    oldest, leaving_value, reads_leaving = leaving
    head, b, g, cached = at
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros(columns.shape, tl.float32)
    for part in range(sizes.PARTS):
        places = part_columns(part, sizes)
        if W_q is None:
            feature = load_token(fq, b, h, places, sizes.F).to(tl.float32)
        else:
            source = load_token(fq, b, h, tl.arange(0, sizes.BK), sizes.K).to(tl.float32)
            feature = map_vector(source, W_q, h, part, sizes, activate)
        S = load_matrix(states, head, places, sizes.F, columns, sizes.V + 1)
        z = load_matrix(
            states, head, places, sizes.F, sizes.V + tl.zeros([1], tl.int32), sizes.V + 1
        )
        # φ(q) (S ‖ z)
        acc += tl.sum(S * feature[:, None], 0)
        total += tl.sum(z * feature[:, None], 0)
        if reads_leaving:
            # S' - S = φ(k)ᵀ (v ‖ 1) of the token itself, which adds φ(q)·φ(k) (v ‖ 1)
            weight = tl.sum(leaving_features(oldest, at, part, sizes, activate) * feature, 0)
            acc += weight * leaving_value
            total += weight
    return total, acc


@triton.jit
def join_sides(near_sum, near, far_sum, far, gamma, SHARED: tl.constexpr):
    """(γ N + F) / its last column, or γ N / N's last column + (1 - γ) F / F's."""
    if SHARED:
        total = gamma * near_sum + far_sum
        result = gamma * near + far
    else:
        total = sides_there(gamma, near_sum, far_sum)
        result = gamma * near * reciprocal_or_zero(near_sum)
        result += (1 - gamma) * far * reciprocal_or_zero(far_sum)
    return result * reciprocal_or_zero(total)


@triton.jit(do_not_specialize=["cached", "window"])
def step(
    q,
    k,
    v,
    fq,
    fk,
    mix,
    log_scale,
    W_q,
    W_k,
    cached_keys,
    cached_values,
    cached_features,
    memory,
    cached_age,
    o,
    next_keys,
    next_values,
    next_features,
    next_memory,
    next_age,
    scale,
    softcap,
    cached,
    window,
    sizes: tl.constexpr,
    SHARED: tl.constexpr,
    FORGOTTEN: tl.constexpr,
    activate: tl.constexpr,
):
    """A block of columns of one key head: of the caches, of the memory, and of the outputs of the
    query heads that it serves. Features are given and cached, or made of q and k by W.
    """
    head, block = tl.program_id(0), tl.program_id(1)
    b, g = head // sizes.GROUPS, head % sizes.GROUPS
    keys, values = tl.arange(0, sizes.BK), block * sizes.BV + tl.arange(0, sizes.BV)
    at, limits = (head, b, g, cached), (window, scale, softcap)

    # the cache grows until the window is full; then its oldest token goes into the memory
    gone = tl.where(cached + 1 >= window, 1, 0)
    ages = cached_age + tl.cast(b, tl.int64) * cached
    next_ages = next_age + tl.cast(b, tl.int64) * (cached + 1 - gone)
    for row in range(0, cached + 1, sizes.C):
        rows = row + tl.arange(0, sizes.C)
        follow(cached_keys, k, next_keys, head, b, g, cached, gone, rows, values, sizes.K)
        follow(cached_values, v, next_values, head, b, g, cached, gone, rows, values, sizes.V)
        if W_k is None:
            follow(
                cached_features, fk, next_features, head, b, g, cached, gone, rows, values, sizes.F
            )
        if (block == 0) & (g == 0):
            age_by_one(ages, next_ages, cached, gone, rows, FORGOTTEN)

    # S' = S + φ(k)ᵀ (v ‖ 1) of the oldest token, if it leaves the window
    leaving_value = load_oldest(cached_values, v, head, b, g, cached, values, sizes.V)
    oldest = (cached_keys, cached_features, k, fk, W_k, leaves_window(ages, cached, window))
    for part in range(sizes.PARTS):
        places = part_columns(part, sizes)
        leaving = leaving_features(oldest, at, part, sizes, activate)
        S, z = load_memory(memory, head, places, sizes, values)
        S += leaving[:, None] * leaving_value[None, :]
        store_memory(next_memory, head, places, sizes, values, block, S, z + leaving)

    inside = tl.where(values < sizes.V, values, sizes.V + 1)
    near_keys, near_values = (cached_keys, k, keys), (cached_values, v, values)
    past, read = (memory, inside), (oldest, leaving_value, window == 0)
    for h in range(g * (sizes.HEADS // sizes.GROUPS), (g + 1) * (sizes.HEADS // sizes.GROUPS)):
        asked = (q, log_scale, h)
        near_sum, near = attend_cache(asked, near_keys, near_values, ages, at, limits, sizes)  # N
        far_sum, far = read_memory((fq, W_q, h), past, read, at, sizes, activate)  # F
        result = join_sides(near_sum, near, far_sum, far, load_number(mix, b, h), SHARED)
        tl.store(
            rows_of(o, b, h) + values, result.to(o.data.dtype.element_ty), mask=values < sizes.V
        )
