"""Layers of 2024 to 2026 whose state decays, as their papers write them: NumPy, float64, one token
at a time.

A layer maps ``x [b t d]`` and its parameters (name → array) to ``y [b t d]``; nothing here uses the
library.
"""

from __future__ import annotations

import numpy as np

from oracles.layers import (
    Parameters,
    convolution,
    join,
    linear,
    rms_norm,
    sigmoid,
    silu,
    softplus,
    split,
    unit,
)
from oracles.rules import Array


def mamba3(
    x: Array,
    p: Parameters,
    heads: int = 4,
    groups: int = 1,
    partial_rotation: bool = True,
    rank: int = 1,
    eps: float = 1e-5,
) -> Array:
    """2603.15569: h_t = α_t h_{t-1} + β_t Σ_r B_{t-1,r} x_{t-1,r}ᵀ + γ_t Σ_r B_{t,r} x_{t,r}ᵀ, α =
    e^(ΔA), β = (1 - λ) Δ α, γ = λ Δ; y_{t,r} = h_t C_{t,r} + D x_{t,r}, where B and C have been
    turned by the sums of Δθ. SISO has one rank; MIMO's x and z are weighted channel by channel,
    once for every rank, and so are the outputs that are added.
    """
    u = linear(x, p, "W_a")
    A = -np.maximum(np.where(u >= 0, 1 + u, 1 / (1 - np.minimum(u, 0))), 1e-4)
    step, share = softplus(linear(x, p, "W_Delta")), sigmoid(linear(x, p, "W_lambda"))
    theta = np.pi * np.tanh(linear(x, p, "W_theta"))
    v, z = (split(linear(x, p, name), heads) for name in ("W_v", "W_z"))
    served = heads // groups
    B, C = (
        rms_norm(split(linear(x, p, f"W_{name}"), rank * groups), p[f"norm_{name}.weight"], eps)
        for name in "BC"
    )
    up, gates, down = (
        p.get(f"ranks.{name}", np.ones((1, heads, v.shape[3]))) for name in ("x", "z", "o")
    )
    assert len(up) == rank
    y = np.zeros_like(v)
    for b, head in np.ndindex(x.shape[0], heads):
        h, angle = np.zeros((B.shape[3], v.shape[3])), np.zeros(B.shape[3] // 2)
        last = [(np.zeros(B.shape[3]), np.zeros(v.shape[3]))] * rank
        for t in range(x.shape[1]):
            dt = step[b, t, head]
            angle[: theta.shape[2]] += theta[b, t] * dt
            now_B, now_C = (
                [
                    turned_pairs(
                        made[b, t, r * groups + head // served] + p[bias][r * heads + head], angle
                    )
                    for r in range(rank)
                ]
                for made, bias in ((B, "b_B"), (C, "b_C"))
            )
            now = [(now_B[r], up[r, head] * v[b, t, head]) for r in range(rank)]
            alpha, part = np.exp(dt * A[b, t, head]), share[b, t, head]
            h = alpha * h + (1 - part) * dt * alpha * sum(np.outer(*one) for one in last)
            h = h + part * dt * sum(np.outer(*one) for one in now)
            for r in range(rank):
                read = now_C[r] @ h + p["D"][head] * now[r][1]
                y[b, t, head] += down[r, head] * read * silu(gates[r, head] * z[b, t, head])
            last = now
    assert (theta.shape[2] < B.shape[3] // 2) == partial_rotation
    return linear(join(y), p, "W_o")


def turned_pairs(x: Array, angle: Array) -> Array:
    """The pair (2i, 2i + 1) turned by the i-th angle."""
    y = np.zeros_like(x)
    for i in range(len(angle)):
        left, right = x[2 * i], x[2 * i + 1]
        y[2 * i] = left * np.cos(angle[i]) - right * np.sin(angle[i])
        y[2 * i + 1] = left * np.sin(angle[i]) + right * np.cos(angle[i])
    return y


def convolved(u: Array, p: Parameters) -> Array:
    return silu(convolution(u, p["conv.weight"]) + p["conv_bias"])


def longhorn(u: Array, p: Parameters) -> Array:
    """2407.14207: S_i = (1 - Δ_i k ⊙ k) ⊙ S_i + Δ_i k x_i, Δ_i = β_i / (1 + β_i kᵀk)."""
    x = convolved(linear(u, p, "W_u"), p)
    q, k = linear(x, p, "W_q"), linear(x, p, "W_k")
    beta, y = sigmoid(linear(linear(x, p, "W_beta_1"), p, "W_beta_2")), np.zeros_like(x)
    for b, channel in np.ndindex(x.shape[0], x.shape[2]):
        S = np.zeros(k.shape[2])
        for t in range(x.shape[1]):
            step = beta[b, t, channel] / (1 + beta[b, t, channel] * (k[b, t] @ k[b, t]))
            S = (1 - step * k[b, t] ** 2) * S + step * k[b, t] * x[b, t, channel]
            y[b, t, channel] = S @ q[b, t] + p["D"][channel] * x[b, t, channel]
    return linear(y * silu(linear(u, p, "W_z")), p, "W_o")


def rodimus(x: Array, p: Parameters, eps: float = 1e-5) -> Array:
    """2410.06577: S_t = exp(-g τ) S_{t-1} + (g^τ ⊙ k)ᵀ (i ⊙ u), o_t = q_t S_t."""
    u = linear(x, p, "W_u")
    h = convolved(u, p)
    g, tau = softplus(linear(h, p, "W_g")), sigmoid(linear(h, p, "W_tau"))
    q, k = linear(h, p, "W_q") / np.sqrt(g.shape[2]), unit(linear(h, p, "W_k")) * g**tau
    i = sigmoid(linear(linear(u, p, "W_i.0"), p, "W_i.1"))
    o = np.zeros_like(u)
    for b in range(x.shape[0]):
        S = np.zeros((q.shape[2], u.shape[2]))
        for t in range(x.shape[1]):
            S = np.exp(-g[b, t] * tau[b, t])[:, None] * S + np.outer(k[b, t], i[b, t] * u[b, t])
            o[b, t] = q[b, t] @ S
    y = (o + p["D"] * h) * silu(linear(x, p, "W_z"))
    return linear(rms_norm(y, p["norm.weight"], eps), p, "W_o")
