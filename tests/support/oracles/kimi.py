"""Kimi Delta Attention (2510.26692, section 3): NumPy, float64, from the layer's parameters."""

from __future__ import annotations

import numpy as np

from oracles import rules
from oracles.layers import (
    Parameters,
    join,
    linear,
    rms_norm,
    short,
    sigmoid,
    softplus,
    split,
    unit,
)
from oracles.rules import Array


def kda(
    x: Array,
    p: Parameters,
    heads: int = 4,
    value_heads: int | None = None,
    negative: bool = False,
    lowest: float | None = None,
    low_rank: bool = True,
    eps: float = 1e-5,
) -> Array:
    """S_t = (I - β_t k_tᵀ k_t) Diag(α_t) S_{t-1} + β_t k_tᵀ v_t (eq. 1); α of every channel, gates
    through low rank (eq. 10); o = W_o (σ(W_g x) ⊙ RMSNorm(q S / √d_k)) (eq. 11).
    """
    count = value_heads or heads
    q, k, v = (short(x, p, n) for n in "qkv")
    q, k = (unit(split(z, heads), 1e-6).repeat(count // heads, axis=2) for z in (q, k))
    z = split(_through(x, p, "W_alpha", low_rank) + p["b_alpha"], count)
    a = np.exp(p["log_a"])[:, None]
    log_decay = -a * softplus(z) if lowest is None else -lowest * sigmoid(a * z)
    beta = (2 if negative else 1) * sigmoid(linear(x, p, "W_beta"))[..., None]
    o, _ = rules.delta(q / np.sqrt(q.shape[3]), k, split(v, count), beta, log_decay)
    gate = sigmoid(_through(x, p, "W_g", low_rank))
    return linear(join(rms_norm(o, p["norm.weight"], eps)) * gate, p, "W_o")


def _through(x: Array, p: Parameters, name: str, low_rank: bool) -> Array:
    return linear(linear(x, p, f"{name}.0"), p, f"{name}.1") if low_rank else linear(x, p, name)
