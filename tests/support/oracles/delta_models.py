"""flash-linear-attention's gated DeltaProduct, Comba and MoM, transcribed from their forward
passes: NumPy, float64, token by token. See `oracles.models`.
"""

from __future__ import annotations

import numpy as np

from oracles import rules
from oracles.deltas import products
from oracles.layers import join, linear, rms_norm, sigmoid, silu, softplus, split, unit
from oracles.models import (
    D,
    Fields,
    Shapes,
    Weights,
    convolutions,
    convolved,
    erased,
    of_fla,
    square,
)
from oracles.rules import Array

FLOOR = 1e-6


def short(x: Array, w: Weights, name: str) -> Array:
    return convolved(linear(x, w, f"{name}_proj"), w[f"{name}_conv1d.weight"])


def opened(x: Array, w: Weights, name: str) -> Array:
    """g = -e^A softplus(a + dt), of its head."""
    return np.exp(-np.exp(w["A_log"]) * softplus(linear(x, w, name) + w["dt_bias"]))


def gated_deltaproduct(x: Array, w: Weights, c: Fields) -> Array:
    heads, n, width = c["num_heads"], c["num_householder"], c["head_dim"]
    q, k, v = (short(x, w, name) for name in "qkv")
    q = unit(split(q, heads), FLOOR)
    k = unit(k.reshape(*x.shape[:2], n, heads, width), FLOOR)
    v = v.reshape(*x.shape[:2], n, heads, -1)
    beta = sigmoid(linear(x, w, "b_proj")) * (2 if c["allow_neg_eigval"] else 1)
    beta, alpha = beta.reshape(*x.shape[:2], n, heads), opened(x, w, "a_proj")
    o = products(q * width**-0.5, k, v, beta, alpha)
    o = rms_norm(o, w["o_norm.weight"], c["norm_eps"])
    return linear(join(o) * silu(linear(x, w, "g_proj")), w, "o_proj")


def comba(x: Array, w: Weights, c: Fields) -> Array:
    """p = σ(decay) k and q - D p are normalised after all."""
    q, k, v = (split(short(x, w, name), c["num_heads"]) for name in "qkv")
    p = k * sigmoid(w["decay"])[:, None]
    q, k, p = (unit(z, FLOOR) for z in (q - w["D"][:, None] * p, k, p))
    beta, alpha = sigmoid(linear(x, w, "b_proj")), opened(x, w, "a_proj")
    written, log_alpha = beta[..., None] * k, np.log(alpha)[..., None]
    o, _ = rules.dplr(q * q.shape[3] ** -0.5, written, v, p, log_decay=log_alpha)
    o = rms_norm(o, w["o_norm.weight"], c["norm_eps"])
    return linear(join(o) * sigmoid(linear(x, w, "g_proj")), w, "o_proj")


def mom(x: Array, w: Weights, c: Fields) -> Array:
    """The tokens of a memory one after the other, each sequence and memory on its own; those of
    the shared memory are all.
    """
    logits = linear(x, w, "gate")
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores = scores / scores.sum(-1, keepdims=True)
    o = memory(x, w, c, "shared_{}")
    for b in range(len(x)):
        for m in range(c["num_memories"]):
            chosen = np.argsort(-scores[b], axis=-1, kind="stable")[:, : c["topk"]]
            (places,) = np.nonzero((chosen == m).any(-1))
            if len(places):
                weight = scores[b, places, m] / np.take_along_axis(scores[b], chosen, -1)[
                    places
                ].sum(-1)
                read = memory(x[b : b + 1, places], w, c, f"{{}}_proj.{m}")
                o[b, places] += weight[:, None, None] * read[0]
    o = rms_norm(o, w["o_norm.weight"], c["norm_eps"])
    return linear(join(o) * silu(linear(x, w, "g_proj")), w, "o_proj")


def memory(x: Array, w: Weights, c: Fields, named: str) -> Array:
    """Gated DeltaNet over the tokens x, with projections of these names."""
    q = short(x, w, "q")
    k, v = (convolved(linear(x, w, named.format(n)), w[f"{n}_conv1d.weight"]) for n in "kv")
    q, k, v = (split(z, c["num_heads"]) for z in (q, k, v))
    beta, alpha = sigmoid(linear(x, w, named.format("b"))), opened(x, w, named.format("a"))
    return erased(unit(q, FLOOR), unit(k, FLOOR), v, beta, alpha[..., None])


GATED: Shapes = {"A_log": (2,), "dt_bias": (2,), **convolutions("q", 24)}
PRODUCT: Shapes = {
    **GATED,
    **square("q", 24),
    **square("k", 3 * 24),
    **square("v", 3 * 36),
    **square("a", 2),
    **square("b", 3 * 2),
    **square("g", 36),
    **square("o", D, 36),
    **convolutions("k", 3 * 24),
    **convolutions("v", 3 * 36),
    "o_norm.weight": (18,),
}
COMBA: Shapes = {
    **GATED,
    **square("qk", 24),
    **square("vg", 36),
    **square("ab", 2),
    **square("o", D, 36),
    **convolutions("k", 24),
    **convolutions("v", 36),
    "decay": (2,),
    "D": (2,),
    "o_norm.weight": (18,),
}
ROWS = {"k": 24, "v": 36, "b": 2, "a": 2}
MOM: Shapes = {
    **GATED,
    **square("q", 24),
    **square("g", 36),
    **square("o", D, 36),
    **convolutions("k", 24),
    **convolutions("v", 36),
    **{f"{n}_proj.{m}.weight": (rows, D) for n, rows in ROWS.items() for m in range(3)},
    **{f"shared_{n}.weight": (rows, D) for n, rows in ROWS.items()},
    "gate.weight": (3, D),
    "o_norm.weight": (18,),
}
HEADS = {"num_heads": 2, "head_dim": 12, "expand_v": 1.5}
TRANSCRIPTIONS = {
    "Gated DeltaProduct (fla)": of_fla(
        "gated_deltaproduct",
        gated_deltaproduct,
        PRODUCT,
        **HEADS,
        num_householder=3,
        use_forget_gate=True,
        allow_neg_eigval=True,
    ),
    "Comba (fla)": of_fla("comba", comba, COMBA, **HEADS),
    "MoM (fla)": of_fla(
        *("mom", mom, MOM),
        **HEADS,
        num_memories=3,
        topk=2,
        shared_mem=True,
        single_kv_proj=False,
        mom_backend="gated_deltanet",
    ),
}
