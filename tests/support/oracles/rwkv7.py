"""RWKV-7 (2503.14456, section 4): NumPy, float64, from the layer's parameters, head by head and
token by token.
"""

from __future__ import annotations

import numpy as np

from oracles.layers import Parameters, linear, sigmoid
from oracles.rules import Array


def rwkv7(
    x: Array,
    p: Parameters,
    heads: int = 4,
    eps: float = 1e-5,
    floor: float = 0.0,
    first: Array | None = None,
) -> Array:
    """Eq. 3-16: wkv_t = wkv_{t-1} (diag(w_t) - κ̂_tᵀ (a_t ⊙ κ̂_t)) + v_tᵀ k̃_t, a matrix [v, k]; with
    the value residual of the layer whose values are `first`.
    """
    r, w, k, v, a, g = (shifted(x, mu) for mu in p["shift.mu"])
    decay = np.exp(-np.exp(-0.5) * sigmoid(low_rank(w, p, "W_alpha", np.tanh)))
    rate = sigmoid(low_rank(a, p, "W_eta"))
    r, k, values = linear(r, p, "W_r"), linear(k, p, "W_k"), linear(v, p, "W_v")
    if first is not None:
        values = values + (first - values) * sigmoid(low_rank(v, p, "W_nu"))
    removal, key = k * p["kappa"], k * (1 + (rate - 1) * p["kappa_eta"])
    width = x.shape[2] // heads
    o = np.zeros_like(x)
    for i in range(len(x)):
        for h in range(heads):
            of = slice(h * width, (h + 1) * width)
            wkv = np.zeros((width, width))
            for t in range(x.shape[1]):
                at = (i, t, of)
                unit = removal[at] / np.sqrt((removal[at] ** 2).sum() + floor)
                transition = np.diag(decay[at]) - np.outer(unit, rate[at] * unit)
                wkv = wkv @ transition + np.outer(values[at], key[at])
                y = wkv @ r[at]
                y = (y - y.mean()) / np.sqrt(y.var() + width * eps)
                y = y * p["norm.weight"][h] + p["norm.bias"][h]
                o[at] = y + (r[at] * p["rho"][h] * key[at]).sum() * values[at]
    return linear(o * low_rank(g, p, "W_g", sigmoid), p, "W_o")


def channel(x: Array, p: Parameters) -> Array:
    """Eq. 17-18: W_v max(W_k x', 0)² of the shifted x'."""
    return linear(np.maximum(linear(shifted(x, p["shift.mu"][0]), p, "W_k"), 0) ** 2, p, "W_o")


def shifted(x: Array, mu: Array) -> Array:
    before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return x + (before - x) * mu


def low_rank(x: Array, p: Parameters, name: str, between=lambda z: z) -> Array:
    return linear(between(linear(x, p, f"{name}.0")), p, f"{name}.1")
