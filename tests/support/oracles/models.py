"""Models whose own code does not run here, transcribed from its description: NumPy, float64, token
by token.

Each is a function of config.json's fields, the weights by the names of their checkpoints, and ``ids
[b t]``; it gives logits ``[b t vocab]``. Nothing here uses the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

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
    turned,
    unit,
)
from oracles.loglinear import log_linear_mamba2
from oracles.rules import Array
from oracles.rwkv7 import shifted
from oracles.slots import slots

Fields = Mapping[str, Any]
Weights = Mapping[str, Array]
Attention = Callable[[Array, Weights, Fields], Array]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Transcription:
    """A published model: its config.json, the shapes of its weights, and its forward pass."""

    config: dict[str, Any]
    shapes: Shapes
    forward: Callable[[Array, Weights, Fields], Array]

    def save(self, folder: Path, dtype: torch.dtype) -> dict[str, Array]:
        """A checkpoint with random weights, as its authors would write it; returns the weights."""
        generator = torch.Generator().manual_seed(0)
        weights = {}
        for name, shape in self.shapes.items():
            scale = 0.3 if len(shape) == 1 else np.prod(shape[1:]) ** -0.5
            drawn = torch.randn(shape, generator=generator) * scale + (len(shape) == 1)
            weights[name] = drawn.to(dtype)
        folder.mkdir()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))
        return {name: weight.double().numpy() for name, weight in weights.items()}

    def logits(self, weights: Weights, ids: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.forward(ids.numpy(), weights, self.config))


def below(weights: Weights, prefix: str) -> Weights:
    """The weights of a module, named within it."""
    return {
        name.removeprefix(f"{prefix}."): w
        for name, w in weights.items()
        if name.startswith(f"{prefix}.")
    }


def convolved(x: Array, weight: Array) -> Array:
    """SiLU of a causal depthwise Conv1d of weight ``[c 1 size]``, whose last tap is the present."""
    return silu(convolution(x, weight[:, 0].T))


# MetaLA (BICLab) ----------------------------------------------------------------------------------


def metala(ids: Array, w: Weights, c: Fields) -> Array:
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["decoder_layers"]):
        layer = below(w, f"model.layers.{i}")
        x = x + metala_mixer(
            rms_norm(x, 1.0, 1e-6), below(layer, "token_mixer"), c["decoder_attention_heads"]
        )
        x = x + swiglu(rms_norm(x, 1.0, 1e-6), below(layer, "channel_mixer"), "l1", "l2", "l3")
    return rms_norm(x, 1.0, 1e-6) @ w["lm_head.weight"].T


def metala_mixer(x: Array, w: Weights, heads: int) -> Array:
    """One convolution before all; α = σ(a)^(1/16), k = 1 - α; q scaled in q S, unscaled in the
    augmentation.
    """
    x = convolved(x, w["conv1d.weight"])
    q, a, v = (split(linear(x, w, name), heads) for name in ("q_proj", "k_gate", "v_proj"))
    alpha = sigmoid(a) ** (1 / 16)
    k, aug = 1 - alpha, split(w["aug_balance"][None, None], heads)
    own = sigmoid((q * k * aug).sum(-1, keepdims=True) * v)
    o = decayed(q, k, v, alpha) + own
    return linear(silu(linear(x, w, "g_proj")) * join(layer_norm(o)), w, "out_proj")


def swiglu(x: Array, w: Weights, gate: str, up: str, down: str) -> Array:
    return linear(silu(linear(x, w, gate)) * linear(x, w, up), w, down)


# flash-linear-attention ---------------------------------------------------------------------------


def fla(mixer: Attention) -> Callable[[Array, Weights, Fields], Array]:
    """The stack that its models share, with softmax attention in the layers that `attn` lists."""

    def forward(ids: Array, w: Weights, c: Fields) -> Array:
        x = w["model.embeddings.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            layer, mix = below(w, f"model.layers.{i}"), mixer
            if c.get("attn") and i in c["attn"]["layers"]:
                mix = softmax
            x = x + mix(
                rms_norm(x, layer["attn_norm.weight"], c["norm_eps"]), below(layer, "attn"), c
            )
            z = rms_norm(x, layer["mlp_norm.weight"], c["norm_eps"])
            x = x + swiglu(z, below(layer, "mlp"), "gate_proj", "up_proj", "down_proj")
        return rms_norm(x, w["model.norm.weight"], c["norm_eps"]) @ w["lm_head.weight"].T

    return forward


def softmax(x: Array, w: Weights, c: Fields) -> Array:
    heads, groups, window = (
        c["attn"][name] for name in ("num_heads", "num_kv_heads", "window_size")
    )
    q, k, v = (
        split(linear(x, w, f"{n}_proj"), h) for n, h in (("q", heads), ("k", groups), ("v", groups))
    )
    q, k = turned(q, c["attn"]["rope_theta"]), turned(k, c["attn"]["rope_theta"])
    o, _ = rules.softmax(q, k, v, window)
    return linear(join(o), w, "o_proj")


def decayed(q: Array, k: Array, v: Array, alpha: Array) -> Array:
    """o_t = d_k^(-1/2) q_t S_t of S_t = diag(α_t) S_{t-1} + k_tᵀ v_t; ``alpha [b t h k]``."""
    return rules.decay(q * q.shape[3] ** -0.5, v, k, np.log(alpha))[0]


def erased(q: Array, k: Array, v: Array, beta: Array, alpha: Array) -> Array:
    """o_t = d_k^(-1/2) q_t S_t of S_t = diag(α_t) S_{t-1} + β_t k_tᵀ (v_t - k_t diag(α_t) S_{t-1});
    ``alpha [b t h 1|k], beta [b t h]``.
    """
    return rules.delta(q * q.shape[3] ** -0.5, k, v, beta[..., None], np.log(alpha))[0]


def gla(x: Array, w: Weights, c: Fields) -> Array:
    q, k, v = (split(linear(x, w, f"{n}_proj"), c["num_heads"]) for n in "qkv")
    gate = split(linear(linear(x, w, "gk_proj.0"), w, "gk_proj.1"), c["num_heads"])
    o = rms_norm(
        decayed(q, k, v, sigmoid(gate) ** (1 / 16)), w["g_norm_swish_gate.weight"], c["norm_eps"]
    )
    return linear(join(o) * silu(linear(x, w, "g_proj")), w, "o_proj")


def retnet(x: Array, w: Weights, c: Fields) -> Array:
    q, k, v = (split(linear(x, w, f"{n}_proj"), c["num_heads"]) for n in "qkv")
    gamma = np.array([1 - 2.0 ** (-5 - h) for h in range(c["num_heads"])])[None, None, :, None]
    o = decayed(turned(q), turned(k), v, np.broadcast_to(gamma, q.shape))
    o = rms_norm(o, w["g_norm_swish_gate.weight"], c["norm_eps"])
    return linear(join(o) * silu(linear(x, w, "g_proj")), w, "o_proj")


def gsa(x: Array, w: Weights, c: Fields) -> Array:
    served = c["num_heads"] // c["num_kv_heads"]
    q = silu(split(linear(x, w, "q_proj"), c["num_heads"]))
    k, v = (silu(split(linear(x, w, f"{n}_proj"), c["num_kv_heads"])) for n in "kv")
    alpha = sigmoid(split(linear(x, w, "f_proj"), c["num_kv_heads"]))
    alpha = alpha ** (1 / c["gate_logit_normalizer"])
    k, v, alpha = (np.repeat(z, served, axis=2) for z in (k, v, alpha))
    o, _ = slots(q, k, v, 1 - alpha, np.log(alpha))
    return linear(rms_norm(join(silu(o)), w["g_norm.weight"], 1e-5), w, "o_proj")


def delta_net(x: Array, w: Weights, c: Fields) -> Array:
    q, k, v = (
        split(convolved(linear(x, w, f"{n}_proj"), w[f"{n}_conv1d.weight"]), c["num_heads"])
        for n in "qkv"
    )
    beta = sigmoid(linear(x, w, "b_proj")) * (2 if c["allow_neg_eigval"] else 1)
    o = erased(unit(q, 1e-6), unit(k, 1e-6), v, beta, np.ones_like(beta)[..., None])
    return linear(join(rms_norm(o, w["o_norm.weight"], c["norm_eps"])), w, "o_proj")


def gated_deltanet(x: Array, w: Weights, c: Fields) -> Array:
    q, k, v = (convolved(linear(x, w, f"{n}_proj"), w[f"{n}_conv1d.weight"]) for n in "qkv")
    served = c["num_v_heads"] // c["num_heads"]
    q, k = (np.repeat(unit(split(z, c["num_heads"]), 1e-6), served, axis=2) for z in (q, k))
    alpha = np.exp(-np.exp(w["A_log"]) * softplus(linear(x, w, "a_proj") + w["dt_bias"]))
    o = erased(q, k, split(v, c["num_v_heads"]), sigmoid(linear(x, w, "b_proj")), alpha[..., None])
    o = rms_norm(o, w["o_norm.weight"], c["norm_eps"])
    return linear(join(o) * silu(linear(x, w, "g_proj")), w, "o_proj")


def rwkv7(ids: Array, w: Weights, c: Fields) -> Array:
    """The stack of RWKV-7, whose first layer's values the others mix theirs with."""
    pre, last = "model.layers.0.pre_norm", "model.norm"
    x, first = biased_norm(w["model.embeddings.weight"][ids], w, pre, c["norm_eps"]), None
    for i in range(c["num_hidden_layers"]):
        layer = below(w, f"model.layers.{i}")
        y, first = goose(
            biased_norm(x, layer, "attn_norm", c["norm_eps"]), below(layer, "attn"), c, first
        )
        x = x + y
        z = shifted(biased_norm(x, layer, "ffn_norm", c["norm_eps"]), layer["ffn.x_k"])
        x = x + linear(np.maximum(linear(z, layer, "ffn.key"), 0) ** 2, layer, "ffn.value")
    return linear(biased_norm(x, w, last, c["norm_eps"]), w, "lm_head")


