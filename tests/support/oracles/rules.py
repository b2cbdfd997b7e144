"""The papers' equations as literal NumPy loops in float64, one token and one head at a time.

Streams are ``[b t h ·]`` arrays whose b, t and h may be 1; states ``[b h ·]``. Nothing here uses
the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def spread(*streams: Array) -> tuple[tuple[int, int, int], list[Array]]:
    """(b, t, h) and the streams with these lengths spelled out."""
    lengths = np.broadcast_shapes(*(s.shape[:3] for s in streams))
    return lengths, [np.broadcast_to(s, (*lengths, s.shape[3])) for s in streams]


def decay_of(log_decay: Array | None, width: int, sign: Array | None = None) -> Array:
    """α ``[b t h k]``; 1 without decay; negative where `sign` is."""
    alpha = np.ones((1, 1, 1, 1)) if log_decay is None else np.exp(log_decay)
    alpha = alpha if sign is None else alpha * np.where(sign < 0, -1, 1)
    return np.broadcast_to(alpha, (*alpha.shape[:3], width))


def decay(
    q: Array,
    v: Array,
    k: Array | None = None,
    log_decay: Array | None = None,
    skip: Array | None = None,
    state: Array | None = None,
    sign: Array | None = None,
) -> tuple[Array, Array]:
    """S_t = diag(α_t) S_{t-1} + k_tᵀ v_t ;  o_t = q_t S_t + D_t v_t, k = 1 - α if None."""
    alpha = decay_of(log_decay, q.shape[3], sign)
    k = 1 - alpha if k is None else k
    skip = np.zeros((1, 1, 1, 1)) if skip is None else skip
    (b, t, h), (q, k, v, alpha, skip) = spread(q, k, v, alpha, skip)
    dtype = np.result_type(q, k, v, alpha)
    S = np.zeros((b, h, q.shape[3], v.shape[3]), dtype) if state is None else state.astype(dtype)
    o = np.zeros((b, t, h, v.shape[3]), dtype)
    for i, j, head in np.ndindex(b, t, h):
        at = (i, j, head)
        S[i, head] = np.diag(alpha[at]) @ S[i, head] + np.outer(k[at], v[at])
        o[at] = q[at] @ S[i, head] + skip[at] * v[at]
    return o, S


def selective(
    q: Array,
    v: Array,
    k: Array,
    log_decay: Array,
    rate: Array,
    state: Array | None = None,
) -> tuple[Array, Array]:
    """S_t = diag(exp(log_decay_t rate)) S_{t-1} + k_tᵀ v_t ;  o_t = q_t S_t."""
    return decay(q, v, k, log_decay * rate, state=state)


def delta(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    log_decay: Array | None = None,
    state: Array | None = None,
    sign: Array | None = None,
) -> tuple[Array, Array]:
    """S_t = (I - β_t k_tᵀ k_t) diag(α_t) S_{t-1} + β_t k_tᵀ v_t ;  o_t = q_t S_t."""
    alpha = decay_of(log_decay, q.shape[3], sign)
    (b, t, h), (q, k, v, beta, alpha) = spread(q, k, v, beta, alpha)
    S = np.zeros((b, h, q.shape[3], v.shape[3])) if state is None else state.copy()
    o = np.zeros((b, t, h, v.shape[3]))
    for i, j, head in np.ndindex(b, t, h):
        at = (i, j, head)
        erase = np.eye(q.shape[3]) - beta[at] * np.outer(k[at], k[at])
        S[i, head] = erase @ np.diag(alpha[at]) @ S[i, head] + beta[at] * np.outer(k[at], v[at])
        o[at] = q[at] @ S[i, head]
    return o, S


def dplr(
    q: Array,
    w: Array,
    v: Array,
    a: Array,
    b: Array | None = None,
    log_decay: Array | None = None,
    before: bool = False,
    state: Array | None = None,
    sign: Array | None = None,
) -> tuple[Array, Array]:
    """S_t = diag(α_t) S_{t-1} + w_tᵀ v_t - b_tᵀ (a_t X_t), X_t = diag(α_t) S_{t-1}, or S_{t-1} if
    `before`; o_t = q_t S_t; b = w if None.
    """
    alpha = decay_of(log_decay, q.shape[3], sign)
    (n, t, h), (q, w, v, a, b, alpha) = spread(q, w, v, a, w if b is None else b, alpha)
    S = np.zeros((n, h, q.shape[3], v.shape[3])) if state is None else state.copy()
    o = np.zeros((n, t, h, v.shape[3]))
    for i, j, head in np.ndindex(n, t, h):
        at = (i, j, head)
        decayed = np.diag(alpha[at]) @ S[i, head]
        erased = a[at] @ (S[i, head] if before else decayed)
        S[i, head] = decayed + np.outer(w[at], v[at]) - np.outer(b[at], erased)
        o[at] = q[at] @ S[i, head]
    return o, S


def mesa(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    ridge: Array,
    log_decay: Array | None = None,
    state: tuple[Array, Array] | None = None,
    sign: Array | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """H_t = γ_t H_{t-1} + β_t k_tᵀ k_t ;  G_t = γ_t G_{t-1} + β_t k_tᵀ v_t ;  o_t = q_t (H_t + Λ)⁻¹
    G_t.
    """
    gamma = decay_of(log_decay, 1, sign)
    ridge = np.broadcast_to(ridge, np.broadcast_shapes(ridge.shape, (1, 1, 1, q.shape[3])))
    (b, t, h), (q, k, v, beta, gamma, ridge) = spread(q, k, v, beta, gamma, ridge)
    n, width = q.shape[3], v.shape[3]
    H, G = (
        (np.zeros((b, h, n, n)), np.zeros((b, h, n, width)))
        if state is None
        else (s.copy() for s in state)
    )
    o = np.zeros((b, t, h, width))
    for i, j, head in np.ndindex(b, t, h):
        at = (i, j, head)
        H[i, head] = gamma[at] * H[i, head] + beta[at] * np.outer(k[at], k[at])
        G[i, head] = gamma[at] * G[i, head] + beta[at] * np.outer(k[at], v[at])
        o[at] = np.linalg.solve(H[i, head] + np.diag(ridge[at]), q[at]) @ G[i, head]
    return o, (H, G)


def softmax(
    q: Array,
    k: Array,
    v: Array,
    window: int | None = None,
    log_decay: Array | None = None,
    sinks: Array | None = None,
    state: tuple[Array, ...] | None = None,
) -> tuple[Array, None]:
    """o_t = Σ_s softmax_s(q_t·k_s / √d_k) v_s over 0 ≤ t - s < window, after the cached (keys,
    values, ages and sums of log decays). Σ_{j=s+1..t} log f_j is added to scores, and e^sink to
    what weights are divided by.
    """
    f = np.zeros((1, 1, 1, 1)) if log_decay is None else log_decay
    sinks = np.full((1, 1, 1, 1), -np.inf) if sinks is None else sinks
    streams = (q, k, v, f, sinks)
    b, t = np.broadcast_shapes(*(s.shape[:2] for s in streams))
    h = max(s.shape[2] for s in streams)
    f, sinks = (np.broadcast_to(s, (b, t, h, 1)) for s in (f, sinks))
    groups = max(k.shape[2], v.shape[2])
    q = np.broadcast_to(q, (b, t, *q.shape[2:]))
    k, v = (np.broadcast_to(s, (b, t, groups, s.shape[3])) for s in (k, v))
    none = (
        np.zeros((b, groups, 0, k.shape[3])),
        np.zeros((b, groups, 0, v.shape[3])),
        np.zeros((b, 0)),
    )
    keys, values, *decays, age = none if state is None else state
    before = decays[0][..., 0] if decays else np.zeros((b, h, keys.shape[2]))
    o = np.zeros((b, t, h, v.shape[3]))
    for i, j, head in np.ndindex(b, t, h):
        group = head // (h // groups)
        distance = np.concatenate([age[i] + j, j - np.arange(j + 1)])
        sees = distance < (np.inf if window is None else window)
        scores = (
            np.concatenate([keys[i, group], k[i, : j + 1, group]])[sees]
            @ q[i, j, head]
            / np.sqrt(k.shape[3])
        )
        cached = before[i, head] + f[i, : j + 1, head].sum()
        own = [f[i, s + 1 : j + 1, head].sum() for s in range(j + 1)]
        scores = scores + np.concatenate([cached, own])[sees]
        highest = max(scores.max(), sinks[i, j, head, 0])
        weights = np.exp(scores - highest)
        seen = np.concatenate([values[i, group], v[i, : j + 1, group]])[sees]
        total = weights.sum() + np.exp(sinks[i, j, head, 0] - highest)
        o[i, j, head] = weights / total @ seen
    return o, None


def long_convolution(
    q: Array, k: Array, v: Array, filter: Array, state: tuple[Array, ...] | None = None
) -> tuple[Array, None]:
    """o_t = Σ_s h_{t-s} (q_t·k_s) v_s, after the cached (keys, values, ages)."""
    b, t = np.broadcast_shapes(*(s.shape[:2] for s in (q, k, v)))
    h = max(*(s.shape[2] for s in (q, k, v)), len(filter))
    q, k, v = (np.broadcast_to(s, (b, t, h, s.shape[3])) for s in (q, k, v))
    o = np.zeros((b, t, h, v.shape[3]))
    for i, head, j in np.ndindex(b, h, t):
        taps = filter[head % len(filter)]
        for lag in range(min(j + 1, len(taps))):
            score = q[i, j, head] @ k[i, j - lag, head]
            o[i, j, head] += taps[lag] * score * v[i, j - lag, head]
        if state is not None:
            keys, values, age = state
            for s in np.flatnonzero(age[i] + j < len(taps)):
                score = q[i, j, head] @ keys[i, head, s]
                o[i, j, head] += taps[int(age[i, s]) + j] * score * values[i, head, s]
    return o, None


def windowed(
    q: Array,
    k: Array,
    v: Array,
    fq: Array,
    fk: Array,
    mix: Array,
    window: int,
    shared: bool = True,
    softcap: float = np.inf,
    log_scale: Array | None = None,
    state: tuple[Array, Array, Array, Array, Array] | None = None,
) -> tuple[Array, tuple[Array, Array, Array, Array, Array]]:
    """LoLCATs: γ e^(s - max s) over 0 ≤ t - s < window, φ(q)·φ(k) over all before; one normaliser,
    or eq. 8's two. With a log scale a, e^(s - a) instead, s - a between -40 and 40.
    """
    b, t, h = (max(s.shape[axis] for s in (q, k, v, fq, fk, mix)) for axis in range(3))
    groups = max(s.shape[2] for s in (k, v, fk))
    q, fq, mix = (np.broadcast_to(s, (b, t, h, s.shape[3])) for s in (q, fq, mix))
    k, v, fk = (np.broadcast_to(s, (b, t, groups, s.shape[3])) for s in (k, v, fk))
    if state is None:
        past = [np.zeros((b, groups, 0, s.shape[3])) for s in (k, v, fk)]
        memory = np.zeros((b, groups, fk.shape[3], v.shape[3] + 1))
    else:
        *past, memory, _ = state
    length = past[0].shape[2]
    k, v, fk = (
        np.concatenate([old, new.swapaxes(1, 2)], 2)
        for old, new in zip(past, (k, v, fk), strict=True)
    )
    o = np.zeros((b, t, h, v.shape[3]))
    for i, j, head in np.ndindex(b, t, h):
        group, now = head // (h // groups), length + j
        near = range(max(now - window + 1, 0), now + 1)
        scores = [q[i, j, head] @ k[i, group, s] / np.sqrt(k.shape[3]) for s in near]
        scores = (
            scores
            if np.isinf(softcap)
            else [softcap * np.tanh(score / softcap) for score in scores]
        )
        weights = [np.exp(score - max(scores)) for score in scores]
        if log_scale is not None:
            a = np.broadcast_to(log_scale, (b, t, h, 1))[i, j, head, 0]
            weights = [np.exp(np.clip(score - a, -40, 40)) for score in scores]
        exact = sum(
            (a * v[i, group, s] for a, s in zip(weights, near, strict=True)), np.zeros(v.shape[3])
        )
        kernel = fq[i, j, head] @ memory[i, group]
        linear, n = kernel[:-1], kernel[-1]
        for s in range(max(now - window + 1, 0)):
            weight = fq[i, j, head] @ fk[i, group, s]
            linear, n = linear + weight * v[i, group, s], n + weight
        gamma = mix[i, j, head, 0]
        if shared:
            total = gamma * sum(weights) + n
            o[i, j, head] = (gamma * exact + linear) / total if total else 0
        else:
            sides = [(gamma, exact, sum(weights)), (1 - gamma, linear, n)]
            sides = [(share, x / norm) for share, x, norm in sides if norm]
            o[i, j, head] = (
                sum(share * x for share, x in sides) / sum(share for share, _ in sides)
                if sides
                else 0
            )
    memory, last = memory.copy(), max(length + t - max(window - 1, 0), 0)
    for i, group, s in np.ndindex(b, groups, last):
        memory[i, group] += np.outer(fk[i, group, s], np.append(v[i, group, s], 1))
    age = np.arange(length + t - last, 0, -1)
    return o, (k[:, :, last:], v[:, :, last:], fk[:, :, last:], memory, np.tile(age, (b, 1)))


def beside_window(
    rule: Callable[..., tuple[Array, Any]],
    of_rule: dict[str, Array],
    written: Sequence[str],
    q: Array,
    k: Array,
    v: Array,
    mix: Array,
    window: int,
    sinks: int = 0,
    shared: bool = False,
    softcap: float = np.inf,
    state: tuple[Array, ...] | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Softmax to the tokens with 0 ≤ t - s < window and to the first `sinks`, and beside it a rule
    whose token t writes what token t - window asked for.

    `rule` is that of one token, with ``state=``; under one normaliser its values have a last column
    of ones. The state is that of the library, without sinks among the cached tokens.
    """
    of_rule = {n: s if s.ndim == 4 else s[None, None] for n, s in of_rule.items()}
    if shared:
        ones = np.ones((*of_rule["v"].shape[:3], 1))
        of_rule = {**of_rule, "v": np.concatenate([of_rule["v"], ones], -1)}
    streams = (q, mix, *of_rule.values())
    b, t, h = (max(s.shape[axis] for s in streams) for axis in range(3))
    b, t, groups = max(b, k.shape[0]), max(t, k.shape[1]), max(k.shape[2], v.shape[2])
    q, mix = (np.broadcast_to(s, (b, t, h, s.shape[3])) for s in (q, mix))
    k, v = (np.broadcast_to(s, (b, t, groups, s.shape[3])).swapaxes(1, 2) for s in (k, v))
    of_rule = {n: np.broadcast_to(s, (b, t, *s.shape[2:])) for n, s in of_rule.items()}
    writes = {n: of_rule[n] for n in written}
    memory, length, ages = None, 0, np.zeros((b, 0))
    if state is not None:
        keys, values, *others, ages = state
        past, memory = [s.swapaxes(1, 2) for s in others[: len(written)]], others[len(written) :]
        memory, length = memory[0] if len(memory) == 1 else tuple(memory), keys.shape[2]
        k, v = np.concatenate([keys, k], 2), np.concatenate([values, v], 2)
        if shared:
            past[written.index("v")] = np.concatenate(
                [past[written.index("v")], np.ones((*past[0].shape[:3], 1))], -1
            )
        writes = {n: np.concatenate([s, writes[n]], 1) for n, s in zip(written, past, strict=True)}
    sinks_here = sinks if state is None else 0
    o = np.zeros((b, t, h, v.shape[3]))
    for j in range(t):
        now, far = length + j, None
        leaves = now - window
        if leaves >= sinks_here:
            token = {n: s[:, j : j + 1] for n, s in of_rule.items() if n not in written}
            token |= {n: s[:, leaves : leaves + 1] for n, s in writes.items()}
            far, memory = rule(**token, state=memory)
        for i, head in np.ndindex(b, h):
            seen = [s for s in range(now + 1) if now - s < window or s < sinks_here]
            group = head // (h // groups)
            scores = np.array([q[i, j, head] @ k[i, group, s] for s in seen]) / k.shape[3] ** 0.5
            scores = scores if np.isinf(softcap) else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max()) if seen else scores
            near, n = weights @ v[i, group, seen], weights.sum()
            gamma = mix[i, j, head, 0]
            if shared:
                total = 0 if far is None else far[i, 0, head]
                total = gamma * np.append(near, n) + total
                o[i, j, head] = total[:-1] / total[-1] if total[-1] else 0
            else:
                sides = [] if far is None else [(1 - gamma, far[i, 0, head])]
                sides += [(gamma, near / n)] if seen else []
                whole = sum(share for share, _ in sides)
                o[i, j, head] = sum(share * x for share, x in sides) / whole if sides else 0
    if memory is None:
        return o, None
    first = max(length + t - window, sinks_here)
    kept = [*range(sinks_here), *range(first, length + t)]
    cached = [s[:, kept].swapaxes(1, 2) for s in writes.values()]
    if shared:
        cached[written.index("v")] = cached[written.index("v")][..., :-1]
    age = np.tile([length + t - s for s in kept], (b, 1))
    memory = memory if isinstance(memory, tuple) else (memory,)
    return o, (k[:, :, kept], v[:, :, kept], *cached, *memory, age)


