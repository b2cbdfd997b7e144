"""flash-linear-attention's RWKV-6, HGRN2, Mamba-2 and Raven, transcribed from their forward passes:
NumPy, float64, token by token. See `oracles.models`.
"""

from __future__ import annotations

import numpy as np

from oracles.layers import join, layer_norm, rms_norm, sigmoid, silu, softplus, split
from oracles.models import (
    D,
    Fields,
    Shapes,
    Transcription,
    V,
    Weights,
    below,
    of_fla,
    outer,
    projected,
    square,
)
from oracles.rules import Array

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


def change(x: Array) -> Array:
    """What a token is behind the one before it."""
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], 1) - x


def time_mixing(x: Array, w: Weights, c: Fields) -> Array:
    delta, heads, rank = change(x), c["num_heads"], c["proj_low_rank_dim"]
    low = np.tanh(projected(x + delta * w["x_proj.0.mu"], w, "x_proj.0.linear"))
    inputs = []
    for n in range(5):
        rise = w["x_proj.2.weight"][:, n * rank : (n + 1) * rank]
        part = low[..., n * rank : (n + 1) * rank] @ rise.T
        inputs.append(x + delta * (part + w["x_bias"][n]))
    r, a, k, v, g = inputs
    r, k, v, g = (
        projected(s, w, f"{name}_proj.linear") for s, name in zip((r, k, v, g), "rkvg", strict=True)
    )
    a = projected(np.tanh(projected(a, w, "w_proj.linear.lora.0")), w, "w_proj.linear.lora.2")
    r, k, v, alpha = (split(s, heads) for s in (r, k, v, np.exp(-np.exp(a))))
    S, o = np.zeros((*k.shape[::2], k.shape[3], v.shape[3])), np.zeros_like(v)
    for t in range(x.shape[1]):
        kv = outer(k[:, t], v[:, t])
        o[:, t] = np.einsum("bhk,bhkv->bhv", r[:, t], S + w["bonus"][None, :, :, None] * kv)
        S = alpha[:, t, :, :, None] * S + kv
    o = join(layer_norm(o, 1.0, c["norm_eps"])) * w["g_norm.weight"] + w["g_norm.bias"]
    return projected(o * silu(g), w, "o_proj")


def channel_mixing(x: Array, w: Weights) -> Array:
    k, r = (
        projected(x + change(x) * w[f"{name}.mu"], w, f"{name}.linear")
        for name in ("key", "receptance")
    )
    return sigmoid(r) * projected(np.maximum(k, 0) ** 2, w, "value")


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
        mlp = below(layer, "mlp")
        z = silu(projected(z, mlp, "gate_proj")) * projected(z, mlp, "up_proj")
        x = x + projected(z, mlp, "down_proj")
    return rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def hgrn2_mixer(x: Array, w: Weights, c: Fields, least: Array) -> Array:
    heads = c["hidden_size"] // c["expand_ratio"]
    alpha = split(least + (1 - least) * sigmoid(projected(x, w, "f_proj")), heads)
    q, v = split(silu(projected(x, w, "q_proj")), heads), split(projected(x, w, "i_proj"), heads)
    S, o = np.zeros((*q.shape[::2], q.shape[3], v.shape[3])), np.zeros_like(v)
    for t in range(x.shape[1]):
        S = alpha[:, t, :, :, None] * S + outer(1 - alpha[:, t], v[:, t])
        o[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[3] ** -0.5, S)
    return projected(rms_norm(join(o), w["g_norm.weight"], c["norm_eps"]), w, "o_proj")


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
    z, xBC, dt = np.split(projected(u, w, "in_proj"), [WIDTH, WIDTH + CONVOLVED], axis=-1)
    xBC = convolved_with_bias(xBC, w)
    x, B, C = np.split(xBC, [WIDTH, WIDTH + GROUPS * STATE], axis=-1)
    served = HEADS // GROUPS
    x = split(x, HEADS)
    B, C = (np.repeat(split(s, GROUPS), served, axis=2) for s in (B, C))
    dt = softplus(dt + w["dt_bias"])
    h, y = np.zeros((len(u), HEADS, STATE, WIDTH // HEADS)), np.zeros_like(x)
    for t in range(u.shape[1]):
        kept = np.exp(-dt[:, t] * np.exp(w["A_log"]))[..., None, None]
        h = kept * h + outer(B[:, t], dt[:, t, :, None] * x[:, t])
        y[:, t] = np.einsum("bhn,bhnp->bhp", C[:, t], h) + w["D"][:, None] * x[:, t]
    y = split(join(y) * silu(z), GROUPS)
    y = join(y / np.sqrt((y**2).mean(-1, keepdims=True) + c["norm_eps"])) * w["norm.weight"]
    return projected(y, w, "out_proj")


def convolved_with_bias(x: Array, w: Weights) -> Array:
    """SiLU of a causal depthwise Conv1d and its bias."""
    weight, bias = w["conv1d.weight"], w["conv1d.bias"]
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        for lag in range(min(weight.shape[2], t + 1)):
            y[:, t] += weight[:, 0, weight.shape[2] - 1 - lag] * x[:, t - lag]
    return silu(y + bias)


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
    """K_t = diag(α_t) K_{t-1} + (1 - α_t)ᵀ k_t, V_t likewise; o_t = softmax(q_t K_tᵀ) V_t, where
    α_t < 1 in the slots that a router chooses.
    """
    q, k, v, router = (split(projected(x, w, f"{n}_proj"), c["num_heads"]) for n in "qkvr")
    q, k = (
        rms_norm(silu(z), w[f"{n}_norm.weight"], c["norm_eps"]) for z, n in ((q, "q"), (k, "k"))
    )
    decay = np.exp(w["A_log"]) * softplus(projected(x, w, "a_proj") + w["dt_bias"])
    scores, share = sigmoid(router), np.zeros_like(router)
    K = V = np.zeros((*q.shape[::2], router.shape[3], q.shape[3]))
    o = np.zeros_like(v)
    for b, t, h in np.ndindex(router.shape[:3]):
        best = np.argsort(-scores[b, t, h])[: c["topk"]]
        share[b, t, h, best] = scores[b, t, h, best] / (scores[b, t, h, best].sum() + 1e-9)
    alpha = np.exp(-decay[..., None] * share)
    for t in range(x.shape[1]):
        kept, written = alpha[:, t, :, :, None], 1 - alpha[:, t]
        K, V = kept * K + outer(written, k[:, t]), kept * V + outer(written, silu(v[:, t]))
        weights = np.exp(np.einsum("bhk,bhmk->bhm", q[:, t], K))
        o[:, t] = np.einsum("bhm,bhmv->bhv", weights / weights.sum(-1, keepdims=True), V)
    return projected(rms_norm(join(silu(o)), w["g_norm.weight"], c["norm_eps"]), w, "o_proj")


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
