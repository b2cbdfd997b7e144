"""MesaNet's Table 3 in float64 loops: the baselines on their shared parametrisation
(appendix D.1).
"""

from __future__ import annotations

import numpy as np

from oracles import rules
from oracles.layers import (
    Array,
    Parameters,
    convolution,
    join,
    linear,
    rms_norm,
    sigmoid,
    silu,
    split,
    unit,
)


def convolved(x: Array, p: Parameters, heads: int) -> tuple[Array, Array, Array]:
    q, k = (
        split(convolution(linear(x, p, f"W_{name}"), p[f"conv_{name}.weight"]), heads)
        for name in "qk"
    )
    return q, k, split(linear(x, p, "W_v"), heads)


def units(x: Array, p: Parameters, heads: int) -> tuple[Array, Array, Array]:
    q, k, v = convolved(x, p, heads)
    return unit(silu(q)), unit(silu(k)), v


def gate(x: Array, p: Parameters, name: str) -> Array:
    return sigmoid(linear(x, p, name))[..., None]


def out(o: Array, p: Parameters) -> Array:
    return linear(join(rms_norm(o, p["norm.weight"])), p, "W_o")


def mamba2(x: Array, p: Parameters, heads: int = 4) -> Array:
    """G_t = γ_t G_{t-1} + v_t k_tᵀ."""
    q, k, v = units(x, p, heads)
    return out(rules.decay(q, v, k, np.log(gate(x, p, "W_gamma")))[0], p)


def gla(x: Array, p: Parameters, heads: int = 4) -> Array:
    """G_t = γ_t G_{t-1} + β_t v_t k_tᵀ."""
    q, k, v = units(x, p, heads)
    return out(rules.decay(q, gate(x, p, "W_beta") * v, k, np.log(gate(x, p, "W_gamma")))[0], p)


def deltanet(x: Array, p: Parameters, heads: int = 4) -> Array:
    """G_t = G_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ."""
    return out(rules.delta(*units(x, p, heads), gate(x, p, "W_beta"))[0], p)


def gated_deltanet(x: Array, p: Parameters, heads: int = 4) -> Array:
    """G_t = γ_t G_{t-1} (I - β_t k_t k_tᵀ) + β_t v_t k_tᵀ."""
    return out(
        rules.delta(*units(x, p, heads), gate(x, p, "W_beta"), np.log(gate(x, p, "W_gamma")))[0],
        p,
    )


def mlstm(x: Array, p: Parameters, heads: int = 4) -> Array:
    """G_t = γ_t G_{t-1} + e^β_t v_t k_tᵀ, z_t = γ_t z_{t-1} + e^β_t k_t, read G_t q_t / max(1, |z_t
    q_t|).
    """
    q, k, v = convolved(x, p, heads)
    gain, decay = linear(x, p, "W_beta")[..., None], np.log(gate(x, p, "W_gamma"))
    return out(rules.mlstm(q, k / np.sqrt(k.shape[3]), v, gain, decay, floor=1.0)[0], p)
