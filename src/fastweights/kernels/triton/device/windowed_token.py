"""One token of `WindowedLinear`: its outputs, and the cache and memory behind it."""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.tiles import load_matrix, rows_of, store_matrix
from fastweights.kernels.triton.device.windowed import (
    part_columns,
    reciprocal_or_zero,
    scores_of,
)


@triton.jit
def load_token(stream, b, h, columns, width: tl.constexpr):
    """[D] of the one token of a stream."""
    return tl.load(rows_of(stream, b, h) + columns, mask=columns < width, other=0.0)


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
def map_vector(
    x,
    W,
    head,
    part,
    K: tl.constexpr,
    PART: tl.constexpr,
    BK: tl.constexpr,
    BF: tl.constexpr,
    activate: tl.constexpr,
):
    """A part of φ of x [BK]: [BF]."""
    map = load_matrix(W, head, tl.arange(0, BF), PART, tl.arange(0, BK), K).to(tl.float32)
    products = tl.sum(map * x[None, :], 1) * (1 - 2 * part)
    return activate(products, tl.arange(0, BF) < PART, 0)


@triton.jit(do_not_specialize=["cached", "window"])
def step(
    q,
    k,
    v,
    fq,
    fk,
    mix,
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
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    FORGOTTEN: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BF: tl.constexpr,
    activate: tl.constexpr,
):
    """A block of columns of one key head: of the caches, of the memory, and of the outputs of the
    query heads that it serves. Features are given and cached, or made of q and k by W.
    """
    head, block = tl.program_id(0), tl.program_id(1)
    b, g = head // GROUPS, head % GROUPS
    keys, values = tl.arange(0, BK), block * BV + tl.arange(0, BV)
    tokens = tl.arange(0, N)
    ones = V + tl.zeros([1], tl.int32)

    # the cache grows until the window is full; then its oldest token goes into the memory
    gone = tl.where(cached + 1 >= window, 1, 0)
    ages = cached_age + tl.cast(b, tl.int64) * cached
    for row in range(0, cached + 1, N):
        rows = row + tokens
        follow(cached_keys, k, next_keys, head, b, g, cached, gone, rows, values, K)
        follow(cached_values, v, next_values, head, b, g, cached, gone, rows, values, V)
        if W_k is None:
            follow(cached_features, fk, next_features, head, b, g, cached, gone, rows, values, F)
        if (block == 0) & (g == 0):
            age = tl.load(ages + rows, mask=rows < cached, other=0)
            places = next_age + tl.cast(b, tl.int64) * (cached + 1 - gone) + rows - gone
            age = tl.where(age < FORGOTTEN, age + 1, age)
            tl.store(places, age, mask=(rows >= gone) & (rows <= cached))

    # S' = S + φ(k)ᵀ (v ‖ 1) of the oldest token, if it leaves the window
    oldest = tl.load(ages + tl.zeros([1], tl.int32), mask=cached > 0, other=0)
    leaves = oldest == tl.maximum(window - 1, 0)
    leaving_value = load_oldest(cached_values, v, head, b, g, cached, values, V)
    columns = tl.where(values < V, values, V + 1)
    for part in range(PARTS):
        places = part_columns(part, F, PART, BF)
        if W_k is None:
            leaving = load_oldest(cached_features, fk, head, b, g, cached, places, F)
        else:
            key = load_oldest(cached_keys, k, head, b, g, cached, keys, K)
            leaving = map_vector(key, W_k, g, part, K, PART, BK, BF, activate)
        leaving = tl.where(leaves, leaving, 0.0)
        S = load_matrix(memory, head, places, F, columns, V + 1)
        S += leaving[:, None] * leaving_value[None, :]
        store_matrix(next_memory, head, places, F, columns, V + 1, S)
        if block == 0:
            z = load_matrix(memory, head, places, F, ones, V + 1) + leaving[:, None]
            store_matrix(next_memory, head, places, F, ones, V + 1, z)

    for h in range(g * (HEADS // GROUPS), (g + 1) * (HEADS // GROUPS)):
        # N = Σ e^(s - c) (v ‖ 1) over the window
        query = load_token(q, b, h, keys, K).to(tl.float32)
        top = tl.full([1], float("-inf"), tl.float32)
        near_sum = tl.zeros([1], tl.float32)
        near = tl.zeros([BV], tl.float32)
        for row in range(0, cached + 1, N):
            rows = row + tokens
            tile = load_tokens(cached_keys, k, head, b, g, cached, rows, keys, K)
            scores = scores_of(tl.sum(tile * query[None, :], 1), scale, softcap)
            age = tl.load(ages + rows, mask=rows < cached, other=0)
            seen = (rows <= cached) & (age < window)
            scores = tl.where(seen, scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 0))
            anchor = tl.where(highest == float("-inf"), 0.0, highest)
            weights, fade = tl.exp2(scores - anchor), tl.exp2(top - anchor)
            near_sum = near_sum * fade + tl.sum(weights, 0)
            tile = load_tokens(cached_values, v, head, b, g, cached, rows, values, V)
            near = near * fade + tl.sum(tile * weights[:, None], 0)
            top = highest

        # F = φ(q) S, without a window φ(q) S'
        far_sum = tl.zeros([1], tl.float32)
        far = tl.zeros([BV], tl.float32)
        for part in range(PARTS):
            places = part_columns(part, F, PART, BF)
            if W_q is None:
                feature = load_token(fq, b, h, places, F).to(tl.float32)
            else:
                source = load_token(fq, b, h, keys, K).to(tl.float32)
                feature = map_vector(source, W_q, h, part, K, PART, BK, BF, activate)
            S = load_matrix(memory, head, places, F, columns, V + 1)
            z = load_matrix(memory, head, places, F, ones, V + 1)
            far += tl.sum(S * feature[:, None], 0)
            far_sum += tl.sum(z * feature[:, None], 0)
            if window == 0:
                if W_k is None:
                    leaving = load_oldest(cached_features, fk, head, b, g, cached, places, F)
                else:
                    key = load_oldest(cached_keys, k, head, b, g, cached, keys, K)
                    leaving = map_vector(key, W_k, g, part, K, PART, BK, BF, activate)
                weight = tl.where(leaves, tl.sum(leaving * feature, 0), 0.0)
                far += weight * leaving_value
                far_sum += weight

        # o = (γ N + F) / its last column, or γ N / N's last column + (1 - γ) F / F's
        gamma = load_token(mix, b, h, tl.zeros([1], tl.int32), 1).to(tl.float32)
        if SHARED:
            total = gamma * near_sum + far_sum
            result = gamma * near + far
        else:
            total = tl.where(near_sum == 0, 0.0, gamma) + tl.where(far_sum == 0, 0.0, 1 - gamma)
            result = gamma * near * reciprocal_or_zero(near_sum)
            result += (1 - gamma) * far * reciprocal_or_zero(far_sum)
        result *= reciprocal_or_zero(total)
        tl.store(rows_of(o, b, h) + values, result.to(o.data.dtype.element_ty), mask=values < V)