def goose(x: Array, w: Weights, c: Fields, first: Array | None) -> tuple[Array, Array]:
    """S_t = S_{t-1} (diag(w) - κ̂ᵀ (κ̂ ⊙ a)) + vᵀ k of a matrix [v, k]; and the first layer's v."""
    xr, xw, xk, xv, xa, xg = (shifted(x, w[f"x_{n}"]) for n in "rwkvag")
    alpha = np.exp(-0.6065306597126334 * sigmoid(lora(xw, w, "w", np.tanh)))
    r, k, v = linear(xr, w, "r_proj"), linear(xk, w, "k_proj"), linear(xv, w, "v_proj")
    first = v if first is None else first
    v = v if first is v else v + (first - v) * sigmoid(lora(xv, w, "v"))
    a = sigmoid(lora(xa, w, "a"))
    heads = c["hidden_size"] // c["head_dim"]
    unit_keys = unit(split(k * w["k_k"], heads), 1e-6)
    r, k, v, a, alpha = (split(z, heads) for z in (r, k * (1 + (a - 1) * w["k_a"]), v, a, alpha))
    o, _ = rules.dplr(r, k, v, unit_keys, unit_keys * a, np.log(alpha), before=True)
    o = join(layer_norm(o, 1.0, c["head_dim"] * c["norm_eps"])) * w["g_norm.weight"]
    own = join((r * k * w["r_k"]).sum(-1, keepdims=True) * v)
    gate = sigmoid(xg @ w["g_lora.lora.0.weight"].T) @ w["g_lora.lora.2.weight"].T
    return linear((o + w["g_norm.bias"] + own) * gate, w, "o_proj"), first


