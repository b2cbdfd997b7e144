"""Multi-head latent attention (DeepSeek-V2, 2405.04434, eq. 9-19): NumPy, float64, from the layer's
parameters; keys and values of every head are made of the latent, as the paper defines them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from oracles import rules
from oracles.layers import Parameters, join, linear, rms_norm, sigmoid, split, turned
from oracles.rules import Array


def mla(
    x: Array,
    p: Parameters,
    heads: int = 4,
    width: int = 4,
    gated: bool = False,
    rope: Mapping[str, float] = {},
) -> Array:
    """k_t,i = [W_UK,i c_t, RoPE(W_KR x_t)], v_t,i = W_UV,i c_t, c_t = RMSNorm(W_C x_t)."""
    read = rms_norm(linear(x, p, "W_cq"), p["norm_q.weight"], 1e-6) if "W_cq.weight" in p else x
    q = split(linear(read, p, "W_q"), heads)
    q = np.concatenate([q[..., :width], turned(q[..., width:], **rope)], -1)
    c = rms_norm(linear(x, p, "W_c"), p["norm_c.weight"], 1e-6)
    common = turned(linear(x, p, "W_kr")[:, :, None], **rope)
    o = []
    for head in range(heads):
        k = np.concatenate([(c @ p["W_uk"][head].T)[:, :, None], common], -1)
        v = (c @ p["W_uv"][head].T)[:, :, None]
        o.append(rules.softmax(q[:, :, head : head + 1], k, v)[0])
    gate = sigmoid(linear(x, p, "W_g"))[..., None] if gated else 1
    return linear(join(np.concatenate(o, 2) * gate), p, "W_o")
