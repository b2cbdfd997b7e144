"""Every layer as its paper writes it: NumPy, float64, from the layer's parameters; nothing here
uses the library.

A layer maps ``x [b t d]`` and its parameters (name → array, linear maps as ``[out in]``) to ``y [b
t d]``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oracles import rules
from oracles.rules import Array

Parameters = Mapping[str, Array]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(x))


def linear(x: Array, p: Parameters, name: str) -> Array:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def split(x: Array, heads: int) -> Array:
    """Channels to heads: head i has the channels from i·w to (i + 1)·w."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def join(o: Array) -> Array:
    return o.reshape(*o.shape[:2], -1)


def convolution(x: Array, weight: Array) -> Array:
    """y_t = Σ_j w_j ⊙ x_{t-j}; the last row of `weight` is w_0."""
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        for j in range(min(len(weight), t + 1)):
            y[:, t] += weight[len(weight) - 1 - j] * x[:, t - j]
    return y


def short(x: Array, p: Parameters, name: str) -> Array:
    """SiLU(conv(x W))."""
    return silu(convolution(linear(x, p, f"W_{name}"), p[f"conv_{name}.weight"]))


def layer_norm(o: Array, weight: Array | float = 1.0, eps: float = 1e-5) -> Array:
    centered = o - o.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * weight


def rms_norm(o: Array, weight: Array, eps: float = 1e-5) -> Array:
    return o / np.sqrt((o**2).mean(-1, keepdims=True) + eps) * weight


def unit(x: Array, floor: float = 0.0) -> Array:
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + floor)


def turned(x: Array, base: float = 10_000.0, fraction: float = 1.0) -> Array:
    """The pair (i, i + r/2) of the first r = fraction · w channels of token t turned by t ·
    base^(-2i/r).
    """
    count = int(x.shape[3] * fraction)
    half = count // 2
    y = x.copy()
    for t in range(x.shape[1]):
        for i in range(half):
            angle = t * base ** (-2 * i / count)
            a, b = x[:, t, :, i], x[:, t, :, i + half]
            y[:, t, :, i] = a * np.cos(angle) - b * np.sin(angle)
            y[:, t, :, i + half] = a * np.sin(angle) + b * np.cos(angle)
    return y


def softmax(
    x: Array,
    p: Parameters,
    heads: int = 4,
    kv_heads: int | None = None,
    window: int | None = None,
    qk_norm: float | None = None,
    rope: Mapping[str, float] = {},
) -> Array:
    """softmax(RoPE(q) RoPE(k)ᵀ / √d'_k) v with grouped heads."""
    q, k = split(linear(x, p, "W_q"), heads), split(linear(x, p, "W_k"), kv_heads or heads)
    if qk_norm is not None:
        q, k = rms_norm(q, p["norm_q.weight"], qk_norm), rms_norm(k, p["norm_k.weight"], qk_norm)
    v = split(linear(x, p, "W_v"), kv_heads or heads)
    o, _ = rules.softmax(turned(q, **rope), turned(k, **rope), v, window)
    gate = sigmoid(linear(x, p, "W_g")) if "W_g.weight" in p else 1
    return linear(join(o) * gate, p, "W_o")


def olmo2(
    x: Array, p: Parameters, heads: int = 4, kv_heads: int | None = None, eps: float = 1e-6
) -> Array:
    """Softmax attention whose queries and keys are normalised over all heads, before RoPE."""
    q = split(rms_norm(linear(x, p, "W_q"), p["norm_q.weight"], eps), heads)
    k = split(rms_norm(linear(x, p, "W_k"), p["norm_k.weight"], eps), kv_heads or heads)
    v = split(linear(x, p, "W_v"), kv_heads or heads)
    o, _ = rules.softmax(turned(q), turned(k), v)
    return linear(join(o), p, "W_o")


def lolcats(
    x: Array,
    p: Parameters,
    heads: int = 4,
    kv_heads: int | None = None,
    window: int = 64,
    shared: bool = True,
) -> Array:
    """arXiv 2410.10254 with Hedgehog features of the rotated queries and keys."""

    def softmax_of(z: Array) -> Array:
        return np.exp(z) / np.exp(z).sum(-1, keepdims=True)

    def phi(z: Array, name: str) -> Array:
        W = p[f"{name}.W"].reshape(z.shape[2], -1, z.shape[3])
        rotated = np.stack([z[:, :, head] @ W[head].T for head in range(z.shape[2])], 2)
        return np.concatenate([softmax_of(rotated), softmax_of(-rotated)], -1)

    q = turned(split(linear(x, p, "W_q"), heads))
    k = turned(split(linear(x, p, "W_k"), kv_heads or heads))
    v, mix = split(linear(x, p, "W_v"), kv_heads or heads), sigmoid(p["mix"])[None, None, :, None]
    o, _ = rules.windowed(q, k, v, phi(q, "phi_q"), phi(k, "phi_k"), mix, window, shared)
    return linear(join(o), p, "W_o")


