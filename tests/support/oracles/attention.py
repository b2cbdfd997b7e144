"""The attention-like layers as their papers write them: NumPy, float64; nothing here uses the
library.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from oracles import rules
from oracles.layers import (
    Parameters,
    convolution,
    join,
    layer_norm,
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

Weight = Callable[[Array, Array, int, int, int], float]
"""(q_t, k_s, t, s, head) → how much query t attends to token s, up to the sum over s."""


def attention(
    x: Array, p: Parameters, heads: int, weight: Weight, normalised: bool = True
) -> Array:
    """W_O of Σ_s weight(q_t, k_s) v_s (over Σ_s weight(q_t, k_s)), s ≤ t."""
    q, k, v = (split(linear(x, p, f"W_{name}"), heads) for name in "qkv")
    o = np.zeros_like(v)
    for b, t, h in np.ndindex(o.shape[:3]):
        weights = np.array([weight(q[b, t, h], k[b, s, h], t, s, h) for s in range(t + 1)])
        total = weights.sum() if normalised and weights.any() else 1.0
        o[b, t, h] = weights @ v[b, : t + 1, h] / total
    return linear(join(o), p, "W_o")


def elu_plus_one(x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(x))


def linear_attention(x: Array, p: Parameters, heads: int) -> Array:
    """DSF eq. 13-16 with φ = ψ = elu + 1."""
    return attention(x, p, heads, lambda q, k, *_: elu_plus_one(q) @ elu_plus_one(k))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def relu_attention(x: Array, p: Parameters, heads: int) -> Array:
    return attention(x, p, heads, lambda q, k, *_: relu(q) @ relu(k))


def performer(x: Array, p: Parameters, heads: int) -> Array:
    """FAVOR+: φ(x) = exp(ω x - ‖x‖²/2) of x / d^(1/4)."""

    def phi(z: Array) -> Array:
        z = z / len(z) ** 0.25
        return np.exp(p["phi.omega"] @ z - z @ z / 2)

    return attention(x, p, heads, lambda q, k, *_: phi(q) @ phi(k))


def rfa(x: Array, p: Parameters, heads: int, gated: bool = False) -> Array:
    """φ(q)·φ(k) = mean_i cos(w_i·(q - k)) on the unit sphere, w = σ ⊙ ω; S = α S + (1 - α) φ(k)ᵀ v
    and z alike.
    """
    q, k, v = (split(linear(x, p, f"W_{name}"), heads) for name in "qkv")
    q, k, sigma, o = unit(q), unit(k), p["phi.sigma"], np.zeros_like(v)
    alpha = sigmoid(linear(x, p, "W_alpha")) if gated else None
    for b, t, h in np.ndindex(o.shape[:3]):
        weights = np.array(
            [
                np.cos(p["phi.omega"] @ (sigma[h] * (q[b, t, h] - k[b, s, h]))).mean()
                for s in range(t + 1)
            ]
        )
        least = np.exp(-2 * np.max(sigma[h] ** 2))
        if alpha is not None:
            weights = weights * [
                (1 - alpha[b, s, h]) * np.prod(alpha[b, s + 1 : t + 1, h]) for s in range(t + 1)
            ]
            least = least * (1 - alpha[b, t, h])
        o[b, t, h] = weights @ v[b, : t + 1, h] / max(abs(weights.sum()), least)
    return linear(join(o), p, "W_o")


def cosformer(x: Array, p: Parameters, heads: int, length: int) -> Array:
    """relu(q)·relu(k) cos(π (t - s) / 2M)."""
    return attention(
        x, p, heads, lambda q, k, t, s, _: relu(q) @ relu(k) * np.cos(np.pi * (t - s) / 2 / length)
    )


def based(x: Array, p: Parameters, heads: int) -> Array:
    """1 + s + s²/2 of s = q·k / √d."""

    def weight(q: Array, k: Array, *_: int) -> float:
        score = q @ k / np.sqrt(len(q))
        return 1 + score + score**2 / 2

    return attention(x, p, heads, weight)


def normalized(x: Array, p: Parameters, heads: int, eta: str = "exp") -> Array:
    """DSF eq. 22, 29, 30: q·k / η(W_η x_t)."""
    eta_of = {"exp": np.exp, "softplus": softplus, "sigmoid": sigmoid}[eta]
    width = p["W_q.weight"].shape[0] // heads
    q, k, v = (split(linear(x, p, f"W_{name}"), heads) for name in "qkv")
    assert q.shape[3] == width
    o, _ = rules.decay(q, v, k)
    return linear(join(o / eta_of(linear(x, p, "W_eta"))[..., None]), p, "W_o")


def retnet(x: Array, p: Parameters, heads: int, center: bool = True, eps: float = 1e-5) -> Array:
    """S_t = λ e^(jθ) S_{t-1} + k̄ᵀ v, Re(q S), on the complex channels (i, i + w/2); λ = 1 -
    2^(-5-h).
    """
    q, k, v = (split(linear(x, p, f"W_{name}"), heads) for name in "qkv")
    half = q.shape[3] // 2
    theta = np.array([10_000 ** (-i / half) for i in range(half)])
    decay = np.array([[np.log(1 - 2.0 ** (-5 - h)) + 1j * theta for h in range(heads)]])[None]
    q, k = (z[..., :half] + 1j * z[..., half:] for z in (q, k))
    o, _ = rules.decay(q, v, k.conj() / np.sqrt(2 * half), decay)
    norm = layer_norm if center else rms_norm
    return linear(
        join(norm(o.real, p.get("norm.weight", 1.0), eps)) * silu(linear(x, p, "W_g")), p, "W_o"
    )


def transnormer(
    x: Array, p: Parameters, heads: int, feature_map: str = "silu", depth: float = 0.0
) -> Array:
    """S_t = λ e^(jθ) S_{t-1} + φ(k)ᵀ v, Re(φ(q) S), λ = exp(-8 h/H (1 - depth)); SRMSNorm ⊙
    x W_U.
    """
    phi = {"silu": silu, "elu": elu_plus_one}[feature_map]
    q, k, v = (split(linear(x, p, f"W_{name}"), heads) for name in "qkv")
    decay = np.array([-8 * h / heads * (1 - depth) + 1j * p["theta"][h] for h in range(heads)])
    o, _ = rules.decay(phi(q) + 0j, v, phi(k), decay[None, None])
    return linear(rms_norm(join(o.real), np.ones(1)) * linear(x, p, "W_u"), p, "W_o")


def lightning(x: Array, p: Parameters, heads: int, depth: float = 0.0, eps: float = 1e-6) -> Array:
    """2501.08313: o_t = Σ_s λ^(t-s) (q_t·k_s) v_s, SiLU on q, k, v; RMSNorm of all heads ⊙ σ(x
    W_G).
    """
    q, k, v = (split(silu(linear(x, p, f"W_{name}")), heads) for name in "qkv")
    o = np.zeros_like(v)
    for h in range(heads):
        slope = 2.0 ** (-8 * (h + 1) / heads) * (1 - depth + 1e-5)
        for t in range(x.shape[1]):
            for s in range(t + 1):
                weight = (q[:, t, h] * k[:, s, h]).sum(1, keepdims=True)
                o[:, t, h] += np.exp(-slope * (t - s)) * weight * v[:, s, h]
    gate = sigmoid(linear(x, p, "W_g"))
    return linear(rms_norm(join(o), p["norm.weight"], eps) * gate, p, "W_o")


def shortconv(x: Array, p: Parameters) -> Array:
    """LFM2: (B, C, h) = x W, y = W_O(C ⊙ conv(B ⊙ h))."""
    B, C, h = (linear(x, p, f"W_{name}") for name in "BCu")
    mixed = convolution(B * h, p["conv.weight"]) + p.get("conv_bias", 0.0)
    return linear(C * mixed, p, "W_o")


def hgrn(x: Array, p: Parameters, lower_bound: float = 0.0, tied: bool = True) -> Array:
    """h_t = f ⊙ h_{t-1} + i ⊙ c, f = β + (1 - β) σ(x W_f), i = 1 - f or σ(x W_i)."""
    f = lower_bound + (1 - lower_bound) * sigmoid(linear(x, p, "W_f"))
    i = 1 - f if tied else sigmoid(linear(x, p, "W_i"))
    c, h = silu(linear(x, p, "W_c")), np.zeros_like(x)
    for t in range(x.shape[1]):
        h[:, t] = (f[:, t] * h[:, t - 1] if t else 0) + i[:, t] * c[:, t]
    return linear(rms_norm(h, p["norm.weight"]) * silu(linear(x, p, "W_g")), p, "W_o")


def hgrn2(
    x: Array, p: Parameters, heads: int, lower_bound: float | None = 0.0, eps: float = 1e-5
) -> Array:
    """S_t = diag(f) S_{t-1} + (1 - f)ᵀ v, o = SiLU(x W_Q) S."""
    least = sigmoid(p["b_beta"]) if lower_bound is None else lower_bound
    f = split(least + (1 - least) * sigmoid(linear(x, p, "W_f")), heads)
    q, v = split(silu(linear(x, p, "W_q")), heads), split(linear(x, p, "W_v"), heads)
    o, _ = rules.decay(q, v, 1 - f, np.log(f))
    return linear(rms_norm(join(o), p["norm.weight"], eps), p, "W_o")


def deltanet(
    x: Array,
    p: Parameters,
    heads: int,
    negative: bool = False,
    eps: float = 1e-5,
    floor: float = 0.0,
) -> Array:
    """S_t = (I - β kᵀk) S_{t-1} + β kᵀv on L2-normalised q, k; β = σ, or 2σ."""
    q, k, v = (split(short(x, p, name), heads) for name in "qkv")
    beta = (2 if negative else 1) * sigmoid(linear(x, p, "W_beta"))[..., None]
    o, _ = rules.delta(unit(q, floor) / np.sqrt(q.shape[3]), unit(k, floor), v, beta)
    return linear(join(rms_norm(o, p["norm.weight"], eps)), p, "W_o")
