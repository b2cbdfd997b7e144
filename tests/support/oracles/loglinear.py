"""Log-linear attention as its paper writes it: NumPy, float64, every token's Fenwick tree anew;
nothing here uses the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from oracles.layers import (
    Parameters,
    convolution,
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
from oracles.state_space import mamba2_output, mamba2_streams


def buckets(t: int) -> list[tuple[int, int, int]]:
    """(level, first, end) of the tokens before t and of t, by taking the least bit off t again and
    again (2506.04761, section 3.1).
    """
    found, end = [(0, t, t + 1)], t
    while end:
        size = end & -end
        found.append((size.bit_length(), end - size, end))
        end -= size
    return found


def level(t: int, s: int, levels: int) -> int:
    (number,) = [n for n, first, end in buckets(t) if first <= s < end]
    return min(number, levels - 1)


def loglinear(
    q: Array,
    k: Array,
    v: Array,
    weights: Array,
    log_decay: Array | None = None,
    beta: Array | None = None,
    state: tuple[Array, Array] | None = None,
) -> tuple[Array, Any]:
    """o_t = Σ_l λ_t^(l) q_t Σ_{s in bucket l} A_t … A_{s+1} B_s, A_t = diag(α_t), B_s = k_sᵀ v_s,
    or those of the delta rule where there is β.
    """
    alpha = decay_of(log_decay, q.shape[3])
    beta = np.zeros((1, 1, 1, 1)) if (plain := beta is None) else beta
    (b, t, h), (q, k, v, weights, alpha, beta) = spread(q, k, v, weights, alpha, beta)
    n, count = weights.shape[3], np.zeros(b, int) if state is None else state[1].astype(int)
    o, final = np.zeros((b, t, h, v.shape[3])), np.zeros((b, h, n, q.shape[3], v.shape[3]))
    for i, head in np.ndindex(b, h):
        first = int(count[i])
        held = {} if state is None else started(state[0][i, head].reshape(n, -1, v.shape[3]), first)
        for j in range(t):
            at = (i, j, head)
            erase = np.eye(q.shape[3]) - beta[at] * np.outer(k[at], k[at])
            held = {s: erase @ np.diag(alpha[at]) @ S for s, S in held.items()}
            held[first + j] = np.outer(k[at] if plain else beta[at] * k[at], v[at])
            for s, S in held.items():
                o[at] += weights[at][level(first + j, s, n)] * (q[at] @ S)
        for s, S in held.items():
            final[i, head, level(first + t - 1, s, n)] += S
    return o, (final.reshape(b, h, -1, v.shape[3]), count + t)


def started(levels: Array, count: int) -> dict[int, Array]:
    """The states after `count` tokens, each as if it were its first token's alone."""
    last, held = len(levels) - 1, {}
    for number, first, _ in buckets(count - 1):
        if number < last:
            held[first] = levels[number]
    return {**held, 0: levels[last]}


def level_weights(x: Array, p: Parameters, heads: int) -> Array:
    return softplus(p["level_weights.scale"] * split(linear(x, p, "level_weights.W"), heads))


def loglinear_mamba2(
    u: Array, p: Parameters, heads: int = 4, groups: int = 1, eps: float = 1e-5
) -> Array:
    """Mamba-2's streams, read by level: y_t = Σ_l λ_t^(l) C_t S_t^(l) + D x_t."""
    x, B, C, delta = mamba2_streams(u, p, heads, groups)
    B, C = (np.repeat(s, heads // groups, 2) for s in (B, C))
    delta = delta[..., None]
    log_decay = -delta * np.exp(p["log_a"])[:, None]
    y, _ = loglinear(C, B, delta * x, level_weights(u, p, heads), log_decay)
    return mamba2_output(y + p["D"][:, None] * x, u, p, groups, eps)


def loglinear_gdn(x: Array, p: Parameters, heads: int = 4, eps: float = 1e-5) -> Array:
    """Gated DeltaNet's streams, read by level."""
    q, k, v = (split(short(x, p, name), heads) for name in "qkv")
    log_decay = -np.exp(p["log_a"]) * softplus(linear(x, p, "W_alpha") + p["b_alpha"])
    beta = sigmoid(linear(x, p, "W_beta"))[..., None]
    read = unit(q) / np.sqrt(q.shape[3])
    o, _ = loglinear(read, unit(k), v, level_weights(x, p, heads), log_decay[..., None], beta)
    return linear(join(rms_norm(o, p["norm.weight"], eps)) * silu(linear(x, p, "W_g")), p, "W_o")


def fla_mixer(x: Array, w: Parameters, heads: int, groups: int, eps: float) -> Array:
    """flash-linear-attention's log-linear Mamba-2: z, (x, B, C), Δ and λ from one projection."""
    width = w["out_proj.weight"].shape[1]
    n = (w["conv1d.weight"].shape[0] - width) // (2 * groups)
    bounds = np.cumsum([width, width + 2 * groups * n, heads])
    z, xBC, delta, levels = np.split(x @ w["in_proj.weight"].T, bounds, axis=-1)
    xBC = silu(convolution(xBC, w["conv1d.weight"][:, 0].T) + w["conv1d.bias"])
    v, B, C = np.split(xBC, [width, width + groups * n], axis=-1)
    B, C = (np.repeat(split(s, groups), heads // groups, 2) for s in (B, C))
    v, delta = split(v, heads), softplus(delta + w["dt_bias"])[..., None]
    weights, log_decay = (
        softplus(w["L"] * split(levels, heads)),
        -delta * np.exp(w["A_log"])[:, None],
    )
    y, _ = loglinear(C, B, delta * v, weights, log_decay)
    y = split(join(y + w["D"][:, None] * v) * silu(z), groups)
    return join(rms_norm(y, np.ones(()), eps)) * w["norm.weight"] @ w["out_proj.weight"].T


def log_linear_mamba2(ids: Array, w: Parameters, c: Mapping[str, Any]) -> Array:
    x, eps = w["backbone.embeddings.weight"][ids], c["norm_eps"]
    for i in range(c["num_hidden_layers"]):
        prefix = f"backbone.layers.{i}."
        layer = {n.removeprefix(prefix): p for n, p in w.items() if n.startswith(prefix)}
        mixer = {n.removeprefix("mixer."): p for n, p in layer.items() if n.startswith("mixer.")}
        y = rms_norm(x, layer["mixer_norm.weight"], eps)
        x = x + fla_mixer(y, mixer, c["num_heads"], c["n_groups"], eps)
        y = rms_norm(x, layer["mlp_norm.weight"], eps)
        gate, up = (y @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return rms_norm(x, w["backbone.norm_f.weight"], eps) @ w["lm_head.weight"].T
