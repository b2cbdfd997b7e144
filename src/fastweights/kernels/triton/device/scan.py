"""The scan S_t = α_t S_{t-1} + k_t v_t, o_t = Σ_k q_t S_t, element by element.

A channel is a value column of a head. A program follows a block of channels [L] of one sequence
through one segment of time, with [K, L] elements of the state in registers, a block of keys at a
time: it reads a tile of a few tokens, then takes step after step. Streams are `Numbers`, states
``[b · K n]`` of n channels, a tuple of real and imaginary parts.

Where time is cut into segments, `summarize` finds first what each adds to a state and what it
leaves of one; the programs of a segment then fold those before it (in the backward: behind it)
into their start.
"""

import triton
import triton.language as tl

from fastweights.kernels.triton.device.numbers import (
    choose,
    exponential,
    minus,
    one_minus_exp,
    parts_for,
    plus,
    read,
    read_row,
    sum_of,
    times,
    times_conjugate,
    write,
    write_row,
    zeros,
)

OPAQUE = ["every_q", "every_k", "every_a", "rate", "T", "n", "span", "segments"]
"""No code for some numbers of these: of lengths there would be too much, and where the keys of a
constant lie side by side, threads would no longer hold channels side by side.
"""


CONSTANT_GRADIENTS = tl.constexpr(4)
"""Of q, k, log α and its rate; Triton 3.6 does not know how long a tuple is that has None."""


@triton.jit
def channels_of(block, n, V: tl.constexpr, LANES: tl.constexpr):
    """(the channels [1, L] of a block, which of them there are, their heads, their values)"""
    channels = block * LANES + tl.arange(0, LANES)[None, :]
    return channels, channels < n, channels // V, channels % V


@triton.jit
def keys_of(block, K: tl.constexpr, KEYS: tl.constexpr):
    """(the keys [K, 1] of a block, which of them there are)"""
    keys = block * KEYS + tl.arange(0, KEYS)[:, None]
    return keys, keys < K


@triton.jit
def decay_at(g, rate, narrow, constant, at, j: tl.constexpr, there):
    """(log α, α) [K, L] of token t0 + j; 0 and 1 where it is not there.

    `at`: b, t0, the heads and keys of the block, which keys and channels there are.

    `narrow` is the number that all keys of a head share, times their `rate`; `constant` is α of
    every token, whose log nothing needs. What there is none of is (). Where there is neither, the
    keys have decays of their own.
    """
    if len(constant) > 0:
        return (), choose(there, constant, 1.0)
    elif len(narrow) == 0:
        b, t0, heads, keys, wanted, real = at
        log = read(g, b, t0 + j, heads, keys, wanted & real & there)
        return log, exponential(log)
    elif len(rate) == 0:
        return narrow, exponential(narrow)
    else:
        log = times(narrow, rate)  # log α_k = rate_k g
        return log, exponential(log)


@triton.jit
def narrow_at(gs, j: tl.constexpr):
    """The number of step j, or () where there are none."""
    if len(gs) == 0:
        return ()
    else:
        return gs[j]


@triton.jit
def numbers_at(x, constant, at, j: tl.constexpr, there, K: tl.constexpr, T, SHARED: tl.constexpr):
    """q or k at token t0 + j: [K, L], or [K, 1] of ``[b t k]`` that all heads share."""
    b, t0, heads, keys, wanted, real = at
    if len(constant) > 0:
        return constant
    elif SHARED:
        return read_row(x.data, tl.cast(b, tl.int64) * T + t0, j, keys, K, wanted & there)
    else:
        return read(x, b, t0 + j, heads, keys, wanted & real & there)


@triton.jit
def key_at(k, constant, log, at, j: tl.constexpr, there, K: tl.constexpr, T, SHARED: tl.constexpr):
    """k_t, or the tied key 1 - α_t where there is no stream."""
    if k is None and len(constant) == 0:
        return (one_minus_exp(log[0]),)
    else:
        return numbers_at(k, constant, at, j, there, K, T, SHARED)


@triton.jit
def outer(key, value):
    """k v, which a token adds to the state."""
    if len(key) < len(value):
        return times(value, key)
    else:
        return times(key, value)


