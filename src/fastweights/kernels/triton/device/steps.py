"""One token of every rule: the state is read once and written once, where it was if need be."""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.scores import LOG2_E, tied_key
from fastweights.kernels.triton.device.tiles import load_matrix, store_matrix


@triton.jit
def load_heads(stream, b, heads, columns, most, width: tl.constexpr):
    """[H, C] in float32 of the only token of a stream, 0 outside of it; one column serves all where
    the stream is of width 1.
    """
    places = stream.data + tl.cast(b, tl.int64) * stream.batch
    places = places + tl.cast(heads, tl.int64)[:, None] * stream.head
    inside = (heads < most)[:, None] & (columns < width)[None, :]
    return tl.load(places + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def advance(
    o,
    after,
    before,
    q,
    k,
    v,
    log_decay,
    beta,
    skip,
    heads,
    groups,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PER_KEY: tl.constexpr,
    PER_VALUE: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """S' = diag(α) S + kᵀ u and o = q S', for a tile of heads and a block of values.

    u is v, or β (v - k diag(α) S) where there is a β. READS_BEFORE: o = q S. The skip, of width 1
    or VALUES (PER_VALUE), adds skip ⊙ v. α is of width 1 or KEYS (PER_KEY), and k is 1 - α where
    there is none.
    """
    b = tl.program_id(0) // groups
    h = (tl.program_id(0) % groups) * HEADS + tl.arange(0, HEADS)
    keys = tl.arange(0, BLOCK_KEYS)
    values = tl.program_id(1) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    one = tl.arange(0, 1)

    first = (tl.cast(b, tl.int64) * heads + h) * (KEYS * VALUES)
    inside = (h < heads)[:, None, None] & (keys < KEYS)[None, :, None]
    inside = inside & (values < VALUES)[None, None, :]
    places = first[:, None, None] + keys[None, :, None] * VALUES + values[None, None, :]
    state = tl.load(before + places, mask=inside, other=0.0)

    # tiles of heads: S [H, K, V], q and k [H, K, 1], v [H, V]
    query = load_heads(q, b, h, keys, heads, KEYS)[:, :, None]
    value = load_heads(v, b, h, values, heads, VALUES)
    if READS_BEFORE:
        read = tl.sum(query * state, 1)
    # diag(α) S
    if log_decay is not None:
        if PER_KEY:
            g = load_heads(log_decay, b, h, keys, heads, KEYS)
        else:
            g = load_heads(log_decay, b, h, one, heads, 1)
        state = tl.exp2(g * LOG2_E)[:, :, None] * state
    if k is not None:
        key = load_heads(k, b, h, keys, heads, KEYS)[:, :, None]
    else:
        key = tied_key(load_heads(log_decay, b, h, keys, heads, KEYS))[:, :, None]
    # u = v, or β (v - k diag(α) S)
    written = value
    if beta is not None:
        written = load_heads(beta, b, h, one, heads, 1) * (value - tl.sum(key * state, 1))
    state += key * written[:, None, :]
    if not READS_BEFORE:
        read = tl.sum(query * state, 1)
    if skip is not None:
        if PER_VALUE:
            read += load_heads(skip, b, h, values, heads, VALUES) * value
        else:
            read += load_heads(skip, b, h, one, heads, 1) * value
    tl.store(after + places, state, mask=inside)
    row = (tl.cast(b, tl.int64) * heads + h)[:, None] * VALUES + values[None, :]
    seen = (h < heads)[:, None] & (values < VALUES)[None, :]
    tl.store(o + row, read.to(o.dtype.element_ty), mask=seen)


@triton.jit
def ratio(a, b):
    """a / b, and 0 where b is 0."""
    return tl.where(b == 0.0, 0.0, a / tl.where(b == 0.0, 1.0, b))


@triton.jit
def load_head(stream, b, h, columns, width: tl.constexpr):
    """[C] in float32 of the only token of a stream, 0 outside of it."""
    places = stream.data + tl.cast(b, tl.int64) * stream.batch + tl.cast(h, tl.int64) * stream.head
    return tl.load(places + columns, mask=columns < width, other=0.0).to(tl.float32)


@triton.jit
def advance_mesa(
    o,
    gram_after,
    memory_after,
    gram_before,
    memory_before,
    q,
    k,
    v,
    beta,
    ridge,
    log_decay,
    heads,
    steps,
    tolerance,
    rounding,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """H' = γ H + β kᵀk, x = (H' + Λ)⁻¹ q by conjugate gradients from q / diag, G' = γ G + β kᵀv and
    o = x G', of one head.

    At most so many `steps`, until ‖r‖ is at most `tolerance` of the start's or `rounding` of ‖q‖.
    """
    b, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    keys = tl.arange(0, BLOCK_KEYS)
    one = tl.arange(0, 1)
    strength = tl.sum(load_head(beta, b, h, one, 1))
    decay = 1.0
    if log_decay is not None:
        decay = tl.exp2(tl.sum(load_head(log_decay, b, h, one, 1)) * LOG2_E)
    key, diagonal = load_head(k, b, h, keys, KEYS), load_head(ridge, b, h, keys, KEYS)
    query = load_head(q, b, h, keys, KEYS)

    gram = load_matrix(gram_before, tl.program_id(0), keys, KEYS, keys, KEYS)
    # H' = γ H + β kᵀ k
    gram = decay * gram + key[:, None] * (strength * key)[None, :]
    store_matrix(gram_after, tl.program_id(0), keys, KEYS, keys, KEYS, gram)

    # the system of q / scale is solved, and x times scale taken
    scale = tl.max(tl.abs(query), 0)
    right = ratio(query, scale)
    # x = b / diag(H' + Λ), r = b - (H' + Λ) x
    own = tl.sum(tl.where(keys[:, None] == keys[None, :], gram, 0.0), 1) + diagonal
    x = ratio(right, tl.where(keys < KEYS, own, 1.0))
    r = right - (tl.sum(gram * x[None, :], 1) + diagonal * x)
    residual = tl.sum(r * r, 0)
    small = rounding * rounding * tl.sum(right * right, 0)
    enough = tl.maximum(tolerance * tolerance * residual, small)
    p, step = r, 0
    while (step < steps) & (residual > enough):
        # x ← x + ℓ p, r ← r - ℓ (H' + Λ) p with ℓ = ‖r‖² / p·(H' + Λ) p
        product = tl.sum(gram * p[None, :], 1) + diagonal * p
        length = ratio(residual, tl.sum(p * product, 0))
        x += length * p
        r -= length * product
        # p' = r' + ‖r'‖² / ‖r‖² p, conjugate to p
        following = tl.sum(r * r, 0)
        p = r + ratio(following, residual) * p
        residual = following
        step += 1
    x = x * scale

    for start in range(0, VALUES, BLOCK_VALUES):
        values = start + tl.arange(0, BLOCK_VALUES)
        memory = load_matrix(memory_before, tl.program_id(0), keys, KEYS, values, VALUES)
        # G' = γ G + β kᵀ v, and o = x G'
        value = strength * load_head(v, b, h, values, VALUES)
        memory = decay * memory + key[:, None] * value[None, :]
        store_matrix(memory_after, tl.program_id(0), keys, KEYS, values, VALUES, memory)
        read = tl.sum(x[:, None] * memory, 0).to(o.dtype.element_ty)
        place = tl.cast(tl.program_id(0), tl.int64) * VALUES + values
        tl.store(o + place, read, mask=values < VALUES)