def biased_norm(x: Array, w: Weights, name: str, eps: float) -> Array:
    return layer_norm(x, w[f"{name}.weight"], eps) + w[f"{name}.bias"]


def lora(x: Array, w: Weights, name: str, between: Callable[[Array], Array] = np.asarray) -> Array:
    return linear(between(linear(x, w, f"{name}_lora.lora.0")), w, f"{name}_lora.lora.2")


def kda(x: Array, w: Weights, c: Fields) -> Array:
    """log α = lower_bound · σ(e^A (f + dt)) of every channel, for each head of v."""
    q, k, v = (convolved(linear(x, w, f"{n}_proj"), w[f"{n}_conv1d.weight"]) for n in "qkv")
    served = c["num_v_heads"] // c["num_heads"]
    q, k = (np.repeat(unit(split(z, c["num_heads"]), 1e-6), served, axis=2) for z in (q, k))
    f = linear(linear(x, w, "f_proj.0"), w, "f_proj.1") + w["dt_bias"]
    rate = np.exp(w["A_log"])[:, None] * split(f, c["num_v_heads"])
    alpha = np.exp(c["lower_bound"] * sigmoid(rate))
    beta = 2 * sigmoid(linear(x, w, "b_proj"))
    o = erased(q, k, split(v, c["num_v_heads"]), beta, alpha)
    gate = linear(linear(x, w, "g_proj.0"), w, "g_proj.1")
    o = rms_norm(o, w["o_norm.weight"], c["norm_eps"])
    return linear(join(o) * sigmoid(gate), w, "o_proj")