def gla(
    x: Array,
    p: Parameters,
    heads: int = 4,
    tau: float = 16.0,
    center: bool = True,
    eps: float = 1e-5,
) -> Array:
    """α = σ(x W¹_α W²_α + b)^(1/τ), y = (LayerNorm(q S) ⊙ SiLU(x W_r + b_r)) W_O, q scaled by
    d'_k^(-1/2).
    """
    q, k, v = (split(linear(x, p, f"W_{name}"), heads) for name in "qkv")
    alpha = sigmoid(linear(linear(x, p, "W_alpha.0"), p, "W_alpha.1")) ** (1 / tau)
    o, _ = rules.decay(q / np.sqrt(q.shape[3]), v, k, np.log(split(alpha, heads)))
    norm = layer_norm if center else rms_norm
    return linear(join(norm(o, p["norm.weight"], eps)) * silu(linear(x, p, "W_r")), p, "W_o")


def metala(
    x: Array,
    p: Parameters,
    heads: int = 4,
    tau: float = 16.0,
    conv: int = 4,
    augmented: bool = True,
    restore_key: bool = False,
    scaled: bool = False,
) -> Array:
    """Appendix A3: o = q S + σ(q (w_aug ⊙ k)ᵀ v), S_t = diag(α) S_{t-1} + kᵀ v, k = 1 - α."""
    x = silu(convolution(x, p["conv.weight"])) if conv > 1 else x
    q, v = split(linear(x, p, "W_q"), heads), split(linear(x, p, "W_v"), heads)
    alpha = split(sigmoid(linear(x, p, "W_alpha")) ** (1 / tau), heads)
    k = split(linear(x, p, "W_k"), heads) if restore_key else 1 - alpha
    o, _ = rules.decay(q / np.sqrt(q.shape[3]) if scaled else q, v, k, np.log(alpha))
    if augmented:
        for at in np.ndindex(*o.shape[:3]):
            o[at] += sigmoid(q[at] @ np.outer(p["w_aug"][at[2]] * k[at], v[at]))
    return linear(silu(linear(x, p, "W_g")) * join(layer_norm(o)), p, "W_o")


def mamba(u: Array, p: Parameters) -> Array:
    """DSF eq. 4, 19: h_t = e^(-Δ_t A) h_{t-1} + Δ_t (W_B x_t) x_t, y = C h + D x, one state row per
    channel.
    """
    gate = silu(linear(u, p, "W_z"))
    x = silu(convolution(linear(u, p, "W_u"), p["conv.weight"]) + p["conv_bias"])
    delta = softplus(linear(linear(x, p, "W_Delta_1"), p, "W_Delta_2"))
    B, C = linear(x, p, "W_B"), linear(x, p, "W_C")
    A = np.exp(p["log_A"])
    y = np.zeros_like(x)
    for b in range(x.shape[0]):
        h = np.zeros_like(A)
        for t in range(x.shape[1]):
            h = (
                np.exp(-delta[b, t, :, None] * A) * h
                + delta[b, t, :, None] * B[b, t] * x[b, t, :, None]
            )
            y[b, t] = h @ C[b, t] + p["D"] * x[b, t]
    return linear(y * gate, p, "W_o")


def gated_deltanet(
    x: Array,
    p: Parameters,
    heads: int = 4,
    value_heads: int | None = None,
    negative: bool = False,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    """S_t = (I - β kᵀk) α S_{t-1} + β kᵀv on L2-normalised q, k; RMSNorm(q S / √d'_k) ⊙ SiLU(x
    W_G).
    """
    q, k, v = (short(x, p, name) for name in "qkv")
    q, k = (
        unit(split(z, heads), floor).repeat((value_heads or heads) // heads, axis=2) for z in (q, k)
    )
    alpha = np.exp(-np.exp(p["log_a"]) * softplus(linear(x, p, "W_alpha") + p["b_alpha"]))[
        ..., None
    ]
    beta = (2 if negative else 1) * sigmoid(linear(x, p, "W_beta"))[..., None]
    o, _ = rules.delta(
        q / np.sqrt(q.shape[3]), k, split(v, value_heads or heads), beta, np.log(alpha)
    )
    return linear(join(rms_norm(o, p["norm.weight"], eps)) * silu(linear(x, p, "W_g")), p, "W_o")


def mesa(
    x: Array,
    p: Parameters,
    heads: int = 4,
    bound: float = 0.9975,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    """MesaNet eq. 4-6 and appendices D, F.5: γ ← γ (1 - (1 - bound) β²), Λ = 0.25 + softplus(λ)."""
    return _mesa(x, p, heads, sigmoid(linear(x, p, "W_gamma")), 0.25, bound, eps, floor)


def mesa_signed(x: Array, p: Parameters, heads: int = 4) -> Array:
    """Appendix H: γ = tanh, Λ = 49.25 + softplus(λ)."""
    return _mesa(x, p, heads, np.tanh(linear(x, p, "W_gamma")), 49.25)


def _mesa(
    x: Array,
    p: Parameters,
    heads: int,
    gamma: Array,
    least: float,
    bound: float = 0.9975,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    q, k = (split(short(x, p, name), heads) for name in "qk")
    beta = sigmoid(linear(x, p, "W_beta"))[..., None]
    gamma = gamma[..., None] * (1 - (1 - bound) * beta**2)
    ridge = least + softplus(p["ridge"])[None, None]
    q, k = unit(q, floor), unit(k, floor)
    v = split(linear(x, p, "W_v"), heads)
    o, _ = rules.mesa(q, k, v, beta, ridge, np.log(np.abs(gamma)), sign=gamma)
    return linear(join(rms_norm(o, p["norm.weight"], eps)), p, "W_o")
