"""flash-linear-attention's RWKV-6, HGRN2, Mamba-2 and Raven, transcribed from their forward passes:
NumPy, float64, token by token. See `oracles.models`.
"""

from __future__ import annotations

import numpy as np

from oracles import rules
from oracles.layers import (
    convolution,
    join,
    layer_norm,
    linear,
    rms_norm,
    sigmoid,
    silu,
    softplus,
    split,
)
from oracles.models import (
    D,
    Fields,
    Shapes,
    Transcription,
    V,
    Weights,
    below,
    decayed,
    of_fla,
    square,
    swiglu,
)
from oracles.rules import Array
from oracles.rwkv7 import shifted
from oracles.slots import slots
from oracles.state_space import ssd

# RWKV-6


def rwkv6(ids: Array, w: Weights, c: Fields) -> Array:
    def norm(x: Array, name: str) -> Array:
        return layer_norm(x, w[f"{name}.weight"], c["norm_eps"]) + w[f"{name}.bias"]

    x = norm(w["model.embeddings.weight"][ids], "model.layers.0.pre_norm")
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        x = x + time_mixing(norm(x, f"{layer}.attn_norm"), below(w, f"{layer}.attn"), c)
        x = x + channel_mixing(norm(x, f"{layer}.ffn_norm"), below(w, f"{layer}.ffn"))
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def time_mixing(x: Array, w: Weights, c: Fields) -> Array:
    heads, rank = c["num_heads"], c["proj_low_rank_dim"]
    low = np.tanh(linear(shifted(x, w["x_proj.0.mu"]), w, "x_proj.0.linear"))
    inputs = []
    for n in range(5):
        rise = w["x_proj.2.weight"][:, n * rank : (n + 1) * rank]
        part = low[..., n * rank : (n + 1) * rank] @ rise.T
        inputs.append(shifted(x, part + w["x_bias"][n]))
    r, a, k, v, g = inputs
    r, k, v, g = (
        linear(s, w, f"{name}_proj.linear") for s, name in zip((r, k, v, g), "rkvg", strict=True)
    )
    a = linear(np.tanh(linear(a, w, "w_proj.linear.lora.0")), w, "w_proj.linear.lora.2")
    r, k, v, alpha = (split(s, heads) for s in (r, k, v, np.exp(-np.exp(a))))
    own = (r * w["bonus"] * k).sum(-1, keepdims=True)
    o, _ = rules.bonus(r, k, v, own, np.log(alpha))
    o = join(layer_norm(o, 1.0, c["norm_eps"])) * w["g_norm.weight"] + w["g_norm.bias"]
    return linear(o * silu(g), w, "o_proj")


def channel_mixing(x: Array, w: Weights) -> Array:
    k, r = (
        linear(shifted(x, w[f"{name}.mu"]), w, f"{name}.linear") for name in ("key", "receptance")
    )
    return sigmoid(r) * linear(np.maximum(k, 0) ** 2, w, "value")