def mesa_net(x: Array, w: Weights, c: Fields) -> Array:
    """H_t = γ_t H_{t-1} + β_t k_tᵀ k_t, G_t likewise with v; o_t = q_t (H_t + diag Λ)⁻¹ G_t, solved
    exactly.
    """
    heads = c["num_heads"]
    q, k = (
        unit(split(convolved(linear(x, w, f"{n}_proj"), w[f"{n}_conv1d.weight"]), heads), 1e-6)
        for n in "qk"
    )
    v = split(linear(x, w, "v_proj"), heads)
    beta, gamma = sigmoid(linear(x, w, "b_proj")), sigmoid(linear(x, w, "a_proj"))
    ridge = (softplus(w["lambda_params"]) + c["lambda_lower_bound"]).reshape(heads, -1)
    o, _ = rules.mesa(q, k, v, beta[..., None], ridge[None, None], np.log(gamma)[..., None])
    return linear(join(rms_norm(o, w["o_norm.weight"], c["norm_eps"])), w, "o_proj")


# the models ---------------------------------------------------------------------------------------

V, D, MLP = 61, 32, 40
METALA = {
    "model_type": "metala",
    "vocab_size": V,
    "decoder_embed_dim": D,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "add_bos_token": False,
    "causal": True,
    "glu_act": "silu",
    "glu_dim": MLP,
    "bias": False,
    "norm_type": "simplermsnorm",
    "no_scale_embedding": True,
}
METALA_LAYER: Shapes = {
    **{f"token_mixer.{name}.weight": (D // 2, D) for name in ("q_proj", "k_gate")},
    **{f"token_mixer.{name}.weight": (D, D) for name in ("v_proj", "g_proj", "out_proj")},
    "token_mixer.g_proj.bias": (D,),
    "token_mixer.aug_balance": (D // 2,),
    "token_mixer.conv1d.weight": (D, 1, 4),
    "channel_mixer.l1.weight": (MLP, D),
    "channel_mixer.l2.weight": (MLP, D),
    "channel_mixer.l3.weight": (D, MLP),
}
SHARED = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "norm_eps": 1e-6,
    "intermediate_size": MLP,
    "hidden_ratio": 4,
    "hidden_act": "swish",
    "conv_size": 4,
    "num_heads": 4,
}
HYBRID = {
    "layers": [1],
    "num_heads": 4,
    "num_kv_heads": 2,
    "qkv_bias": True,
    "window_size": 6,
    "rope_theta": 100.0,
}
SOFTMAX: Shapes = {
    **{f"{n}_proj.weight": (r, D) for n, r in (("q", D), ("k", D // 2), ("v", D // 2), ("o", D))},
    **{f"{n}_proj.bias": (r,) for n, r in (("q", D), ("k", D // 2), ("v", D // 2))},
}


def square(names: str, rows: int = D, columns: int = D) -> Shapes:
    return {f"{name}_proj.weight": (rows, columns) for name in names}


def convolutions(names: str, rows: int = D) -> Shapes:
    return {f"{name}_conv1d.weight": (rows, 1, 4) for name in names}


def of_fla(kind: str, mixer: Attention, shapes: Shapes, **fields: Any) -> Transcription:
    config = {"model_type": kind, **SHARED, **fields}
    block: Shapes = {
        **{f"{name}_norm.weight": (D,) for name in ("attn", "mlp")},
        **{f"mlp.{name}_proj.weight": (MLP, D) for name in ("gate", "up")},
        "mlp.down_proj.weight": (D, MLP),
    }
    every: Shapes = {
        "model.embeddings.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for i in range(config["num_hidden_layers"]):
        attn = SOFTMAX if config.get("attn") and i in config["attn"]["layers"] else shapes
        within = {**block, **{f"attn.{name}": shape for name, shape in attn.items()}}
        every |= {f"model.layers.{i}.{name}": shape for name, shape in within.items()}
    return Transcription(config, every, fla(mixer))


GLA: Shapes = {
    **square("qk", D // 2),
    **square("vgo"),
    "gk_proj.0.weight": (16, D),
    "gk_proj.1.weight": (D // 2, 16),
    "gk_proj.1.bias": (D // 2,),
    "g_norm_swish_gate.weight": (D // 4,),
}
DELTA: Shapes = {
    **square("qkvo"),
    **convolutions("qkv"),
    **square("b", 4),
    "o_norm.weight": (D // 4,),
}
GATED_DELTA: Shapes = {
    **square("qk", 24),
    **square("vg", 48),
    **square("ab", 4),
    **square("o", D, 48),
    **convolutions("qk", 24),
    **convolutions("v", 48),
    "A_log": (4,),
    "dt_bias": (4,),
    "o_norm.weight": (12,),
}
KDA: Shapes = {
    **square("qk", 24),
    **square("v", 48),
    **square("b", 4),
    **square("o", D, 48),
    **convolutions("qk", 24),
    **convolutions("v", 48),
    **{f"{name}_proj.0.weight": (12, D) for name in "fg"},
    **{f"{name}_proj.1.weight": (48, 12) for name in "fg"},
    "g_proj.1.bias": (48,),
    "A_log": (4,),
    "dt_bias": (48,),
    "o_norm.weight": (12,),
}
GOOSE: Shapes = {
    **{f"attn.x_{name}": (1, 1, D) for name in "rwkvag"},
    **{f"attn.{name}": shape for name, shape in square("rkvo").items()},
    **{f"attn.{name}": (D,) for name in ("k_k", "k_a", "g_norm.weight", "g_norm.bias")},
    "attn.r_k": (4, D // 4),
    **{f"attn.{name}_lora.lora.0.weight": (5, D) for name in "wag"},
    **{f"attn.{name}_lora.lora.2.weight": (D, 5) for name in "wag"},
    **{f"attn.{name}_lora.lora.2.bias": (D,) for name in "wa"},
    **{f"{name}_norm.{part}": (D,) for name in ("attn", "ffn") for part in ("weight", "bias")},
    "ffn.x_k": (D,),
    "ffn.key.weight": (MLP, D),
    "ffn.value.weight": (D, MLP),
}
GOOSE_RESIDUAL: Shapes = {
    "attn.v_lora.lora.0.weight": (3, D),
    "attn.v_lora.lora.2.weight": (D, 3),
    "attn.v_lora.lora.2.bias": (D,),
}
MESA: Shapes = {
    **square("qkvo"),
    **convolutions("qk"),
    **square("ab", 4),
    "a_proj.bias": (4,),
    "b_proj.bias": (4,),
    "lambda_params": (D,),
    "o_norm.weight": (D // 4,),
}
LOG_LINEAR = {
    "model_type": "log_linear_mamba2",
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 6,
    "expand": 2,
    "n_groups": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "hidden_act": "silu",
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LOG_LINEAR_LAYER: Shapes = {
    "mixer_norm.weight": (D,),
    "mlp_norm.weight": (D,),
    "mixer.in_proj.weight": (2 * D + (2 * D + 24) + 4 * 16, D),
    "mixer.conv1d.weight": (2 * D + 24, 1, 4),
    "mixer.conv1d.bias": (2 * D + 24,),
    **{f"mixer.{name}": (4,) for name in ("dt_bias", "A_log", "D")},
    "mixer.L": (4, 15),
    "mixer.norm.weight": (2 * D,),
    "mixer.out_proj.weight": (D, 2 * D),
    **{f"mlp.{name}_proj.weight": (256, D) for name in ("gate", "up")},
    "mlp.down_proj.weight": (D, 256),
}
TRANSCRIPTIONS = {
    "MetaLA (BICLab)": Transcription(
        METALA,
        {
            "model.embed_tokens.weight": (V, D),
            "lm_head.weight": (V, D),
            **{
                f"model.layers.{i}.{name}": shape
                for i in range(2)
                for name, shape in METALA_LAYER.items()
            },
        },
        metala,
    ),
    "GLA (fla)": of_fla("gla", gla, GLA, expand_k=0.5, expand_v=1, clamp_min=None),
    "GLA with attention (fla)": of_fla("gla", gla, GLA, expand_k=0.5, expand_v=1, attn=HYBRID),
    "RetNet (fla)": of_fla(
        "retnet",
        retnet,
        {
            **square("qk"),
            **square("vg", 2 * D),
            **square("o", D, 2 * D),
            "g_norm_swish_gate.weight": (D // 2,),
        },
        expand_k=1.0,
        expand_v=2.0,
    ),
    "GSA (fla)": of_fla(
        "gsa",
        gsa,
        {**square("qo"), **square("kv", D // 2), **square("f", 10), "g_norm.weight": (D,)},
        num_kv_heads=2,
        num_slots=5,
        expand_k=1,
        expand_v=1,
        gate_logit_normalizer=8,
    ),
    "DeltaNet (fla)": of_fla("delta_net", delta_net, DELTA, allow_neg_eigval=True, qk_norm="l2"),
    "Gated DeltaNet (fla)": of_fla(
        "gated_deltanet",
        gated_deltanet,
        GATED_DELTA,
        num_heads=2,
        head_dim=12,
        num_v_heads=4,
        expand_v=1.0,
    ),
    "KDA (fla)": of_fla(
        "kda",
        kda,
        KDA,
        num_heads=2,
        head_dim=12,
        num_v_heads=4,
        expand_v=1.0,
        allow_neg_eigval=True,
        lower_bound=-2.0,
    ),
    "RWKV-7 (fla)": Transcription(
        {
            "model_type": "rwkv7",
            **SHARED,
            "hidden_act": "sqrelu",
            "head_dim": D // 4,
            "num_hidden_layers": 3,
            **{f"{name}_low_rank_dim": 5 for name in ("decay", "a", "gate")},
            "v_low_rank_dim": 3,
        },
        {
            "model.embeddings.weight": (V, D),
            "lm_head.weight": (V, D),
            **{f"model.norm.{part}": (D,) for part in ("weight", "bias")},
            **{f"model.layers.0.pre_norm.{part}": (D,) for part in ("weight", "bias")},
            **{
                f"model.layers.{i}.{name}": shape
                for i in range(3)
                for name, shape in {**GOOSE, **(GOOSE_RESIDUAL if i else {})}.items()
            },
        },
        rwkv7,
    ),
    "Log-linear Mamba-2 (fla)": Transcription(
        LOG_LINEAR,
        {
            "backbone.embeddings.weight": (V, D),
            "backbone.norm_f.weight": (D,),
            "lm_head.weight": (V, D),
            **{
                f"backbone.layers.{i}.{name}": shape
                for i in range(2)
                for name, shape in LOG_LINEAR_LAYER.items()
            },
        },
        log_linear_mamba2,
    ),
    "MesaNet (fla)": of_fla(
        "mesa_net",
        mesa_net,
        MESA,
        head_dim=D // 4,
        lambda_lower_bound=0.25,
        max_cg_step_training=30,
    ),
}
