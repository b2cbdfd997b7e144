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
    conjugate_times,
    exponential,
    minus,
    one_minus_exp,
    parts_for,
    plus,
    read,
    read_row,
    sum_of,
    times,
    write,
    write_row,
    zeros,
)

OPAQUE = ["every_q", "every_k", "every_a", "rate", "T", "n", "span", "segments"]
"""No code for some numbers of these: of lengths there would be too much, and where the keys of a
constant lie side by side, threads would no longer hold channels side by side.
"""


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
def decay_at(g, rate, narrow, constant, b, t, there, heads, keys, inside):
    """(log α_t, α_t) [K, L]; 0 and 1 where token t is not there.

    `narrow` is the number that all keys of a head share, times their `rate`; `constant` is α of
    every token, whose log nothing needs. What there is none of is (). Where there is neither, the
    keys have decays of their own.
    """
    if len(constant) > 0:
        return (), choose(there, constant, 1.0)
    elif len(narrow) == 0:
        log = read(g, b, t, heads, keys, inside & there)
        return log, exponential(log)
    elif len(rate) == 0:
        return narrow, exponential(narrow)
    else:
        log = times(narrow, rate)
        return log, exponential(log)


@triton.jit
def narrow_at(gs, j: tl.constexpr):
    """The number of step j, or () where there are none."""
    if len(gs) == 0:
        return ()
    else:
        return gs[j]


@triton.jit
def numbers_at(
    x,
    constant,
    b,
    t0,
    j: tl.constexpr,
    there,
    heads,
    keys,
    K: tl.constexpr,
    T,
    wanted,
    real,
    SHARED: tl.constexpr,
):
    """q or k at token t0 + j: [K, L], or [K, 1] of ``[b t k]`` that all heads share."""
    if len(constant) > 0:
        return constant
    elif SHARED:
        return read_row(x.data, tl.cast(b, tl.int64) * T + t0, j, keys, K, wanted & there)
    else:
        return read(x, b, t0 + j, heads, keys, wanted & real & there)


@triton.jit
def key_at(
    k,
    constant,
    log,
    b,
    t0,
    j: tl.constexpr,
    there,
    heads,
    keys,
    K: tl.constexpr,
    T,
    wanted,
    real,
    SHARED: tl.constexpr,
):
    """k_t, or the tied key 1 - α_t where there is no stream."""
    if k is None and len(constant) == 0:
        return (one_minus_exp(log[0]),)
    else:
        return numbers_at(k, constant, b, t0, j, there, heads, keys, K, T, wanted, real, SHARED)


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
def load_states(states, index, keys, K: tl.constexpr, channels, n, inside):
    """[K, L] of the states at this index."""
    places = tl.cast(index, tl.int64) * K * n + keys * n + channels
    real = tl.load(states[0] + places, mask=inside, other=0.0)
    if len(states) == 1:
        return (real,)
    else:
        return (real, tl.load(states[1] + places, mask=inside, other=0.0))


@triton.jit
def store_states(states, index, keys, K: tl.constexpr, channels, n, inside, s):
    """[K, L] to where `load_states` finds them."""
    places = tl.cast(index, tl.int64) * K * n + keys * n + channels
    tl.store(states[0] + places, s[0], mask=inside)
    if len(states) == 2:
        tl.store(states[1] + places, s[1], mask=inside)