@triton.jit
def read_constant(x, b, heads, keys, inside):
    """The numbers [K, L] of all tokens, or () where the stream is not constant in time."""
    if x is None:
        return ()
    else:
        return read(x, b, 0, heads, keys, inside)


@triton.jit
def read_rate(rate, b, heads, keys, inside):
    """[K, L], or (); 1 where there is no key, for a reset times 0 would be none."""
    if rate is None:
        return ()
    else:
        return choose(inside, read(rate, b, 0, heads, keys, inside), 1.0)


@triton.jit
def read_tile(x, b, t0, stop, heads, columns, real, STEPS: tl.constexpr):
    """x [1, L] of every token of a tile; zeros from `stop` on."""
    found = ()
    for j in tl.static_range(STEPS):
        found = found + (read(x, b, t0 + j, heads, columns, real & (t0 + j < stop)),)
    return found


@triton.jit
def write_tile(x, b, t0, stop, heads, columns, real, found):
    """x of every token of a tile before `stop`, where there is room for it."""
    if x is not None:
        for j in tl.static_range(len(found)):
            write(x, b, t0 + j, heads, columns, real & (t0 + j < stop), found[j])


@triton.jit
def zero_tile(LANES: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr):
    """Zeros [1, L] for every token of a tile."""
    found = ()
    for _ in tl.static_range(STEPS):
        found = found + (zeros(1, LANES, PARTS),)
    return found


@triton.jit
def load_states(states, index, cell, K: tl.constexpr):
    """[K, L] of the states at this index.

    `cell`: the keys and channels of the block, how many channels there are, which of all are there.
    """
    keys, channels, n, inside = cell
    places = tl.cast(index, tl.int64) * K * n + keys * n + channels
    real = tl.load(states[0] + places, mask=inside, other=0.0)
    if len(states) == 1:
        return (real,)
    else:
        return (real, tl.load(states[1] + places, mask=inside, other=0.0))


@triton.jit
def store_states(states, index, cell, K: tl.constexpr, s):
    """[K, L] to where `load_states` finds them."""
    keys, channels, n, inside = cell
    places = tl.cast(index, tl.int64) * K * n + keys * n + channels
    tl.store(states[0] + places, s[0], mask=inside)
    if len(states) == 2:
        tl.store(states[1] + places, s[1], mask=inside)


@triton.jit
def state_before(
    start, summaries, b, segment, segments, cell, K: tl.constexpr, REVERSE: tl.constexpr
):
    """What a segment starts from: `start` through all segments before it (REVERSE: behind it)."""
    s = load_states(start, b, cell, K)
    if summaries is not None:
        for i in range(segments - 1 - segment if REVERSE else segment):
            index = b * segments + (segments - 1 - i if REVERSE else i)
            kept = load_states(summaries[0], index, cell, K)
            added = load_states(summaries[1], index, cell, K)
            # S ← (Π α) S + what the segment adds, as `summarize` has them
            s = plus(times(kept, s), added)
    return s


@triton.jit
def segment_of(T, n, span, segments, LANES: tl.constexpr):
    """(block of channels, sequence and segment as one index, sequence, segment, its first token,
    the one behind it) of a program.
    """
    blocks = tl.cdiv(n, LANES)
    index = tl.program_id(0) // blocks
    first = index % segments * span
    stop = tl.minimum(first + span, T)
    return tl.program_id(0) % blocks, index, index // segments, index % segments, first, stop


@triton.jit
def open_block(block, rate, b, lanes, K: tl.constexpr, KEYS: tl.constexpr):
    """(the cell of a block of keys, its keys, which there are, the rate). `lanes` as in
    `channels_of`, and the number of channels.
    """
    channels, real, heads, values, n = lanes
    keys, wanted = keys_of(block, K, KEYS)
    inside = wanted & real
    cell = (keys, channels, n, inside)
    return cell, keys, wanted, read_rate(rate, b, heads, keys, inside)


