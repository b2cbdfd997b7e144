"""State space models and RNNs as their papers write them: NumPy, float64 and complex128, one token
at a time.

A layer maps ``x [b t d]`` and its parameters (name → array) to ``y [b t d]``; nothing here uses the
library.
"""

from __future__ import annotations

from math import erf

import numpy as np

from oracles import rules
from oracles.layers import convolution, join, layer_norm, linear, sigmoid, silu, softplus, split
from oracles.rules import Array
from oracles.rwkv7 import shifted

Parameters = dict[str, Array]


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(erf)(x / np.sqrt(2))) / 2


def gelu_tanh(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def pair(x: Array) -> Array:
    """``[… n 2]`` → ``[… n]``."""
    return x[..., 0] + 1j * x[..., 1]


def continuous(p: Parameters) -> tuple[Array, Array]:
    """A and Δ."""
    return -np.exp(p["A.log_A_re"]) + 1j * p["A.A_im"], np.exp(p["A.log_Delta"])


def held(A: Array, step: Array, bilinear: bool = False) -> tuple[Array, Array]:
    """Ā and B̄ for B = 1, by zero-order hold or the bilinear rule."""
    if bilinear:
        return (1 + step * A / 2) / (1 - step * A / 2), step / (1 - step * A / 2)
    return np.exp(step * A), (np.exp(step * A) - 1) / A


def system(u: Array, A: Array, B: Array, C: Array) -> Array:
    """h_t = Ā ⊙ h_{t-1} + B̄ u_t ;  y_t = C h_t for every channel of ``u [b t d]``: A, B, C ``[d
    n]``.
    """
    y = np.zeros(u.shape, complex)
    for b in range(u.shape[0]):
        h = np.zeros((u.shape[2], C.shape[1]), complex)
        for t in range(u.shape[1]):
            h = A * h + B * u[b, t, :, None]
            y[b, t] = (C * h).sum(1)
    return y


def dss(x: Array, p: Parameters) -> Array:
    """Proposition 1(a): K_k = Re Σ_n w_n (e^(λ_nΔ) - 1)/λ_n e^(λ_n k Δ), y = K * x + D x, by the
    convolution itself.
    """
    A, step = continuous(p)
    w, y = pair(p["C"]), np.zeros_like(x)
    for t in range(x.shape[1]):
        for k in range(t + 1):
            kernel = (w * (np.exp(A * step) - 1) / A * np.exp(A * k * step)).sum(1).real
            y[:, t] += kernel * x[:, t - k]
    return linear(gelu(y + p["D"] * x), p, "W_o")


def s4d(x: Array, p: Parameters, bilinear: bool = False) -> Array:
    """y = 2 Re(C h) + D x, then GELU and a gated linear unit."""
    y = 2 * system(x, *held(*continuous(p), bilinear), pair(p["C"])).real + p["D"] * x
    left, right = np.split(linear(gelu(y), p, "W_o"), 2, axis=-1)
    return left * sigmoid(right)


def low_rank_matrix(p: Parameters) -> Array:
    """Λ - P P* on all N states."""
    A, P = continuous(p)[0][0], pair(p["P"])
    P = np.concatenate([P, P.conj()])
    return np.diag(np.concatenate([A, A.conj()])) - np.outer(P, P.conj())


def s4(x: Array, p: Parameters) -> Array:
    """2111.00396 eq. 3: Ā = (I - ΔA/2)⁻¹ (I + ΔA/2), B̄ = (I - ΔA/2)⁻¹ ΔB, with dense matrices."""
    A, B, C = low_rank_matrix(p), pair(p["B"]), pair(p["C"])
    B, C = np.concatenate([B, B.conj()]), np.concatenate([C, C.conj()], 1)
    steps, y = continuous(p)[1][:, 0], np.zeros_like(x)
    for b, channel in np.ndindex(x.shape[0], x.shape[2]):
        half, h = steps[channel] / 2 * A, np.zeros(len(B), complex)
        inverse = np.linalg.inv(np.eye(len(B)) - half)
        for t in range(x.shape[1]):
            u = steps[channel] * x[b, t, channel]
            h = inverse @ ((np.eye(len(B)) + half) @ h + B * u)
            y[b, t, channel] = (C[channel] @ h).real
    left, right = np.split(linear(gelu(y + p["D"] * x), p, "W_o"), 2, axis=-1)
    return left * sigmoid(right)


def h3(x: Array, p: Parameters, heads: int = 4) -> Array:
    """Algorithm 1: O = Q · SSM_diag(SSM_shift(K) ⊗ V), the diagonal system on every entry of the
    outer product.
    """
    q, k, v = (linear(x, p, f"W_{name}") for name in "qkv")
    q, k, v = split(q, heads), split(convolution(k, p["conv.weight"]), heads), split(v, heads)
    b, t, _, width = q.shape
    (A, B), C = held(*continuous(p)), pair(p["C"])
    o = np.zeros_like(v)
    for head in range(heads):
        product = np.einsum("bti,btj->btij", k[:, :, head], v[:, :, head]).reshape(
            b, t, width * width
        )
        every = (np.repeat(s[head][None], width * width, axis=0) for s in (A, B, C))
        memory = 2 * system(product, *every).real + p["D"][head] * product
        o[:, :, head] = np.einsum(
            "bti,btij->btj", q[:, :, head], memory.reshape(b, t, width, width)
        )
    return linear(join(o), p, "W_o")


def s5(x: Array, p: Parameters) -> Array:
    """h_t = Λ̄ h_{t-1} + B̄ x_t with B̄ = Λ⁻¹(Λ̄ - I)B ;  y = 2 Re(C h) + D x ;  GELU(y) ⊙ σ(W
    GELU(y)).
    """
    A, hold = held(*continuous(p))
    B = pair(p["W_B.weight"].T.reshape(x.shape[2], -1, 2)).T * hold.reshape(-1, 1)
    C = pair(p["W_o.weight"].reshape(x.shape[2], -1, 2)).conj() / 2
    y = gelu(2 * mimo(x, A.reshape(-1), B, C).real + p["D"] * x)
    return y * sigmoid(linear(y, p, "W_g"))


def mimo(x: Array, A: Array, B: Array, C: Array) -> Array:
    """h_t = A ⊙ h_{t-1} + B x_t ;  y_t = C h_t with ``B [n d]``, ``C [d n]``."""
    y = np.zeros(x.shape, complex)
    for b in range(x.shape[0]):
        h = np.zeros(len(A), complex)
        for t in range(x.shape[1]):
            h = A * h + B @ x[b, t]
            y[b, t] = C @ h
    return y


def lru(x: Array, p: Parameters) -> Array:
    """h_t = λ h_{t-1} + e^γ ⊙ B x_t with λ = e^(-e^ν + i e^θ) ;  y = Re(C h) + D x."""
    B = pair(p["W_B.weight"].T.reshape(x.shape[2], -1, 2)).T
    C = pair(p["W_o.weight"].reshape(x.shape[2], -1, 2)).conj()
    λ = np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"]))
    return mimo(x, λ, np.exp(p["gamma"])[:, None] * B, C).real + p["D"] * x


def mamba2(
    u: Array,
    p: Parameters,
    heads: int = 4,
    groups: int = 1,
    scaled: bool = True,
    decays: bool = True,
    eps: float = 1e-5,
) -> Array:
    """h_t = e^(-aΔ_t) h_{t-1} + Δ_t B_t x_tᵀ ;  y_t = C_t h_t + D x_t ;  RMSNorm(y ⊙ SiLU(z)) by
    group.
    """
    x, B, C, delta = mamba2_streams(u, p, heads, groups)
    kept = np.exp(-delta * np.exp(p["log_a"])) if decays else np.ones_like(delta)
    y = ssd(x, B, C, kept, delta if scaled else np.ones_like(delta), p["D"])
    return mamba2_output(y, u, p, groups, eps)


def mamba2_streams(
    u: Array, p: Parameters, heads: int, groups: int
) -> tuple[Array, Array, Array, Array]:
    """x, B, C and Δ."""
    width = p["W_z.weight"].shape[0]
    n = (p["W_xBC.weight"].shape[0] - width) // (2 * groups)
    xBC = silu(convolution(linear(u, p, "W_xBC"), p["conv.weight"]) + p["conv_bias"])
    x, B, C = xBC[..., :width], xBC[..., width : width + groups * n], xBC[..., width + groups * n :]
    x, B, C = split(x, heads), split(B, groups), split(C, groups)
    return x, B, C, softplus(linear(u, p, "W_Delta"))


def mamba2_output(y: Array, u: Array, p: Parameters, groups: int, eps: float) -> Array:
    y = split(join(y) * silu(linear(u, p, "W_z")), groups)
    y = join(y / np.sqrt((y**2).mean(-1, keepdims=True) + eps)) * p["w_norm"]
    return linear(y, p, "W_o")


def ssd(x: Array, B: Array, C: Array, kept: Array, written: Array, D: Array) -> Array:
    """h_t = kept_t h_{t-1} + written_t B_t x_tᵀ ;  y_t = C_t h_t + D x_t, of heads that share B and
    C by groups.
    """
    y, served = np.zeros_like(x), x.shape[2] // B.shape[2]
    for b, head in np.ndindex(x.shape[0], x.shape[2]):
        h, group = np.zeros((B.shape[3], x.shape[3])), head // served
        for t in range(x.shape[1]):
            at = (b, t, head)
            h = kept[at] * h + written[at] * np.outer(B[b, t, group], x[at])
            y[at] = C[b, t, group] @ h + D[head] * x[at]
    return y


def rglru(
    u: Array, p: Parameters, heads: int = 4, c: float = 8.0, whole_start: bool = False
) -> Array:
    """h_t = a_t h_{t-1} + √(1 - a_t²) ⊙ (i_t ⊙ x_t) with a_t = σ(Λ)^(c r_t), block by block of W_a
    and W_x.
    """

    def gate(x: Array, name: str) -> Array:
        blocks = split(x, heads)
        parts = [blocks[:, :, i] @ p[f"W_{name}"][i] for i in range(heads)]
        return sigmoid(np.concatenate(parts, -1) + p[f"b_{name}"])

    x = convolution(linear(u, p, "W_u"), p["conv.weight"]) + p["conv_bias"]
    a = sigmoid(p["Lambda"]) ** (c * gate(x, "a"))
    h, y = np.zeros_like(x[:, 0]), np.zeros_like(x)
    for t in range(u.shape[1]):
        written = 1 if whole_start and t == 0 else np.sqrt(1 - a[:, t] ** 2)
        h = a[:, t] * h + written * gate(x, "x")[:, t] * x[:, t]
        y[:, t] = h
    return linear(y * gelu_tanh(linear(u, p, "W_g")), p, "W_o")


def qlstm(x: Array, p: Parameters, reversed: bool = False) -> Array:
    """DSF eq. 20: h_t = f_t ⊙ h_{t-1} + i_t ⊙ W_u u_t ;  y_t = o_t ⊙ h_t; reversed: f = σ(-·)^a
    (eq. 23).
    """
    f = (
        sigmoid(-linear(x, p, "W_f")) ** np.maximum(p["a"], 0)
        if reversed
        else sigmoid(linear(x, p, "W_f"))
    )
    i, o, v = sigmoid(linear(x, p, "W_i")), sigmoid(linear(x, p, "W_q")), linear(x, p, "W_v")
    h, y = np.zeros_like(x[:, 0]), np.zeros_like(x)
    for t in range(x.shape[1]):
        h = f[:, t] * h + i[:, t] * v[:, t]
        y[:, t] = o[:, t] * h
    return linear(y, p, "W_o")


def rwkv4(x: Array, p: Parameters) -> Array:
    """Eq. 11-17: wkv_t = (Σ_{i<t} e^(-(t-1-i)w + k_i) v_i + e^(u + k_t) v_t) / (the same sum
    without v).
    """

    def mixed(name: str) -> Array:
        before = np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1)
        mu = p[f"shift_{name}.mu"]
        return linear(mu * x + (1 - mu) * before, p, f"W_{name}")

    r, k, v, w, wkv = mixed("r"), mixed("k"), mixed("v"), np.exp(p["w"]), np.zeros_like(x)
    for t in range(x.shape[1]):
        above, below = np.exp(p["u"] + k[:, t]) * v[:, t], np.exp(p["u"] + k[:, t])
        for i in range(t):
            weight = np.exp(-(t - 1 - i) * w + k[:, i])
            above, below = above + weight * v[:, i], below + weight
        wkv[:, t] = above / below
    return linear(sigmoid(r) * wkv, p, "W_o")