RANK, DECAY_RANK, KEYS, HIDDEN = 3, 5, D // 2, 96
LERPS = {"r": KEYS, "k": KEYS, "v": D, "g": D}
RWKV6_LAYER: Shapes = {
    **{f"{name}_norm.{part}": (D,) for name in ("attn", "ffn") for part in ("weight", "bias")},
    **{f"attn.{name}_proj.linear.weight": (rows, D) for name, rows in LERPS.items()},
    "attn.x_proj.0.mu": (D,),
    "attn.x_proj.0.linear.weight": (5 * RANK, D),
    "attn.x_proj.2.weight": (D, 5 * RANK),
    "attn.x_bias": (5, D),
    "attn.w_proj.linear.lora.0.weight": (DECAY_RANK, D),
    "attn.w_proj.linear.lora.2.weight": (KEYS, DECAY_RANK),
    "attn.w_proj.linear.lora.2.bias": (KEYS,),
    "attn.bonus": (4, KEYS // 4),
    "attn.g_norm.weight": (D,),
    "attn.g_norm.bias": (D,),
    "attn.o_proj.weight": (D, D),
    "ffn.key.mu": (D,),
    "ffn.key.linear.weight": (HIDDEN, D),
    "ffn.receptance.mu": (D,),
    "ffn.receptance.linear.weight": (D, D),
    "ffn.value.weight": (D, HIDDEN),
}
RWKV6 = Transcription(
    {
        "model_type": "rwkv6",
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "proj_low_rank_dim": RANK,
        "gate_low_rank_dim": DECAY_RANK,
        "hidden_ratio": 2.6,
        "intermediate_size": None,
        "norm_eps": 1e-4,
        "norm_first": True,
        "norm_bias": True,
    },
    {
        "model.embeddings.weight": (V, D),
        "lm_head.weight": (V, D),
        **{f"model.norm.{part}": (D,) for part in ("weight", "bias")},
        **{f"model.layers.0.pre_norm.{part}": (D,) for part in ("weight", "bias")},
        **{f"model.layers.{i}.{name}": s for i in range(2) for name, s in RWKV6_LAYER.items()},
    },
    rwkv6,
)

# HGRN2


def hgrn2(ids: Array, w: Weights, c: Fields) -> Array:
    """The stack of fla, whose layers get their row of the least decays."""
    x, eps = w["model.embeddings.weight"][ids], c["norm_eps"]
    shares = np.exp(w["model.lower_bounds"])
    shares = shares / shares.sum(0)
    for i in range(c["num_hidden_layers"]):
        layer = below(w, f"model.layers.{i}")
        least = shares[: i + 1].sum(0) - shares[0]
        x = x + hgrn2_mixer(
            rms_norm(x, layer["attn_norm.weight"], eps), below(layer, "attn"), c, least
        )
        z = rms_norm(x, layer["mlp_norm.weight"], eps)
        x = x + swiglu(z, below(layer, "mlp"), "gate_proj", "up_proj", "down_proj")
    return rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def hgrn2_mixer(x: Array, w: Weights, c: Fields, least: Array) -> Array:
    heads = c["hidden_size"] // c["expand_ratio"]
    alpha = split(least + (1 - least) * sigmoid(linear(x, w, "f_proj")), heads)
    q, v = split(silu(linear(x, w, "q_proj")), heads), split(linear(x, w, "i_proj"), heads)
    o = decayed(q, 1 - alpha, v, alpha)
    return linear(rms_norm(join(o), w["g_norm.weight"], c["norm_eps"]), w, "o_proj")


STACK = of_fla("hgrn2", hgrn2_mixer, {**square("qfio"), "g_norm.weight": (D,)})
HGRN2 = Transcription(
    {
        **STACK.config,
        "num_hidden_layers": 3,
        "norm_eps": 1e-2,
        "expand_ratio": D // 4,
        "use_lower_bound": True,
    },
    {
        **STACK.shapes,
        **{
            name.replace(".1.", ".2.", 1): shape
            for name, shape in STACK.shapes.items()
            if ".layers.1." in name
        },
        "model.lower_bounds": (3, D),
    },
    hgrn2,
)

# Mamba-2

HEADS, GROUPS, STATE, WIDTH = 4, 2, 6, 2 * D
CONVOLVED = WIDTH + 2 * GROUPS * STATE


def mamba2(ids: Array, w: Weights, c: Fields) -> Array:
    x = w["backbone.embeddings.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        layer = below(w, f"backbone.layers.{i}")
        z = rms_norm(x, layer["norm.weight"], c["norm_eps"])
        x = x + mamba2_mixer(z, below(layer, "mixer"), c)
    return rms_norm(x, w["backbone.norm_f.weight"], c["norm_eps"]) @ w["lm_head.weight"].T


def mamba2_mixer(u: Array, w: Weights, c: Fields) -> Array:
    z, xBC, dt = np.split(linear(u, w, "in_proj"), [WIDTH, WIDTH + CONVOLVED], axis=-1)
    xBC = silu(convolution(xBC, w["conv1d.weight"][:, 0].T) + w["conv1d.bias"])
    x, B, C = np.split(xBC, [WIDTH, WIDTH + GROUPS * STATE], axis=-1)
    x, B, C = split(x, HEADS), split(B, GROUPS), split(C, GROUPS)
    dt = softplus(dt + w["dt_bias"])
    y = ssd(x, B, C, np.exp(-dt * np.exp(w["A_log"])), dt, w["D"])
    y = split(join(y) * silu(z), GROUPS)
    y = join(y / np.sqrt((y**2).mean(-1, keepdims=True) + c["norm_eps"])) * w["norm.weight"]
    return linear(y, w, "out_proj")


MAMBA2_LAYER: Shapes = {
    "norm.weight": (D,),
    "mixer.in_proj.weight": (WIDTH + CONVOLVED + HEADS, D),
    "mixer.conv1d.weight": (CONVOLVED, 1, 4),
    "mixer.conv1d.bias": (CONVOLVED,),
    "mixer.dt_bias": (HEADS,),
    "mixer.A_log": (HEADS,),
    "mixer.D": (HEADS,),
    "mixer.norm.weight": (WIDTH,),
    "mixer.out_proj.weight": (D, WIDTH),
}
MAMBA2 = Transcription(
    {
        "model_type": "mamba2",
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "state_size": STATE,
        "n_groups": GROUPS,
        "expand": 2,
        "norm_eps": 1e-2,
        "rmsnorm": True,
        "norm_before_gate": False,
        "D_has_hdim": False,
        "dt_limit": [0.0, float("inf")],
        "tie_word_embeddings": False,
    },
    {
        "backbone.embeddings.weight": (V, D),
        "backbone.norm_f.weight": (D,),
        "lm_head.weight": (V, D),
        **{f"backbone.layers.{i}.{n}": s for i in range(2) for n, s in MAMBA2_LAYER.items()},
    },
    mamba2,
)

# Raven


def raven(x: Array, w: Weights, c: Fields) -> Array:
    """α_t < 1 in the slots that a router chooses."""
    q, k, v, router = (split(linear(x, w, f"{n}_proj"), c["num_heads"]) for n in "qkvr")
    q, k = (
        rms_norm(silu(z), w[f"{n}_norm.weight"], c["norm_eps"]) for z, n in ((q, "q"), (k, "k"))
    )
    decay = np.exp(w["A_log"]) * softplus(linear(x, w, "a_proj") + w["dt_bias"])
    scores, share = sigmoid(router), np.zeros_like(router)
    for b, t, h in np.ndindex(router.shape[:3]):
        best = np.argsort(-scores[b, t, h])[: c["topk"]]
        share[b, t, h, best] = scores[b, t, h, best] / (scores[b, t, h, best].sum() + 1e-9)
    log_alpha = -decay[..., None] * share
    o, _ = slots(q, k, silu(v), 1 - np.exp(log_alpha), log_alpha)
    return linear(rms_norm(join(silu(o)), w["g_norm.weight"], c["norm_eps"]), w, "o_proj")


RAVEN = of_fla(
    "raven",
    raven,
    {
        **square("qkvo"),
        **square("r", 4 * 6),
        **square("a", 4),
        **{f"{name}_norm.weight": (D // 4,) for name in "qk"},
        **dict.fromkeys(("A_log", "dt_bias"), (4,)),
        "g_norm.weight": (D,),
    },
    num_kv_heads=None,
    num_slots=6,
    topk=3,
    expand_k=1,
    expand_v=1,
    feature_map="swish",
    decay_type="Mamba2",
    router_score="sigmoid",
    router_type="lin",
)

TRANSCRIPTIONS = {
    "RWKV-6 (fla)": RWKV6,
    "HGRN2 (fla)": HGRN2,
    "Mamba-2 (fla)": MAMBA2,
    "Raven (fla)": RAVEN,
}