@triton.jit
def state_before(
    start,
    summaries,
    b,
    segment,
    segments,
    keys,
    K: tl.constexpr,
    channels,
    n,
    inside,
    REVERSE: tl.constexpr,
):
    """What a segment starts from: `start` through all segments before it (REVERSE: behind it)."""
    s = load_states(start, b, keys, K, channels, n, inside)
    if summaries is not None:
        for i in range(segments - 1 - segment if REVERSE else segment):
            index = b * segments + (segments - 1 - i if REVERSE else i)
            kept = load_states(summaries[0], index, keys, K, channels, n, inside)
            added = load_states(summaries[1], index, keys, K, channels, n, inside)
            s = plus(times(kept, s), added)
    return s


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
    blocks = tl.cdiv(n, LANES)
    index = tl.program_id(0) // blocks
    b, segment = index // segments, index % segments
    channels, real, heads, values = channels_of(tl.program_id(0) % blocks, n, V, LANES)
    first = segment * span
    stop = tl.minimum(first + span, T)

    for block in range(tl.cdiv(K, KEYS)):
        keys, wanted = keys_of(block, K, KEYS)
        inside = wanted & real
        factors = read_rate(rate, b, heads, keys, inside)
        constant_k = read_constant(every_k, b, heads, keys, inside)
        constant_a = read_constant(every_a, b, heads, keys, inside)
        s = zeros(KEYS, LANES, len(summaries[0]))
        kept = plus(zeros(KEYS, LANES, len(summaries[0])), (1.0,))
        for i in range(0, stop - first, STEPS):
            t0 = stop - 1 - i if REVERSE else first + i
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
                log, a = decay_at(
                    g, factors, narrow_at(gs, j), constant_a, b, t, there, heads, keys, inside
                )
                key = key_at(
                    k,
                    constant_k,
                    log,
                    b,
                    t0,
                    -j if REVERSE else j,
                    there,
                    heads,
                    keys,
                    K,
                    T,
                    wanted,
                    real,
                    SHARED_K,
                )
                if REVERSE:
                    s = conjugate_times(a, plus(s, conjugate_times(key, vs[j])))
                    kept = conjugate_times(a, kept)
                else:
                    s = plus(times(a, s), times(key, vs[j]))
                    kept = times(a, kept)
        store_states(summaries[0], index, keys, K, channels, n, inside, kept)
        store_states(summaries[1], index, keys, K, channels, n, inside, s)


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
    blocks = tl.cdiv(n, LANES)
    index = tl.program_id(0) // blocks
    b, segment = index // segments, index % segments
    channels, real, heads, values = channels_of(tl.program_id(0) % blocks, n, V, LANES)
    first = segment * span
    stop = tl.minimum(first + span, T)
    tiles = tl.cdiv(T, STEPS)
    BLOCKS: tl.constexpr = (K + KEYS - 1) // KEYS

    s = zeros(KEYS, LANES, len(carry))
    for block in range(BLOCKS):
        keys, wanted = keys_of(block, K, KEYS)
        inside = wanted & real
        s = state_before(
            start, summaries, b, segment, segments, keys, K, channels, n, inside, False
        )
        if BLOCKS > 1:
            store_states(carry, index, keys, K, channels, n, inside, s)

    for t0 in range(first, stop, STEPS):
        vs, gs, outputs = (), (), ()
        for j in tl.static_range(STEPS):
            present = real & (t0 + j < stop)
            vs = vs + (read(v, b, t0 + j, heads, values, present),)
            if NARROW:
                gs = gs + (read(g, b, t0 + j, heads, 0, present),)
            outputs = outputs + (zeros(1, LANES, len(o.data)),)
        for block in range(BLOCKS):
            keys, wanted = keys_of(block, K, KEYS)
            inside = wanted & real
            factors = read_rate(rate, b, heads, keys, inside)
            constant_q = read_constant(every_q, b, heads, keys, inside)
            constant_k = read_constant(every_k, b, heads, keys, inside)
            constant_a = read_constant(every_a, b, heads, keys, inside)
            if BLOCKS > 1:
                s = load_states(carry, index, keys, K, channels, n, inside)
            if marks is not None:
                store_states(marks, b * tiles + t0 // STEPS, keys, K, channels, n, inside, s)
            sums = ()
            for j in tl.static_range(STEPS):
                t, there = t0 + j, t0 + j < stop
                log, a = decay_at(
                    g, factors, narrow_at(gs, j), constant_a, b, t, there, heads, keys, inside
                )
                key = key_at(
                    k, constant_k, log, b, t0, j, there, heads, keys, K, T, wanted, real, SHARED_K
                )
                # S_t = α_t S_{t-1} + k_t v_t
                s = plus(times(a, s), times(key, vs[j]))
                # o_t = Σ_k q_t S_t
                query = numbers_at(
                    q, constant_q, b, t0, j, there, heads, keys, K, T, wanted, real, SHARED_Q
                )
                sums = sums + (plus(outputs[j], sum_of(times(query, s), 0)),)
            outputs = sums
            if BLOCKS > 1:
                store_states(carry, index, keys, K, channels, n, inside, s)
        for j in tl.static_range(STEPS):
            write(o, b, t0 + j, heads, values, real & (t0 + j < stop), outputs[j])
        if BLOCKS > 1:
            tl.debug_barrier()
    if BLOCKS == 1:
        keys, wanted = keys_of(0, K, KEYS)
        store_states(carry, index, keys, K, channels, n, wanted & real, s)


@triton.jit
def sums_for(dx, KEYS: tl.constexpr, LANES: tl.constexpr):
    """Zeros [K, L] for the gradient of a stream that is constant in time, or ()."""
    if dx is None:
        return ()
    else:
        return zeros(KEYS, LANES, len(dx))


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
    dx,
    b,
    t0,
    j: tl.constexpr,
    there,
    strip,
    strips,
    channels,
    keys,
    K: tl.constexpr,
    T,
    wanted,
    real,
    SHARED: tl.constexpr,
    a,
):
    """Write the gradient at token t0 + j, of all channels of the block together where heads share
    the stream.
    """
    if dx is not None:
        if SHARED:
            row = (tl.cast(b, tl.int64) * strips + strip) * T + t0
            write_row(dx.data, row, j, keys, K, wanted & there, sum_of(parts_for(dx, a), 1))
        else:
            write(dx, b, t0 + j, channels, keys, wanted & real & there, a)