def normalized(
    q: Array,
    k: Array,
    v: Array,
    beta: Array | None = None,
    log_decay: Array | None = None,
    skip: Array | None = None,
    floor: Array | float | None = None,
    state: Array | None = None,
) -> tuple[Array, Array]:
    """o_t = q_t S_t / n_t with n_t = q_t z_t or max(|q_t z_t|, floor_t), z written by v = 1; 0
    where n_t = 0.
    """
    memory, z = (None, None) if state is None else (state[..., :-1], state[..., -1:])
    ones = np.ones((*v.shape[:3], 1))
    if beta is None:
        o, memory = decay(q, v, k, log_decay, skip, memory)
        n, z = decay(q, ones, k, log_decay, skip, z)
    else:
        o, memory = delta(q, k, v, beta, log_decay, memory)
        n, z = delta(q, k, ones, beta, log_decay, z)
    n = n if floor is None else np.maximum(np.abs(n), floor)
    o = np.divide(o, n, out=np.zeros_like(o), where=n != 0)
    return o, np.concatenate([memory, z], -1)


def bonus(
    q: Array,
    k: Array,
    v: Array,
    bonus: Array,
    log_decay: Array | None = None,
    state: Array | None = None,
) -> tuple[Array, Array]:
    """o_t = q_t S_{t-1} + bonus_t v_t ;  S_t = diag(α_t) S_{t-1} + k_tᵀ v_t."""
    alpha = decay_of(log_decay, q.shape[3])
    (b, t, h), (q, k, v, alpha, bonus) = spread(q, k, v, alpha, bonus)
    S = np.zeros((b, h, q.shape[3], v.shape[3])) if state is None else state.copy()
    o = np.zeros((b, t, h, v.shape[3]))
    for i, j, head in np.ndindex(b, t, h):
        at = (i, j, head)
        o[at] = q[at] @ S[i, head] + bonus[at] * v[at]
        S[i, head] = np.diag(alpha[at]) @ S[i, head] + np.outer(k[at], v[at])
    return o, S


