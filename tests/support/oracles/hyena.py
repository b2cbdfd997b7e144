"""Hyena as its paper writes it: NumPy, float64, the convolution itself; nothing here uses the
library.
"""

from __future__ import annotations

import numpy as np

from oracles.layers import Parameters, convolution, join, linear, split
from oracles.rules import Array


def implicit_filter(
    p: Parameters, heads: int, length: int, bands: int, prefix: str = "filter."
) -> Array:
    """h ``[h l]`` (2302.10866, section 3.3): a sine network of positions, times a window."""
    h = np.zeros((heads, length))
    rates = np.linspace(np.log(0.01) / 1.5, np.log(0.01) / 0.3, heads)
    for tau in range(length):
        t = np.linspace(0, 1, length)[tau]
        w = 2 * np.pi * tau / length
        turns = np.exp(-1j * np.linspace(1e-4, bands - 1, bands) * w)
        z = np.concatenate([[t], turns.real, turns.imag])
        for i in range(3):
            z = np.sin(p[f"{prefix}omega"] * linear(z, p, f"{prefix}hidden.{i}"))
        h[:, tau] = linear(z, p, f"{prefix}last") * np.exp(-t * np.abs(rates))
    return h


def hyena(x: Array, p: Parameters, heads: int = 8, length: int = 1024, bands: int = 16) -> Array:
    """y = q · (h * (k ⊗ v) + D k ⊗ v) for every head, whose channels share a filter."""
    projected = np.concatenate([linear(x, p, f"W_{name}") for name in "qkv"], -1)
    convolved = convolution(projected, p["conv.weight"]) + p["conv_bias"]
    q, k, v = (split(s, heads) for s in np.split(convolved, 3, -1))
    h, o = implicit_filter(p, heads, length, bands), np.zeros_like(v)
    for b, head in np.ndindex(x.shape[0], heads):
        for i, j in np.ndindex(k.shape[3], v.shape[3]):
            kv = k[b, :, head, i] * v[b, :, head, j]
            seen = np.convolve(kv, h[head])[: len(kv)] + p["filter.D"][head] * kv
            o[b, :, head, j] += q[b, :, head, i] * seen
    return linear(join(o), p, "W_o")