@triton.jit
def start_segment(
    start,
    summaries,
    carry,
    index,
    segments,
    lanes,
    K: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """What a segment starts from; of several blocks of keys that of the last, all in `carry`."""
    channels, real, heads, values, n = lanes
    s = zeros(KEYS, LANES, len(carry))
    for block in range(BLOCKS):
        keys, wanted = keys_of(block, K, KEYS)
        cell = (keys, channels, n, wanted & real)
        b, segment = index // segments, index % segments
        s = state_before(start, summaries, b, segment, segments, cell, K, REVERSE)
        if BLOCKS > 1:
            store_states(carry, index, cell, K, s)
    return s


@triton.jit
def end_segment(carry, index, lanes, s, K: tl.constexpr, KEYS: tl.constexpr, BLOCKS: tl.constexpr):
    """Leave the state of the one block of keys in `carry`, where several are already."""
    channels, real, heads, values, n = lanes
    if BLOCKS == 1:
        keys, wanted = keys_of(0, K, KEYS)
        store_states(carry, index, (keys, channels, n, wanted & real), K, s)


@triton.jit(do_not_specialize=OPAQUE)
def summarize(
    k,
    every_k,
    v,
    g,
    every_a,
    rate,
    summaries,
    T,
    n,
    span,
    segments,
    V: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    SHARED_K: tl.constexpr,
    NARROW: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """(Π α_t, what the segment adds to a state) for every segment of `span` tokens.

    REVERSE: (Π ᾱ_t, what it adds to the gradient of the state before it), for q as k and do as v.
    """
    strip, index, b, segment, first, stop = segment_of(T, n, span, segments, LANES)
    channels, real, heads, values = channels_of(strip, n, V, LANES)
    lanes = (channels, real, heads, values, n)

    for block in range(tl.cdiv(K, KEYS)):
        cell, keys, wanted, factors = open_block(block, rate, b, lanes, K, KEYS)
        constant_k = read_constant(every_k, b, heads, keys, wanted & real)
        constant_a = read_constant(every_a, b, heads, keys, wanted & real)
        s = zeros(KEYS, LANES, len(summaries[0]))
        kept = plus(zeros(KEYS, LANES, len(summaries[0])), (1.0,))
        for i in range(0, stop - first, STEPS):
            t0 = stop - 1 - i if REVERSE else first + i
            at = (b, t0, heads, keys, wanted, real)
            vs, gs = (), ()
            for j in tl.static_range(STEPS):
                t = t0 - j if REVERSE else t0 + j
                present = real & (t >= first) & (t < stop)
                vs = vs + (read(v, b, t, heads, values, present),)
                if NARROW:
                    gs = gs + (read(g, b, t, heads, 0, present),)
            for j in tl.static_range(STEPS):
                t = t0 - j if REVERSE else t0 + j
                there = (t >= first) & (t < stop)
                narrow, step = narrow_at(gs, j), (-j if REVERSE else j)
                log, a = decay_at(g, factors, narrow, constant_a, at, step, there)
                key = key_at(k, constant_k, log, at, step, there, K, T, SHARED_K)
                if REVERSE:
                    # G ← ᾱ_t (G + q̄_t do_t), Π ᾱ
                    s = times_conjugate(plus(s, times_conjugate(vs[j], key)), a)
                    kept = times_conjugate(kept, a)
                else:
                    # S ← α_t S + k_t v_t, Π α
                    s = plus(times(s, a), outer(key, vs[j]))
                    kept = times(kept, a)
        store_states(summaries[0], index, cell, K, kept)
        store_states(summaries[1], index, cell, K, s)


@triton.jit(do_not_specialize=OPAQUE)
def scan_forward(
    q,
    every_q,
    k,
    every_k,
    v,
    g,
    every_a,
    rate,
    start,
    summaries,
    o,
    carry,
    marks,
    T,
    n,
    span,
    segments,
    V: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    SHARED_Q: tl.constexpr,
    SHARED_K: tl.constexpr,
    NARROW: tl.constexpr,
):
    """o ``[b t h v]``, and in `carry` the states behind the segments.

    `marks` [b · tiles] of the states before every STEPS tokens, or None.
    """
    strip, index, b, segment, first, stop = segment_of(T, n, span, segments, LANES)
    channels, real, heads, values = channels_of(strip, n, V, LANES)
    lanes = (channels, real, heads, values, n)
    BLOCKS: tl.constexpr = (K + KEYS - 1) // KEYS
    s = start_segment(
        start, summaries, carry, index, segments, lanes, K, KEYS, BLOCKS, LANES, False
    )

    for t0 in range(first, stop, STEPS):
        vs = read_tile(v, b, t0, stop, heads, values, real, STEPS)
        gs = read_tile(g, b, t0, stop, heads, 0, real, STEPS if NARROW else 0)
        outputs = zero_tile(LANES, len(o.data), STEPS)
        for block in range(BLOCKS):
            cell, keys, wanted, factors = open_block(block, rate, b, lanes, K, KEYS)
            constant_q = read_constant(every_q, b, heads, keys, wanted & real)
            constant_k = read_constant(every_k, b, heads, keys, wanted & real)
            constant_a = read_constant(every_a, b, heads, keys, wanted & real)
            at = (b, t0, heads, keys, wanted, real)
            if BLOCKS > 1:
                s = load_states(carry, index, cell, K)
            if marks is not None:
                store_states(marks, b * tl.cdiv(T, STEPS) + t0 // STEPS, cell, K, s)
            sums = ()
            for j in tl.static_range(STEPS):
                there = t0 + j < stop
                log, a = decay_at(g, factors, narrow_at(gs, j), constant_a, at, j, there)
                key = key_at(k, constant_k, log, at, j, there, K, T, SHARED_K)
                # S_t = α_t S_{t-1} + k_t v_t
                s = plus(times(s, a), outer(key, vs[j]))
                # o_t = Σ_k q_t S_t
                query = numbers_at(q, constant_q, at, j, there, K, T, SHARED_Q)
                sums = sums + (plus(outputs[j], sum_of(times(s, query), 0)),)
            outputs = sums
            if BLOCKS > 1:
                store_states(carry, index, cell, K, s)
        write_tile(o, b, t0, stop, heads, values, real, outputs)
        if BLOCKS > 1:
            tl.debug_barrier()
    end_segment(carry, index, lanes, s, K, KEYS, BLOCKS)


@triton.jit
def walk_tile(
    of_key, of_decay, vs, s, at, stop, K: tl.constexpr, T, STEPS: tl.constexpr, SHARED: tl.constexpr
):
    """(the states before every token of a tile, log α and α of each), from the state s before it.

    `of_key`: k and what of it is constant; `of_decay`: g, its rate and its numbers, and α if that
    is constant.
    """
    k, constant_k = of_key
    g, rate, gs, constant_a = of_decay
    b, t0, heads, keys, wanted, real = at
    befores, logs, decays = (), (), ()
    for j in tl.static_range(STEPS):
        there = t0 + j < stop
        log, a = decay_at(g, rate, narrow_at(gs, j), constant_a, at, j, there)
        key = key_at(k, constant_k, log, at, j, there, K, T, SHARED)
        # S_{t-1} is what d log α_t and dq_t need
        befores, logs, decays = befores + (s,), logs + (log,), decays + (a,)
        s = plus(times(s, a), outer(key, vs[j]))
    return befores, logs, decays


@triton.jit
def sums_for(gradients, KEYS: tl.constexpr, LANES: tl.constexpr):
    """Zeros [K, L] for each of the gradients of what is constant in time, () for None."""
    found = ()
    for i in tl.static_range(CONSTANT_GRADIENTS):
        if gradients[i] is None:
            found = found + ((),)
        else:
            found = found + (zeros(KEYS, LANES, len(gradients[i])),)
    return found


@triton.jit
def sum_up(sums, there, a):
    """`sums` and a [K, L] if the token is there; () if nothing is summed."""
    if len(sums) == 0:
        return ()
    elif len(sums) == 1:
        return plus(sums, choose(there, (a[0],), 0.0))
    else:
        return plus(sums, choose(there, a, 0.0))


@triton.jit
def keep_gradient(
    dx, at, j: tl.constexpr, there, place, K: tl.constexpr, T, SHARED: tl.constexpr, a
):
    """Write the gradient at token t0 + j, of all channels of the block together where heads share
    the stream.

    `at` as in `decay_at`; `place`: the program's strip, how many there are, its channels.
    """
    if dx is not None:
        b, t0, heads, keys, wanted, real = at
        strip, strips, channels = place
        if SHARED:
            row = (tl.cast(b, tl.int64) * strips + strip) * T + t0
            write_row(dx.data, row, j, keys, K, wanted & there, sum_of(parts_for(dx, a), 1))
        else:
            write(dx, b, t0 + j, channels, keys, wanted & real & there, a)


@triton.jit
def add_sums(gradients, sums, index, cell, K: tl.constexpr):
    """Add to the gradients of constant streams in this segment; nothing for ()."""
    for i in tl.static_range(CONSTANT_GRADIENTS):
        if len(sums[i]) > 0:
            before = load_states(gradients[i], index, cell, K)
            store_states(gradients[i], index, cell, K, plus(before, sums[i]))


@triton.jit
def walk_back(
    grad,
    of_query,
    of_key,
    of_decay,
    walked,
    tiles,
    written,
    sums,
    at,
    place,
    stop,
    K: tl.constexpr,
    T,
    STEPS: tl.constexpr,
    SHARED_Q: tl.constexpr,
    SHARED_K: tl.constexpr,
    NARROW: tl.constexpr,
):
    """(G before a tile, its dv and narrow dg with what the block's keys add, `sums`), from G behind
    it: what reaches S_t from behind, token after token back.

    `of_query`, `of_key`, `of_decay` and `walked` are as in `walk_tile`; `tiles`: the stream v, and
    v, do, dv and dg of the tile; `written`: dq, dk and dg; `sums` for what is constant in time.
    """
    q, constant_q = of_query
    k, constant_k = of_key
    g, factors, gs, _ = of_decay
    befores, logs, decays = walked
    v, vs, dos, dvs, dgs = tiles
    dq, dk, dg = written
    q_sums, k_sums, g_sums, rate_sums = sums
    b, t0, heads, keys, wanted, real = at
    back_dvs, back_dgs = (), ()
    for j in tl.static_range(STEPS - 1, -1, -1):
        there = t0 + j < stop
        a, before, value, d_output = decays[j], befores[j], vs[j], dos[j]
        key = key_at(k, constant_k, logs[j], at, j, there, K, T, SHARED_K)
        query = numbers_at(q, constant_q, at, j, there, K, T, SHARED_Q)
        # o_t = Σ_k q_t S_t: dq_t = S̄_t do_t, and dS_t = G_{t+1} + q̄_t do_t
        d_query = times_conjugate(d_output, plus(times(before, a), outer(key, value)))
        keep_gradient(dq, at, j, there, place, K, T, SHARED_Q, d_query)
        q_sums = sum_up(q_sums, there, d_query)
        d_state = plus(grad, times_conjugate(d_output, query))
        # S_t = α_t S_{t-1} + k_t v_t: dk_t = v̄_t dS_t, dv_t = Σ_k k̄_t dS_t
        d_key = times_conjugate(d_state, value)
        keep_gradient(dk, at, j, there, place, K, T, SHARED_K, d_key)
        k_sums = sum_up(k_sums, there, d_key)
        d_value = sum_of(parts_for(v, times_conjugate(d_state, key)), 0)
        back_dvs = (plus(dvs[j], d_value),) + back_dvs
        # G_t = ᾱ_t dS_t, and d log α_t = S̄_{t-1} G_t
        grad = times_conjugate(d_state, a)
        d_log = times_conjugate(grad, before)
        if k is None and len(constant_k) == 0:
            # dk / d log α = -α
            d_log = minus(d_log, times(d_key, a))
        if NARROW:
            # log α_k = rate_k g: dg = Σ_k rate_k d log α_k
            scaled = d_log if len(factors) == 0 else times(d_log, factors)
            back_dgs = (plus(dgs[j], sum_of(parts_for(g, scaled), 0)),) + back_dgs
        else:
            keep_gradient(dg, at, j, there, place, K, T, False, d_log)
            g_sums = sum_up(g_sums, there, d_log)
        if len(rate_sums) > 0:
            # drate_k = Σ_t g_t d log α_tk
            # a reset has no gradient: 0 for its −inf
            finite = choose(gs[j][0] > float("-inf"), gs[j], 0.0)
            rate_sums = plus(rate_sums, times(d_log, finite))
    return grad, back_dvs, back_dgs, (q_sums, k_sums, g_sums, rate_sums)


@triton.jit(do_not_specialize=OPAQUE)
def scan_backward(
    q,
    every_q,
    k,
    every_k,
    v,
    g,
    every_a,
    rate,
    do,
    end,
    summaries,
    marks,
    carry,
    dq,
    every_dq,
    dk,
    every_dk,
    dv,
    dg,
    every_dg,
    drate,
    T,
    n,
    span,
    segments,
    V: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    SHARED_Q: tl.constexpr,
    SHARED_K: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Gradients of the streams, and in `carry` of the states before the segments.

    dv ``[b t n 1]``; dq, dk and dg ``[b t n k]``, or ``[b blocks t k]`` where heads share the
    stream; of what is constant in time, drate too, ``[b · segments]`` states, zeros before.
    """
    strip, index, b, segment, first, stop = segment_of(T, n, span, segments, LANES)
    channels, real, heads, values = channels_of(strip, n, V, LANES)
    lanes, place = (channels, real, heads, values, n), (strip, tl.cdiv(n, LANES), channels)
    constant_gradients = (every_dq, every_dk, every_dg, drate)
    BLOCKS: tl.constexpr = (K + KEYS - 1) // KEYS
    grad = start_segment(
        end, summaries, carry, index, segments, lanes, K, KEYS, BLOCKS, LANES, True
    )

    for i in range(tl.cdiv(stop - first, STEPS)):
        t0 = (tl.cdiv(stop, STEPS) - 1 - i) * STEPS
        vs = read_tile(v, b, t0, stop, heads, values, real, STEPS)
        dos = read_tile(do, b, t0, stop, heads, values, real, STEPS)
        gs = read_tile(g, b, t0, stop, heads, 0, real, STEPS if NARROW else 0)
        dvs = zero_tile(LANES, len(v.data), STEPS)
        dgs = zero_tile(LANES, len(g.data) if NARROW else 1, STEPS if NARROW else 0)
        for block in range(BLOCKS):
            cell, keys, wanted, factors = open_block(block, rate, b, lanes, K, KEYS)
            constant_q = read_constant(every_q, b, heads, keys, wanted & real)
            constant_k = read_constant(every_k, b, heads, keys, wanted & real)
            constant_a = read_constant(every_a, b, heads, keys, wanted & real)
            at = (b, t0, heads, keys, wanted, real)
            s = load_states(marks, b * tl.cdiv(T, STEPS) + t0 // STEPS, cell, K)
            of_key, of_decay = (k, constant_k), (g, factors, gs, constant_a)
            walked = walk_tile(of_key, of_decay, vs, s, at, stop, K, T, STEPS, SHARED_K)
            if BLOCKS > 1:
                grad = load_states(carry, index, cell, K)  # G behind the tile
            sums = sums_for(constant_gradients, KEYS, LANES)
            grad, dvs, dgs, sums = walk_back(
                *(grad, (q, constant_q), of_key, of_decay, walked, (v, vs, dos, dvs, dgs)),
                *((dq, dk, dg), sums, at, place, stop, K, T, STEPS, SHARED_Q, SHARED_K, NARROW),
            )
            if BLOCKS > 1:
                store_states(carry, index, cell, K, grad)  # G before it
            add_sums(constant_gradients, sums, index, cell, K)
        write_tile(dv, b, t0, stop, channels, 0, real, dvs)
        if NARROW:
            write_tile(dg, b, t0, stop, channels, 0, real, dgs)
        tl.debug_barrier()
    end_segment(carry, index, lanes, grad, K, KEYS, BLOCKS)