def mlstm(
    q: Array,
    k: Array,
    v: Array,
    log_gain: Array,
    log_decay: Array | None = None,
    skip: Array | None = None,
    floor: Array | float | None = None,
    state: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """xLSTM eq. 19-21, nothing stabilised: C_t = f_t C_{t-1} + i_t k_tᵀ v_t ;  n_t = f_t n_{t-1} +
    i_t k_t ; h_t = q_t C_t / max(|q_t n_t|, floor), i = e^{log_gain}, f = e^{log_decay}; (C, n) and
    e^m of a state multiplied.
    """
    skip = np.zeros((1, 1, 1, 1)) if skip is None else skip
    floor = (
        np.zeros((1, 1, 1, 1))
        if floor is None
        else np.broadcast_to(floor, np.shape(floor) or (1, 1, 1, 1))
    )
    (b, t, h), (q, k, v, f, i, skip, floor) = spread(
        q, k, v, decay_of(log_decay, 1), np.exp(log_gain), skip, floor
    )
    C, n = np.zeros((b, h, q.shape[3], v.shape[3])), np.zeros((b, h, q.shape[3]))
    if state is not None:
        both = state[0] * np.exp(state[1])[..., None]
        C, n = both[..., :-1], both[..., -1]
    o = np.zeros((b, t, h, v.shape[3]))
    for at in np.ndindex(b, t, h):
        one = (at[0], at[2])
        C[one] = f[at] * C[one] + i[at] * np.outer(k[at], v[at])
        n[one] = f[at] * n[one] + i[at] * k[at]
        read, weight = q[at] @ C[one] + i[at] * skip[at] * v[at], q[at] @ n[one] + i[at] * skip[at]
        weight = np.maximum(np.abs(weight), floor[at]) if floor[at].any() else weight
        o[at] = read / weight if weight.any() else 0
    return o, np.concatenate([C, n[..., None]], -1)


def wkv(
    q: Array,
    k: Array,
    v: Array,
    log_gain: Array,
    bonus: Array,
    log_decay: Array | None = None,
    state: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """RWKV eq. 16 with q and k beside it: Σ_{s<t} e^{-(t-1-s)w + κ_s} (q_t·k_s) v_s + e^{κ_t}
    bonus_t v_t, over the same sum without the v; κ = log_gain, w = -log_decay.
    """
    alpha = decay_of(log_decay, 1)
    (b, t, h), (q, k, v, alpha, gain, bonus) = spread(q, k, v, alpha, np.exp(log_gain), bonus)
    a, c = np.zeros((b, h, q.shape[3], v.shape[3])), np.zeros((b, h, q.shape[3]))
    if state is not None:
        both = state[0] * np.exp(state[1])[..., None]
        a, c = both[..., :-1], both[..., -1]
    o = np.zeros((b, t, h, v.shape[3]))
    for at in np.ndindex(b, t, h):
        one = (at[0], at[2])
        above, below = (
            q[at] @ a[one] + gain[at] * bonus[at] * v[at],
            q[at] @ c[one] + gain[at] * bonus[at],
        )
        o[at] = above / below if below.any() else 0
        a[one] = alpha[at] * a[one] + gain[at] * np.outer(k[at], v[at])
        c[one] = alpha[at] * c[one] + gain[at] * k[at]
    return o, np.concatenate([a, c[..., None]], -1)
