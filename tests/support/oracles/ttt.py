"""Test-time training as its paper writes it: NumPy, float64, token by token; nothing here uses the
library.
"""

from __future__ import annotations

from itertools import pairwise
from math import pi, sqrt

import numpy as np

from oracles.layers import Parameters, convolution, join, layer_norm, linear, sigmoid, split, turned
from oracles.rules import Array, spread

Network = list[tuple[Array, Array]]
"""(W, b) of every layer."""


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


def gelu_slope(x: Array) -> Array:
    inside = sqrt(2 / pi) * (x + 0.044715 * x**3)
    slope = sqrt(2 / pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + np.tanh(inside)) + 0.5 * x * slope * (1 - np.tanh(inside) ** 2)


def apply(network: Network, x: Array) -> tuple[Array, list[Array], list[Array]]:
    """The output, and the inputs and outputs of the layers before GELU."""
    inputs, outputs = [], []
    for number, (W, b) in enumerate(network):
        x = gelu(x) if number else x
        inputs.append(x)
        x = x @ W + b
        outputs.append(x)
    return x, inputs, outputs


def normalize(y: Array, eps: float) -> tuple[Array, Array]:
    """(y - mean) / σ, and its Jacobian matrix."""
    n, centre = len(y), np.eye(len(y)) - 1 / len(y)
    sigma = np.sqrt(y.var() + eps)
    standard = centre @ y / sigma
    return standard, centre / sigma - np.outer(standard, standard) / (n * sigma)


def gradient(
    network: Network, k: Array, v: Array, gain: Array, shift: Array, eps: float
) -> Network:
    """∇ ½ ‖k + LN(network(k)) - v‖² of every W and b."""
    y, inputs, outputs = apply(network, k)
    standard, jacobian = normalize(y, eps)
    error = jacobian.T @ (gain * (k + gain * standard + shift - v))
    found = []
    for number in reversed(range(len(network))):
        found.insert(0, (np.outer(inputs[number], error), error))
        if number:
            error = gelu_slope(outputs[number - 1]) * (network[number][0] @ error)
    return found


def unpack(numbers: Array, widths: list[int]) -> Network:
    """(W, b) of every layer from ``[p]``: each a matrix, row by row, and a bias."""
    found, first = [], 0
    for i, o in pairwise(widths):
        W = numbers[first : first + i * o].reshape(i, o)
        found.append((W, numbers[first + i * o : first + (i + 1) * o]))
        first += (i + 1) * o
    return found


def ttt(
    q: Array,
    k: Array,
    v: Array,
    rate: Array,
    scale: Array,
    start: Array,
    gain: Array,
    shift: Array,
    hidden: tuple[int, ...] = (),
    size: int = 16,
    eps: float = 1e-6,
    state: tuple[Array, ...] | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """W_t = W - s_t Σ_{s≤t} η_s ∇ℓ(W; k_s, v_s) over the minibatch, o_t = q_t + LN(f(q_t; W_t))."""
    (b, t, h), (q, k, v, rate, scale) = spread(q, k, v, rate, scale)
    widths = [q.shape[3], *hidden, q.shape[3]]
    depth = len(widths) - 1
    shapes = [(b, h, i + 1, o) for i, o in pairwise(widths)]
    given = [np.zeros(shape) for shape in shapes * 2] if state is None else state[:-1]
    given = [
        np.array(np.broadcast_to(s, shape)) for s, shape in zip(given, shapes * 2, strict=True)
    ]
    counts = np.broadcast_to(0 if state is None else state[-1], b).astype(int).copy()
    o = np.zeros((b, t, h, widths[0]))
    for row, head in np.ndindex(b, h):
        first = unpack(start[head % len(start)], widths)
        g, s = gain[head % len(gain)], shift[head % len(shift)]
        read = counts[row]
        moved, sums = ([(m[row, head, :-1], m[row, head, -1]) for m in part]
                       for part in (given[:depth], given[depth:]))  # fmt: skip
        network = [(W + D, c + d) for (W, c), (D, d) in zip(first, moved, strict=True)]
        for i in range(t):
            at = (row, i, head)
            new = gradient(network, k[at], v[at], g, s, eps)
            sums = [(G + rate[at] * D, c + rate[at] * d)
                    for (G, c), (D, d) in zip(sums, new, strict=True)]  # fmt: skip
            now = [(W - scale[at] * G, c - scale[at] * e)
                   for (W, c), (G, e) in zip(network, sums, strict=True)]  # fmt: skip
            o[at] = q[at] + g * normalize(apply(now, q[at])[0], eps)[0] + s
            read += 1
            if read == size:
                network, read = now, 0
                sums = [(np.zeros_like(G), np.zeros_like(c)) for G, c in sums]
        for number in range(depth):
            W, c = network[number]
            given[number][row, head] = np.vstack([W - first[number][0], c - first[number][1]])
            given[depth + number][row, head] = np.vstack(sums[number])
    return o, (*given, (counts + t) % size)


def learner(
    x: Array,
    p: Parameters,
    heads: int = 4,
    minibatch: int = 16,
    rate: float = 1.0,
    conv: int = 4,
    gated: bool = True,
    eps: float = 1e-6,
    expand: int | None = None,
) -> Array:
    """The paper's layer, with a hidden layer if `expand` is given: q and k by convolutions of one
    projection, or projections of their own; turned by the place in the minibatch.
    """
    q, v = linear(x, p, "W_q"), linear(x, p, "W_v")
    k = q if conv else linear(x, p, "W_k")
    if conv:
        q = convolution(q, p["conv_q.weight"]) + p["b_q"]
        k = convolution(k, p["conv_k.weight"]) + p["b_k"]
    q, k, v = (split(s, heads) for s in (q, k, v))
    width, place = q.shape[3], np.arange(x.shape[1]) % minibatch
    for first in range(0, x.shape[1], minibatch):
        here = slice(first, first + minibatch)
        q[:, here], k[:, here] = turned(q[:, here]), turned(k[:, here])
    eta = rate * sigmoid(linear(x, p, "W_eta"))[..., None] / width
    scale = np.maximum(1 / (place + 1) + p["c"][place], 0)[None, :, None, None]
    hidden = () if expand is None else (expand * width,)
    o, _ = ttt(q, k, v, eta, scale, p["W_0"], p["gain"], p["shift"], hidden, minibatch, eps)
    y = layer_norm(join(o), p["norm.weight"], eps) + p["norm.bias"]
    return linear(y * gelu(linear(x, p, "W_g")) if gated else y, p, "W_o")
