"""Gated KalmaNet as its paper writes it: NumPy, float64, token by token; nothing here uses the
library.
"""

from __future__ import annotations

import numpy as np

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
from oracles.rules import Array, decay_of, spread


def chebyshev(H: Array, ridge: float, b: Array, steps: int) -> Array:
    """2511.21016, Algorithm 1: ω_0 = 2, ξ_0 = 2 b / (L + μ), ω = 4 / (4 - ρ² ω), and the step."""
    least, most = ridge, ridge + np.sqrt((H**2).sum())
    rho, omega = (most - least) / (most + least), 2.0
    before, x = np.zeros_like(b), 2 * b / (most + least)
    for _ in range(steps):
        omega = 4 / (4 - rho**2 * omega)
        residual = H @ x + ridge * x - b
        x, before = x - 2 * omega / (most + least) * residual + (omega - 1) * (x - before), x
    return x


def kalman(
    q: Array,
    k: Array,
    v: Array,
    mix: Array,
    log_decay: Array | None = None,
    ratio: float = 0.02,
    steps: int | None = None,
    state: tuple[Array, Array] | None = None,
) -> tuple[Array, tuple[Array, Array]]:
    """H_t = γ_t H_{t-1} + k_t k_tᵀ, G_t likewise; o_t = (q_t + μ_t ((H_t + a ‖H_t‖ I)⁻¹ q_t -
    q_t)) G_t, solved exactly or in so many steps.
    """
    gamma = decay_of(log_decay, 1)
    (b, t, h), (q, k, v, mix, gamma) = spread(q, k, v, mix, gamma)
    n, width = q.shape[3], v.shape[3]
    H, G = (
        (np.zeros((b, h, n, n)), np.zeros((b, h, n, width)))
        if state is None
        else (s.copy() for s in state)
    )
    o = np.zeros((b, t, h, width))
    for i, j, head in np.ndindex(b, t, h):
        at, here = (i, j, head), (i, head)
        H[here] = gamma[at] * H[here] + np.outer(k[at], k[at])
        G[here] = gamma[at] * G[here] + np.outer(k[at], v[at])
        ridge = ratio * np.sqrt((H[here] ** 2).sum())
        x = (
            np.linalg.solve(H[here] + ridge * np.eye(n), q[at])
            if steps is None
            else chebyshev(H[here], ridge, q[at], steps)
        )
        o[at] = (q[at] + mix[at] * (x - q[at])) @ G[here]
    return o, (H, G)


def kalmanet(
    x: Array,
    p: Parameters,
    heads: int = 4,
    ratio: float = 0.02,
    steps: int = 30,
    eps: float = 1e-6,
    floor: float = 0.0,
) -> Array:
    """The layer, with the paper's number of steps rather than exact solutions."""
    q, k, v = (split(short(x, p, name), heads) for name in "qkv")
    beta, mix = (sigmoid(linear(x, p, f"W_{name}"))[..., None] for name in ("beta", "mu"))
    log_gamma = (-np.exp(p["log_a"]) * softplus(linear(x, p, "W_gamma")))[..., None]
    k, v = beta * unit(k, floor), beta * v
    o, _ = kalman(unit(q, floor), k, v, mix, log_gamma, ratio, steps)
    o = rms_norm(o / np.sqrt(q.shape[3]), p["norm.weight"], eps)
    return linear(join(o) * silu(linear(x, p, "W_g")), p, "W_o")
