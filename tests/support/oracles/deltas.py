"""The delta rules of 2025 and 2026 as their papers write them: NumPy, float64; nothing here uses
the library.
"""

from __future__ import annotations

import numpy as np

from oracles import rules
from oracles.layers import (
    Parameters,
    join,
    linear,
    rms_norm,
    short,
    sigmoid,
    silu,
    softplus,
    split,
    unit,
)
from oracles.rules import Array


def decay(logits: Array, p: Parameters, name: str = "decay") -> Array:
    """α = exp(-a softplus(x + b)), a of the head ``[b t h ·]``."""
    heads = len(p[f"{name}.log_a"])
    a = np.exp(p[f"{name}.log_a"])[:, None]
    return np.exp(-a * split(softplus(logits + p[f"{name}.bias"]), heads))


def gated_deltaproduct(
    x: Array,
    p: Parameters,
    heads: int = 4,
    steps: int = 2,
    negative: bool = True,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    """2502.10297: H_i = α_i H_{i-1} A(x_i) + …, A(x_i) = ∏_j (I - β_ij k_ij k_ijᵀ), in our order of
    the state's axes.
    """
    q = unit(split(short(x, p, "q"), heads), floor)
    beta = (2 if negative else 1) * sigmoid(linear(x, p, "W_beta"))
    k, v, beta = (
        s.reshape(*x.shape[:2], steps, heads, -1)
        for s in (short(x, p, "k"), short(x, p, "v"), beta)
    )
    alpha = decay(linear(x, p, "W_alpha"), p)[..., 0]
    o = products(q / np.sqrt(q.shape[3]), unit(k, floor), v, beta[..., 0], alpha)
    return linear(join(rms_norm(o, p["norm.weight"], eps)) * silu(linear(x, p, "W_g")), p, "W_o")


def products(q: Array, k: Array, v: Array, beta: Array, alpha: Array) -> Array:
    """Of ``q [b t h k]``, ``k, v [b t n h ·]``, ``beta [b t n h]`` and ``alpha [b t h]``."""
    o = np.zeros((*q.shape[:3], v.shape[4]))
    for b, h in np.ndindex(len(q), q.shape[2]):
        S = np.zeros((q.shape[3], v.shape[4]))
        for t in range(q.shape[1]):
            S = alpha[b, t, h] * S
            for j in range(k.shape[2]):
                key, rate = k[b, t, j, h], beta[b, t, j, h]
                S = (np.eye(len(key)) - rate * np.outer(key, key)) @ S
                S = S + rate * np.outer(key, v[b, t, j, h])
            o[b, t, h] = q[b, t, h] @ S
    return o


def gdn2(
    x: Array,
    p: Parameters,
    heads: int = 4,
    negative: bool = False,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    """2605.22791: S = (I - k (b ⊙ k)ᵀ) Diag(α) S + k (w ⊙ v)ᵀ."""
    q, k = (unit(split(short(x, p, name), heads), floor) for name in "qk")
    v, write = split(short(x, p, "v"), heads), split(sigmoid(linear(x, p, "W_w")), heads)
    erase = (2 if negative else 1) * split(sigmoid(linear(x, p, "W_b")), heads)
    alpha = decay(linear(linear(x, p, "W_alpha.0"), p, "W_alpha.1"), p)
    o, keys = np.zeros_like(v), q.shape[3]
    for b, h in np.ndindex(x.shape[0], heads):
        S = np.zeros((keys, v.shape[3]))
        for t in range(x.shape[1]):
            at = (b, t, h)
            removed = np.eye(keys) - np.outer(k[at], erase[at] * k[at])
            S = removed @ np.diag(alpha[at]) @ S + np.outer(k[at], write[at] * v[at])
            o[at] = q[at] @ S / np.sqrt(keys)
    gate = sigmoid(linear(linear(x, p, "W_g.0"), p, "W_g.1"))
    return linear(join(rms_norm(o, p["norm.weight"], eps)) * gate, p, "W_o")


def comba(
    x: Array,
    p: Parameters,
    heads: int = 4,
    renormalized: bool = False,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    """2506.02475: S = α S + β k (v - p α S), p = σ(δ) k, read by q - D p."""
    q, k, v = (split(short(x, p, name), heads) for name in "qkv")
    feedback, D = sigmoid(p["delta"])[:, None], p["D"][:, None]
    if renormalized:
        back = unit(feedback * k, floor)
        q, k = unit(q - D * feedback * k, floor), unit(k, floor)
    else:
        q, k = unit(q, floor), unit(k, floor)
        back = feedback * k
        q = q - D * back
    beta, alpha = sigmoid(linear(x, p, "W_beta")), decay(linear(x, p, "W_alpha"), p)[..., 0]
    o, keys = np.zeros_like(v), q.shape[3]
    for b, h in np.ndindex(x.shape[0], heads):
        S = np.zeros((keys, v.shape[3]))
        for t in range(x.shape[1]):
            at = (b, t, h)
            S = alpha[at] * S
            S = S + beta[at] * np.outer(k[at], v[at] - back[at] @ S)
            o[at] = q[at] @ S / np.sqrt(keys)
    gate = sigmoid(linear(x, p, "W_g"))
    return linear(join(rms_norm(o, p["norm.weight"], eps)) * gate, p, "W_o")


def preconditioned(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    rate: Array,
    log_fade: Array,
    center: Array,
    log_decay: Array | None = None,
    spread: float = 1.5,
    state: tuple[Array, Array] | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """2604.21100: A = γ A + ρ k², M = X^(-s), s = r / (1 + |r|), r = ln(A + 10⁻⁶) - c;
    S = Diag(α) S + β (k ⊙ M) (v - kᵀ Diag(α) S)ᵀ.
    """
    given = q, k, v, rules.decay_of(log_decay, q.shape[3]), beta, rate, np.exp(log_fade), center
    (n, t, heads), (q, k, v, alpha, beta, rate, fade, center) = rules.spread(*given)
    A = np.zeros((n, heads, k.shape[3])) if state is None else state[0][:, :, 0].copy()
    S = np.zeros((n, heads, k.shape[3], v.shape[3])) if state is None else state[1].copy()
    o = np.zeros((n, t, heads, v.shape[3]))
    for b, i, h in np.ndindex(n, t, heads):
        at = (b, i, h)
        A[b, h] = fade[at] * A[b, h] + rate[at] * k[at] ** 2
        r = np.log(A[b, h] + 1e-6) - center[at]
        M = spread ** (-r / (1 + abs(r)))
        decayed = alpha[at][:, None] * S[b, h]
        S[b, h] = decayed + beta[at] * np.outer(k[at] * M, v[at] - k[at] @ decayed)
        o[at] = q[at] @ S[b, h]
    return o, (A[:, :, None], S)


def pgdn(
    x: Array,
    p: Parameters,
    heads: int = 4,
    negative: bool = False,
    spread: float = 1.5,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    alpha = decay(linear(x, p, "W_alpha"), p)
    o = _preconditioned_layer(x, p, heads, alpha, negative, spread, floor)
    return linear(join(rms_norm(o, p["norm.weight"], eps)) * silu(linear(x, p, "W_g")), p, "W_o")


def pkda(
    x: Array,
    p: Parameters,
    heads: int = 4,
    negative: bool = False,
    spread: float = 1.5,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    alpha = decay(linear(linear(x, p, "W_alpha.0"), p, "W_alpha.1"), p)
    o = _preconditioned_layer(x, p, heads, alpha, negative, spread, floor)
    gate = sigmoid(linear(linear(x, p, "W_g.0"), p, "W_g.1"))
    return linear(join(rms_norm(o, p["norm.weight"], eps)) * gate, p, "W_o")


def _preconditioned_layer(
    x: Array, p: Parameters, heads: int, alpha: Array, negative: bool, spread: float, floor: float
) -> Array:
    q, k = (unit(split(short(x, p, name), heads), floor) for name in "qk")
    beta = (2 if negative else 1) * sigmoid(linear(x, p, "W_beta"))
    rate, fade = sigmoid(linear(x, p, "W_rho")), decay(linear(x, p, "W_gamma"), p, "fade")
    v, scale = split(short(x, p, "v"), heads), 1 / np.sqrt(q.shape[3])
    writes = beta[..., None], rate[..., None], np.log(fade), p["center"][None, None, :, None]
    return preconditioned(q * scale, k, v, *writes, np.log(alpha), spread)[0]


def mom(
    x: Array,
    p: Parameters,
    heads: int = 4,
    memories: int = 4,
    active: int = 2,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    """2502.13685 over gated DeltaNet: every memory is a layer of its own on the tokens that the
    router gives it, in their order; the shared one is given all.
    """
    logits = linear(x, p, "W_r")
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    keys = p["W_q.weight"].shape[0]
    values = p["W_o.weight"].shape[1]
    mixed = np.zeros((*x.shape[:2], heads, values // heads))
    for b, m in np.ndindex(x.shape[0], memories + 1):
        share = {}
        for t in range(x.shape[1]):
            best = np.argsort(-scores[b, t])[:active]
            if m == memories:
                share[t] = 1.0
            elif m in best:
                share[t] = scores[b, t, m] / scores[b, t, best].sum()
        if not share:
            continue
        own = dict(p)
        for name, width in (("k", keys), ("v", values), ("beta", heads), ("alpha", heads)):
            own[f"W_{name}.weight"] = p[f"W_{name}.weight"][m * width : (m + 1) * width]
        seen = x[b : b + 1, list(share)]
        q, k = (unit(split(short(seen, own, name), heads), floor) for name in "qk")
        v, beta = split(short(seen, own, "v"), heads), sigmoid(linear(seen, own, "W_beta"))
        alpha = decay(linear(seen, own, "W_alpha"), own)
        o, _ = rules.delta(q / np.sqrt(q.shape[3]), k, v, beta[..., None], np.log(alpha))
        for place, (t, weight) in enumerate(share.items()):
            mixed[b, t] += weight * o[0, place]
    o = rms_norm(mixed, p["norm.weight"], eps)
    return linear(join(o) * silu(linear(x, p, "W_g")), p, "W_o")
