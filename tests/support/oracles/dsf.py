"""DSF's architectures as literal loops in NumPy, written from the paper's definitions (not from its
matrices).
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _attention(u: Array, q: Array, k: Array, v: Array, weigh) -> Array:
    """y_i = Σ_{j≤i} w_j v_j with the weights ``weigh(q_i, K_{≤i})``."""
    y = np.zeros((*u.shape[:2], v.shape[-1]))
    for b in range(len(u)):
        for i in range(u.shape[1]):
            weights = weigh(q[b, i], k[b, : i + 1])
            for j in range(i + 1):
                y[b, i] += weights[j] * v[b, j]
    return y


def linear_attention(u: Array, W_Q: Array, W_K: Array, W_V: Array) -> Array:
    def phi(x: Array) -> Array:
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + 1

    def weigh(q, keys):
        scores = np.array([phi(q) @ phi(k) for k in keys])
        return scores / scores.sum()

    return _attention(u, u @ W_Q.T, u @ W_K.T, u @ W_V.T, weigh)


def normalized_attention(u: Array, W_Q: Array, W_K: Array, W_V: Array, eta: Array) -> Array:
    def weigh(q, keys):
        return np.array([q @ k for k in keys])

    return _attention(u, u @ W_Q.T, u @ W_K.T, u @ W_V.T, weigh) / eta[..., None]


def softmax_attention(u: Array, W_Q: Array, W_K: Array, W_V: Array) -> Array:
    def weigh(q, keys):
        scores = np.exp(np.array([q @ k for k in keys]))
        return scores / scores.sum()

    return _attention(u, u @ W_Q.T, u @ W_K.T, u @ W_V.T, weigh)


def s6(u: Array, delta: Array, A: Array, W_B: Array, W_C: Array, D: Array) -> Array:
    """h_c ← exp(-Δ_c A_c) h_c + Δ_c u_c (W_B u);  y_c = (W_C u)·h_c + D_c u_c, channel by
    channel.
    """
    y = np.zeros_like(u)
    for b in range(len(u)):
        h = np.zeros_like(A)
        for i in range(u.shape[1]):
            B, C = W_B @ u[b, i], W_C @ u[b, i]
            for c in range(u.shape[2]):
                h[c] = np.exp(-delta[b, i, c] * A[c]) * h[c] + delta[b, i, c] * u[b, i, c] * B
                y[b, i, c] = C @ h[c] + D[c] * u[b, i, c]
    return y


def qlstm(u: Array, W_f: Array, W_i: Array, W_o: Array, W_u: Array) -> Array:
    """c ← f ⊙ c + i ⊙ (W_u u);  y = o ⊙ c."""
    y = np.zeros((*u.shape[:2], len(W_o)))
    for b in range(len(u)):
        c = np.zeros(len(W_u))
        for t in range(u.shape[1]):
            x = u[b, t]
            c = _sigmoid(W_f @ x) * c + _sigmoid(W_i @ x) * (W_u @ x)
            y[b, t] = _sigmoid(W_o @ x) * c
    return y


def rg_lru(u: Array, W_R: Array, W_B: Array, A: Array, c: float = 8.0) -> Array:
    """h ← a ⊙ h + √(1 - a²) ⊙ (g ⊙ u), a = exp(-c softplus(A) r);  y = h."""
    y = np.zeros_like(u)
    for b in range(len(u)):
        h = np.zeros(u.shape[2])
        for t in range(u.shape[1]):
            x = u[b, t]
            a = np.exp(-c * np.log1p(np.exp(A)) * _sigmoid(W_R @ x))
            h = a * h + np.sqrt(1 - a**2) * (_sigmoid(W_B @ x) * x)
            y[b, t] = h
    return y