def rwkv4_channel(x: Array, p: Parameters) -> Array:
    """Eq. 18-20: r = W_r shift(x), k = W_k shift(x), σ(r) ⊙ (W_v max(k, 0)²)."""
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        before = x[:, t - 1] if t else np.zeros_like(x[:, 0])
        r, k = (
            (p[f"shift_{name}.mu"] * x[:, t] + (1 - p[f"shift_{name}.mu"]) * before)
            @ p[f"W_{name}.weight"].T
            for name in "rk"
        )
        y[:, t] = sigmoid(r) * (np.maximum(k, 0) ** 2 @ p["W_o.weight"].T)
    return y


def rwkv6(x: Array, p: Parameters, heads: int = 4, eps: float = 1e-5) -> Array:
    """2404.05892: wkv_t = diag(u) kᵀv + S, then S = diag(exp(-exp(d_t))) S + kᵀv."""

    def ddlerp(number: int) -> Array:
        between = shifted(x, p["mu_z"])
        rank = p["M_2"].shape[1]
        A = p["M_1.weight"].T[:, number * rank : (number + 1) * rank]
        return shifted(x, p["mu"][number] + np.tanh(between @ A) @ p["M_2"][number])

    r, w, k, v, g = (ddlerp(number) for number in range(5))
    d = linear(np.tanh(linear(w, p, "W_alpha_1")), p, "W_alpha_2")
    w = split(np.exp(-np.exp(d)), heads)
    r, k, v = (
        split(linear(s, p, f"W_{name}"), heads) for s, name in ((r, "r"), (k, "k"), (v, "v"))
    )
    o = np.zeros_like(v)
    for b in range(x.shape[0]):
        for head in range(heads):
            S = np.zeros((k.shape[3], v.shape[3]))
            for t in range(x.shape[1]):
                at = (b, t, head)
                kv = np.outer(k[at], v[at])
                o[at] = r[at] @ (S + np.diag(p["u"][head]) @ kv)
                S = np.diag(w[at]) @ S + kv
    o = join(layer_norm(o, 1.0, eps)) * p["w_norm"] + p["b_norm"]
    return linear(o * silu(linear(g, p, "W_g")), p, "W_o")


def mlstm(
    x: Array,
    p: Parameters,
    heads: int = 4,
    conv: int = 4,
    exponential_forget: bool = False,
    cap: float | None = None,
    eps: float = 1e-5,
) -> Array:
    """Eq. 19-27: C_t = f C_{t-1} + i v kᵀ ;  n_t = f n_{t-1} + i k ;  h = C q / max(|nᵀq|, 1),
    gated, normalised.
    """
    mixed = silu(convolution(x, p["conv.weight"])) if conv > 1 else x
    q, k = split(linear(mixed, p, "W_q"), heads), split(linear(mixed, p, "W_k"), heads)
    v = split(linear(x, p, "W_v"), heads)
    k = k / np.sqrt(k.shape[3])
    i, f = linear(x, p, "W_i"), linear(x, p, "W_f")
    i, f = (i, f) if cap is None else (cap * np.tanh(i / cap), cap * np.tanh(f / cap))
    log_f = f if exponential_forget else np.log(sigmoid(f))
    o, _ = rules.mlstm(q, k, v, i[..., None], log_f[..., None], floor=1.0)
    return linear(
        join(layer_norm(o, p["norm.weight"], eps)) * sigmoid(linear(x, p, "W_g")), p, "W_o"
    )
