"""Memories of slots as their papers write them: NumPy, float64, token by token; nothing here uses
the library.
"""

from __future__ import annotations

import numpy as np

from oracles.layers import Parameters, join, linear, rms_norm, sigmoid, silu, softplus, split
from oracles.rules import Array, decay_of, spread


def slots(
    q: Array,
    k: Array,
    v: Array,
    write: Array,
    log_decay: Array | None = None,
    state: tuple[Array, Array] | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """K̃_t = Diag(α_t) K̃_{t-1} + s_t ⊗ k_t, Ṽ_t likewise; o_t = Ṽ_tᵀ softmax(K̃_t q_t)."""
    alpha = decay_of(log_decay, write.shape[3])
    (b, t, h), (q, k, v, write, alpha) = spread(q, k, v, write, alpha)
    m = write.shape[3]
    K, V = (
        (np.zeros((b, h, m, q.shape[3])), np.zeros((b, h, m, v.shape[3])))
        if state is None
        else (s.copy() for s in state)
    )
    o = np.zeros((b, t, h, v.shape[3]))
    for i, j, head in np.ndindex(b, t, h):
        at, here = (i, j, head), (i, head)
        K[here] = np.diag(alpha[at]) @ K[here] + np.outer(write[at], k[at])
        V[here] = np.diag(alpha[at]) @ V[here] + np.outer(write[at], v[at])
        scores = np.exp(K[here] @ q[at] - (K[here] @ q[at]).max())
        o[at] = V[here].T @ (scores / scores.sum())
    return o, (K, V)


def abc(q: Array, k: Array, v: Array, logits: Array) -> Array:
    """ABC (2110.02488): K̃_t = Σ_{s≤t} φ_s ⊗ k_s, φ_s = e^(w_s) / Σ_{s≤t} e^(w_s), written out."""
    (b, t, h), (q, k, v, logits) = spread(q, k, v, logits)
    o = np.zeros((b, t, h, v.shape[3]))
    for i, j, head in np.ndindex(b, t, h):
        shares = np.exp(logits[i, : j + 1, head])
        shares = shares / shares.sum(0)
        scores = np.exp(shares.T @ k[i, : j + 1, head] @ q[i, j, head])
        o[i, j, head] = scores / scores.sum() @ (shares.T @ v[i, : j + 1, head])
    return o


def gsa(
    x: Array,
    p: Parameters,
    heads: int = 4,
    kv_heads: int | None = None,
    tau: float = 8.0,
    eps: float = 1e-5,
) -> Array:
    """arXiv 2409.07146, section 3: α = σ(W_α x)^(1/τ), s = 1 - α, o = RMSNorm(Swish(o))."""
    groups = heads if kv_heads is None else kv_heads
    q = split(silu(linear(x, p, "W_q")), heads)
    alpha = sigmoid(split(linear(x, p, "W_alpha"), groups)) ** (1 / tau)
    k, v = (split(silu(linear(x, p, f"W_{name}")), groups) for name in "kv")
    k, v, alpha = (np.repeat(s, heads // groups, 2) for s in (k, v, alpha))
    o, _ = slots(q, k, v, 1 - alpha, np.log(alpha))
    return linear(rms_norm(join(silu(o)), p["norm.weight"], eps), p, "W_o")


def raven(x: Array, p: Parameters, heads: int = 4, active: int = 16, eps: float = 1e-5) -> Array:
    """Raven: α = exp(a_t r_t), r_t the largest scores of the router divided by their sum."""
    q, k, v = (split(silu(linear(x, p, f"W_{name}")), heads) for name in "qkv")
    q, k = rms_norm(q, p["norm_q.weight"], eps), rms_norm(k, p["norm_k.weight"], eps)
    scores = sigmoid(split(linear(x, p, "W_r"), heads))
    routed = np.zeros_like(scores)
    for at in np.ndindex(*scores.shape[:3]):
        largest = np.argsort(-scores[at])[:active]
        routed[at][largest] = scores[at][largest] / scores[at][largest].sum()
    forget = np.exp(p["log_a"]) * softplus(linear(x, p, "W_alpha"))
    log_alpha = -forget[..., None] * routed
    o, _ = slots(q, k, v, 1 - np.exp(log_alpha), log_alpha)
    return linear(rms_norm(join(silu(o)), p["norm.weight"], eps), p, "W_o")
