"""The forgetting transformer's layer as its paper writes it: NumPy, float64, token by token;
nothing here uses the library.
"""

from __future__ import annotations

import numpy as np

from oracles import rules
from oracles.layers import Parameters, join, linear, rms_norm, sigmoid, split
from oracles.rules import Array


def shifted(y: Array, x: Array, p: Parameters, name: str, heads: int) -> Array:
    """k_t = α_t k̃_{t-1} + (1 - α_t) k̃_t, α_t = σ(w·x_t) of every head (2503.02130, section 3.3)."""
    out = y.copy()
    for t in range(x.shape[1]):
        alpha = sigmoid(x[:, t] @ p[f"{name}.weight"].T)[..., None]
        earlier = y[:, t - 1] if t else np.zeros_like(y[:, 0])
        mixed = alpha * split(earlier[:, None], heads)[:, 0]
        out[:, t] = join((mixed + (1 - alpha) * split(y[:, t : t + 1], heads)[:, 0])[:, None])[:, 0]
    return out


def fox(
    x: Array,
    p: Parameters,
    heads: int = 4,
    window: int | None = None,
    eps: float = 1e-6,
) -> Array:
    """2503.02130 eq. 2-5; what the parameters lack is left out."""
    q, k, v = (linear(x, p, f"W_{name}") for name in "qkv")
    if "W_shift_k.weight" in p:
        k, v = (shifted(y, x, p, f"W_shift_{n}", heads) for y, n in ((k, "k"), (v, "v")))
    q, k, v = (split(y, heads) for y in (q, k, v))
    if "w_q" in p:
        q, k = (rms_norm(y, p[f"w_{n}"].reshape(heads, -1), eps) for y, n in ((q, "q"), (k, "k")))
    log_f = np.log(sigmoid(linear(x, p, "W_alpha")))[..., None]
    sinks = p["sinks"][None, None, :, None] if "sinks" in p else None
    o, _ = rules.softmax(q, k, v, window, log_f, sinks)
    if "w_norm" in p:
        o = rms_norm(o, p["w_norm"].reshape(heads, -1), eps)
    gate = sigmoid(linear(x, p, "W_g")) if "W_g.weight" in p else 1
    return linear(join(o) * gate, p, "W_o")