@triton.jit
def add_sums(dx, sums, index, keys, K: tl.constexpr, channels, n, inside):
    """Add to the gradient of a constant stream in this segment; nothing for ()."""
    if len(sums) > 0:
        before = load_states(dx, index, keys, K, channels, n, inside)
        store_states(dx, index, keys, K, channels, n, inside, plus(before, sums))


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
    blocks = tl.cdiv(n, LANES)
    strip = tl.program_id(0) % blocks
    index = tl.program_id(0) // blocks
    b, segment = index // segments, index % segments
    channels, real, heads, values = channels_of(strip, n, V, LANES)
    first = segment * span
    stop = tl.minimum(first + span, T)
    tiles = tl.cdiv(T, STEPS)
    BLOCKS: tl.constexpr = (K + KEYS - 1) // KEYS

    grad = zeros(KEYS, LANES, len(carry))
    for block in range(BLOCKS):
        keys, wanted = keys_of(block, K, KEYS)
        inside = wanted & real
        grad = state_before(
            end, summaries, b, segment, segments, keys, K, channels, n, inside, True
        )
        if BLOCKS > 1:
            store_states(carry, index, keys, K, channels, n, inside, grad)

    for i in range(tl.cdiv(stop - first, STEPS)):
        tile = tl.cdiv(stop, STEPS) - 1 - i
        t0 = tile * STEPS
        vs, gs, dos, dvs, dgs = (), (), (), (), ()
        for j in tl.static_range(STEPS):
            present = real & (t0 + j < stop)
            vs = vs + (read(v, b, t0 + j, heads, values, present),)
            dos = dos + (read(do, b, t0 + j, heads, values, present),)
            dvs = dvs + (zeros(1, LANES, len(v.data)),)
            if NARROW:
                gs = gs + (read(g, b, t0 + j, heads, 0, present),)
                dgs = dgs + (zeros(1, LANES, len(g.data)),)
        for block in range(BLOCKS):
            keys, wanted = keys_of(block, K, KEYS)
            inside = wanted & real
            factors = read_rate(rate, b, heads, keys, inside)
            constant_q = read_constant(every_q, b, heads, keys, inside)
            constant_k = read_constant(every_k, b, heads, keys, inside)
            constant_a = read_constant(every_a, b, heads, keys, inside)
            # the states before every token of the tile
            s = load_states(marks, b * tiles + tile, keys, K, channels, n, inside)
            befores, logs, decays = (), (), ()
            for j in tl.static_range(STEPS):
                t, there = t0 + j, t0 + j < stop
                log, a = decay_at(
                    g, factors, narrow_at(gs, j), constant_a, b, t, there, heads, keys, inside
                )
                key = key_at(
                    k, constant_k, log, b, t0, j, there, heads, keys, K, T, wanted, real, SHARED_K
                )
                befores, logs, decays = befores + (s,), logs + (log,), decays + (a,)
                s = plus(times(a, s), times(key, vs[j]))
            # G_{t+1}, what reaches S_t from behind, token after token back
            if BLOCKS > 1:
                grad = load_states(carry, index, keys, K, channels, n, inside)
            q_sums = sums_for(every_dq, KEYS, LANES)
            k_sums = sums_for(every_dk, KEYS, LANES)
            g_sums = sums_for(every_dg, KEYS, LANES)
            rate_sums = sums_for(drate, KEYS, LANES)
            back_dvs, back_dgs = (), ()
            for j in tl.static_range(STEPS - 1, -1, -1):
                t, there = t0 + j, t0 + j < stop
                a, before, value, d_output = decays[j], befores[j], vs[j], dos[j]
                key = key_at(
                    k,
                    constant_k,
                    logs[j],
                    b,
                    t0,
                    j,
                    there,
                    heads,
                    keys,
                    K,
                    T,
                    wanted,
                    real,
                    SHARED_K,
                )
                query = numbers_at(
                    q, constant_q, b, t0, j, there, heads, keys, K, T, wanted, real, SHARED_Q
                )
                # o_t = Σ_k q_t S_t: dq_t = S̄_t do_t, and dS_t = G_{t+1} + q̄_t do_t
                d_query = conjugate_times(plus(times(a, before), times(key, value)), d_output)
                keep_gradient(
                    dq,
                    b,
                    t0,
                    j,
                    there,
                    strip,
                    blocks,
                    channels,
                    keys,
                    K,
                    T,
                    wanted,
                    real,
                    SHARED_Q,
                    d_query,
                )
                q_sums = sum_up(q_sums, there, d_query)
                d_state = plus(grad, conjugate_times(query, d_output))
                # S_t = α_t S_{t-1} + k_t v_t: dk_t = v̄_t dS_t, dv_t = Σ_k k̄_t dS_t
                d_key = conjugate_times(value, d_state)
                keep_gradient(
                    dk,
                    b,
                    t0,
                    j,
                    there,
                    strip,
                    blocks,
                    channels,
                    keys,
                    K,
                    T,
                    wanted,
                    real,
                    SHARED_K,
                    d_key,
                )
                k_sums = sum_up(k_sums, there, d_key)
                d_value = sum_of(parts_for(v, conjugate_times(key, d_state)), 0)
                back_dvs = (plus(dvs[j], d_value),) + back_dvs
                # G_t = ᾱ_t dS_t, and d log α_t = S̄_{t-1} G_t
                grad = conjugate_times(a, d_state)
                d_log = conjugate_times(before, grad)
                if k is None and every_k is None:
                    # dk / d log α = -α
                    d_log = minus(d_log, times(a, d_key))
                if NARROW:
                    scaled = d_log if rate is None else times(d_log, factors)
                    back_dgs = (plus(dgs[j], sum_of(parts_for(g, scaled), 0)),) + back_dgs
                else:
                    keep_gradient(
                        dg,
                        b,
                        t0,
                        j,
                        there,
                        strip,
                        blocks,
                        channels,
                        keys,
                        K,
                        T,
                        wanted,
                        real,
                        False,
                        d_log,
                    )
                    g_sums = sum_up(g_sums, there, d_log)
                if drate is not None:
                    # a reset has no gradient: 0 for its −inf
                    finite = choose(gs[j][0] > float("-inf"), gs[j], 0.0)
                    rate_sums = plus(rate_sums, times(finite, d_log))
            dvs, dgs = back_dvs, back_dgs
            if BLOCKS > 1:
                store_states(carry, index, keys, K, channels, n, inside, grad)
            add_sums(every_dq, q_sums, index, keys, K, channels, n, inside)
            add_sums(every_dk, k_sums, index, keys, K, channels, n, inside)
            add_sums(every_dg, g_sums, index, keys, K, channels, n, inside)
            add_sums(drate, rate_sums, index, keys, K, channels, n, inside)
        for j in tl.static_range(STEPS):
            t, present = t0 + j, real & (t0 + j < stop)
            if dv is not None:
                write(dv, b, t, channels, 0, present, dvs[j])
            if NARROW and dg is not None:
                write(dg, b, t, channels, 0, present, dgs[j])
        tl.debug_barrier()
    if BLOCKS == 1:
        keys, wanted = keys_of(0, K, KEYS)
        store_states(carry, index, keys, K, channels, n, wanted & real, grad)
