"""The language models of flash-linear-attention: GLA, GSA, Raven, RetNet, DeltaNet, gated
DeltaNet and the delta rules after it, KDA, MesaNet and HGRN2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fastweights.importers.plan import (
    ConstantTensor,
    Convert,
    ImportPlan,
    LayerPlan,
    Table,
    TensorSource,
    glu_mlp,
    linear,
    outer,
    plan_layers,
    shortest_period,
    taps,
)
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.layers import upcast

FLOOR = 1e-6
"""Its L2 norm of q and k is x / √(|x|² + 10⁻⁶)."""
ROUTED_FLOOR = 1e-9
"""What Raven's router adds to the sum of the slots that it chooses."""


def plan_stack(source: CheckpointSource, layer: Callable[[Settings], LayerPlan]) -> ImportPlan:
    """What the models share: the stack, the SwiGLU, and softmax attention in some layers."""
    settings = source.settings
    settings.require("hidden_act", "swish", "silu")
    settings.require("attnres_block_size", None)
    recurrent, hybrid = layer(settings), settings.get("attn", None) or {"layers": ()}
    layers = [
        _attention(hybrid) if i in hybrid["layers"] else recurrent
        for i in range(settings["num_hidden_layers"])
    ]
    block = {"mixer_norm.weight": "attn_norm.weight", "mlp_norm.weight": "mlp_norm.weight"}
    return plan_layers(
        source,
        layers,
        {**block, **glu_mlp()},
        around=outer("model.embeddings"),
        norm_eps=settings["norm_eps"],
        intermediate_size=settings["intermediate_size"]
        or swiglu_width(settings["hidden_size"], settings["hidden_ratio"] or 4),
    )


def of_layers(
    layer: Callable[[Settings], LayerPlan],
) -> Callable[[CheckpointSource], ImportPlan]:
    """Make a plan of one layer that of a whole model, by `plan_stack`."""

    @wraps(layer)
    def plan(source: CheckpointSource) -> ImportPlan:
        return plan_stack(source, layer)

    return plan


@of_layers
def gla(settings: Settings) -> LayerPlan:
    """Plan the import of a GLA checkpoint.

    It has RMSNorm where the paper has LayerNorm, and no bias in the gate.
    """
    settings.require("expand_k", 0.5)
    settings.require("expand_v", 1.0)
    settings.require("num_kv_heads", None, settings["num_heads"])
    settings.require("feature_map", None)
    settings.require("use_short_conv", False)
    settings.require("clamp_min", None)
    mixer = {
        "name": "gla",
        "heads": settings["num_heads"],
        "center": False,
        "eps": settings["norm_eps"],
    }
    table = {
        **projections("q", "k", "v", "o"),
        "mixer.W_r.weight": "attn.g_proj.weight",
        "mixer.W_r.bias": ConstantTensor(0.0),
        "mixer.W_alpha.0.weight": "attn.gk_proj.0.weight",
        **linear("mixer.W_alpha.1", "attn.gk_proj.1", bias=True),
        "mixer.norm.weight": _output_norm(settings),
    }
    return mixer, table


@of_layers
def gsa(settings: Settings) -> LayerPlan:
    """Plan the import of a GSA checkpoint, whose last norm has ε = 10⁻⁵ whatever `norm_eps` is."""
    for name in ("expand_k", "expand_v"):
        settings.require(name, 1)
    settings.require("feature_map", "swish")
    settings.require("use_short_conv", False)
    settings.require("elementwise_affine", True)
    heads = settings["num_heads"]
    mixer = {
        "name": "gsa",
        "heads": heads,
        "kv_heads": settings.get("num_kv_heads", None),
        "slots": settings.get("num_slots", None) or settings["hidden_size"] // heads,
        "tau": settings["gate_logit_normalizer"],
    }
    table = {
        **projections("q", "k", "v", "o"),
        "mixer.W_alpha.weight": "attn.f_proj.weight",
        "mixer.norm.weight": "attn.g_norm.weight",
    }
    return mixer, table


@of_layers
def raven(settings: Settings) -> LayerPlan:
    """Plan the import of a Raven checkpoint."""
    for name in ("expand_k", "expand_v"):
        settings.require(name, 1)
    for name in ("use_short_conv", "use_output_gate", "bias_rmm", "use_rope"):
        settings.require(name, False)
    settings.require("num_kv_heads", None, settings["num_heads"])
    settings.require("feature_map", "swish")
    settings.require("decay_type", "Mamba2")
    settings.require("router_score", "sigmoid")
    settings.require("router_type", "lin")
    settings.require("elementwise_affine", True)
    stated, width = settings["num_slots"], settings["hidden_size"] // settings["num_heads"]
    mixer = {
        "name": "raven",
        "heads": settings["num_heads"],
        "slots": stated or width,
        "active": settings["topk"] if stated else min(settings["topk"], width),
        "eps": settings["norm_eps"],
        "floor": ROUTED_FLOOR,
    }
    table = {
        **projections("q", "k", "v", "r", "o"),
        "mixer.W_alpha.weight": "attn.a_proj.weight",
        "mixer.W_alpha.bias": "attn.dt_bias",
        "mixer.log_a": "attn.A_log",
        **{f"mixer.norm_{name}.weight": f"attn.{name}_norm.weight" for name in "qk"},
        "mixer.norm.weight": "attn.g_norm.weight",
    }
    return mixer, table


@of_layers
def retnet(settings: Settings) -> LayerPlan:
    """Plan the import of a RetNet checkpoint.

    It has RMSNorm with weights where the paper has a LayerNorm without.
    """
    settings.require("expand_k", 1.0)
    settings.require("num_kv_heads", None, settings["num_heads"])
    settings.require("feature_map", None)
    settings.require("use_short_conv", False)
    mixer = {
        "name": "retnet",
        "heads": settings["num_heads"],
        "expand_v": settings["expand_v"],
        "center": False,
        "affine": True,
        "eps": settings["norm_eps"],
    }
    return mixer, {
        **projections("q", "k", "v", "g", "o"),
        "mixer.norm.weight": _output_norm(settings),
    }


@of_layers
def deltanet(settings: Settings) -> LayerPlan:
    """Plan the import of a DeltaNet checkpoint: SiLU and L2 norm on q and k, convolutions, no
    gate."""
    for name in ("expand_k", "expand_v"):
        settings.require(name, 1.0)
    for name in ("use_beta", "use_short_conv"):
        settings.require(name, True)
    settings.require("use_gate", False)
    settings.require("qk_norm", "l2")
    settings.require("qk_activation", "silu")
    mixer = {
        "name": "deltanet",
        "heads": settings["num_heads"],
        "conv": settings["conv_size"],
        "negative": settings.get("allow_neg_eigval", False),
        "eps": settings["norm_eps"],
        "floor": FLOOR,
    }
    table = {
        **projections("q", "k", "v", "o"),
        **convolutions("q", "k", "v"),
        "mixer.W_beta.weight": "attn.b_proj.weight",
        "mixer.norm.weight": "attn.o_norm.weight",
    }
    return mixer, table


@of_layers
def gdn(settings: Settings) -> LayerPlan:
    """Plan the import of a gated DeltaNet checkpoint, which may have more heads for v than for q
    and k."""
    settings.require("use_gate", True)
    value_heads = settings.get("num_v_heads", None) or settings["num_heads"]
    mixer = {
        **_delta_rule("gated_deltanet", settings, value_heads),
        "value_heads": value_heads,
        "negative": settings.get("allow_neg_eigval", False),
    }
    return mixer, _delta_tensors("mixer.log_a", "mixer.b_alpha")


@of_layers
def deltaproduct(settings: Settings) -> LayerPlan:
    """Plan the import of a gated DeltaProduct checkpoint."""
    settings.require("use_output_gate", True)
    settings.require("use_forget_gate", True)
    mixer = {
        **_delta_rule("gated_deltaproduct", settings),
        "steps": settings["num_householder"],
        "negative": settings["allow_neg_eigval"],
    }
    return mixer, _delta_tensors()


@of_layers
def comba(settings: Settings) -> LayerPlan:
    """Plan the import of a Comba checkpoint, which normalises what it has corrected."""
    settings.require("use_output_gate", True)
    settings.require("num_v_heads", None, settings["num_heads"])
    settings.require("use_output_correction", True)
    settings.require("use_inner_decay", True)
    mixer = {**_delta_rule("comba", settings), "renormalized": True}
    return mixer, {**_delta_tensors(), "mixer.delta": "attn.decay", "mixer.D": "attn.D"}


@of_layers
def mom(settings: Settings) -> LayerPlan:
    """Plan the import of a MoM checkpoint over gated DeltaNet, with a shared memory."""
    settings.require("use_output_gate", True)
    settings.require("shared_mem", True)
    settings.require("single_kv_proj", False)
    settings.require("mom_backend", "gated_deltanet")
    memories = settings["num_memories"]
    mixer = {
        **_delta_rule("mom", settings),
        "memories": memories,
        "active": settings["topk"],
    }
    each = {"k": "k", "v": "v", "b": "beta", "a": "alpha"}
    return mixer, {
        **_delta_tensors(),
        **{f"mixer.W_{ours}.weight": _stacked(name, memories) for name, ours in each.items()},
        "mixer.W_r.weight": "attn.gate.weight",
    }


def _delta_rule(name: str, settings: Settings, value_heads: int | None = None) -> dict[str, Any]:
    """What gated DeltaNet and its descendants have in common; `expand_v` is of a head's keys there,
    of d here."""
    settings.require("use_short_conv", True)
    heads, width = settings["num_heads"], settings["head_dim"]
    values = (value_heads or heads) * int(width * settings["expand_v"])
    return {
        "name": name,
        "heads": heads,
        "expand_k": heads * width / settings["hidden_size"],
        "expand_v": values / settings["hidden_size"],
        "conv": settings["conv_size"],
        "eps": settings["norm_eps"],
        "floor": FLOOR,
    }


def _delta_tensors(log_a: str = "mixer.decay.log_a", bias: str = "mixer.decay.bias") -> Table:
    return {
        **projections("q", "k", "v", "g", "o"),
        **convolutions("q", "k", "v"),
        "mixer.W_alpha.weight": "attn.a_proj.weight",
        "mixer.W_beta.weight": "attn.b_proj.weight",
        log_a: "attn.A_log",
        bias: "attn.dt_bias",
        "mixer.norm.weight": "attn.o_norm.weight",
    }


def _stacked(name: str, memories: int) -> TensorSource:
    """The rows of all memories, those of the shared one last."""
    first, *others = (f"attn.{name}_proj.{i}.weight" for i in range(memories))
    return TensorSource(first, _stack, (*others, f"attn.shared_{name}.weight"))


def _stack(*weights: Tensor) -> Tensor:
    return torch.cat(weights)


@of_layers
def kda(settings: Settings) -> LayerPlan:
    """Plan the import of a KDA checkpoint, which may have more heads for v than for q and k, and a
    bounded decay."""
    settings.require("use_short_conv", True)
    settings.require("expand_v", 1.0)
    lowest = settings.get("lower_bound", None)
    mixer = {
        "name": "kda",
        "heads": settings["num_heads"],
        "width": settings["head_dim"],
        "value_heads": settings.get("num_v_heads", None),
        "conv": settings["conv_size"],
        "negative": settings.get("allow_neg_eigval", False),
        "lowest": None if lowest is None else -lowest,
        "eps": settings["norm_eps"],
    }
    table = {
        **projections("q", "k", "v", "o"),
        **convolutions("q", "k", "v"),
        **linear("mixer.W_alpha.0", "attn.f_proj.0"),
        **linear("mixer.W_alpha.1", "attn.f_proj.1"),
        **linear("mixer.W_g.0", "attn.g_proj.0"),
        **linear("mixer.W_g.1", "attn.g_proj.1", bias=True),
        "mixer.W_beta.weight": "attn.b_proj.weight",
        "mixer.log_a": "attn.A_log",
        "mixer.b_alpha": "attn.dt_bias",
        "mixer.norm.weight": "attn.o_norm.weight",
    }
    return mixer, table


@of_layers
def mesa_net(settings: Settings) -> LayerPlan:
    """Plan the import of a MesaNet checkpoint, which lacks the bound on γ of the paper's appendix
    F.5."""
    heads = settings["num_heads"]
    settings.require("use_output_gate", False)
    settings.require("use_short_conv", True)
    settings.require("lambda_lower_bound", 0.25)
    settings.require("head_dim", settings["hidden_size"] // heads)
    mixer = {
        "name": "mesa",
        "heads": heads,
        "steps": settings["max_cg_step_training"],
        "conv": settings["conv_size"],
        "bound": 1.0,
        "eps": settings["norm_eps"],
        "floor": FLOOR,
    }
    table = {
        **projections("q", "k", "v", "o"),
        **convolutions("q", "k"),
        **linear("mixer.W_gamma", "attn.a_proj", bias=True),
        **linear("mixer.W_beta", "attn.b_proj", bias=True),
        "mixer.ridge": TensorSource(
            "attn.lambda_params", lambda ridge: ridge.unflatten(0, (heads, -1))
        ),
        "mixer.norm.weight": "attn.o_norm.weight",
    }
    return mixer, table


def hgrn2(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an HGRN2 checkpoint.

    The least decays of a channel rise over the layers as the sums of a softmax over them; each
    layer of ours has its own. It scales q by d'_k^(-1/2), which the norm behind it undoes but for
    its ε.
    """
    settings = source.settings
    plan = plan_stack(source, _hgrn2_layer)
    if not settings["use_lower_bound"]:
        return plan
    first, *others = plan.config.layer_mixers
    bounded = [{**m, "lower_bound": None} if m["name"] == "hgrn2" else m for m in others]
    plan.config.mixers = shortest_period([first, *bounded])
    bounds = {
        f"model.layers.{i}.mixer.b_beta": TensorSource("model.lower_bounds", _bound_of(i))
        for i, mixer in enumerate(plan.config.layer_mixers)
        if "lower_bound" in mixer
    }
    return replace(plan, tensors={**plan.tensors, **bounds}, ignored=("model.lower_bounds",))


def _hgrn2_layer(settings: Settings) -> LayerPlan:
    settings.require("use_short_conv", False)
    settings.require("elementwise_affine", True)
    d = settings["hidden_size"]
    width = settings["expand_ratio"] or d // settings["num_heads"]
    if d % width:
        raise ValueError(
            f"this {settings.kind} checkpoint has expand_ratio = {width}, which does not divide"
            f" hidden_size = {d}; only ratios that do can be imported"
        )
    mixer = {"name": "hgrn2", "heads": d // width, "eps": settings["norm_eps"] * width}
    theirs = {"f": "f_proj", "v": "i_proj"}
    return mixer, {
        **projections("q", "o"),
        **{f"mixer.W_{ours}.weight": f"attn.{name}.weight" for ours, name in theirs.items()},
        "mixer.norm.weight": "attn.g_norm.weight",
    }


def _bound_of(layer: int) -> Convert:
    """The logit of a layer's least decays, from what the softmax over layers is of."""

    def convert(bounds: Tensor) -> Tensor:
        shares = torch.softmax(upcast(bounds), 0)
        return torch.logit(shares[1 : layer + 1].sum(0))

    return convert


def projections(*names: str) -> Table:
    """Map our projections of these names to theirs."""
    return {f"mixer.W_{name}.weight": f"attn.{name}_proj.weight" for name in names}


def convolutions(*names: str) -> Table:
    """Map our short convolutions of these names to theirs."""
    return {
        f"mixer.conv_{name}.weight": TensorSource(f"attn.{name}_conv1d.weight", taps)
        for name in names
    }


def _output_norm(settings: Settings) -> str:
    settings.require("use_output_gate", True)
    settings.require("elementwise_affine", True)
    return f"attn.{'g_norm_swish_gate' if settings.get('fuse_norm', True) else 'g_norm'}.weight"


def _attention(hybrid: dict[str, Any]) -> LayerPlan:
    biased = hybrid.get("qkv_bias", False)
    mixer = {
        "name": "softmax",
        "heads": hybrid["num_heads"],
        "kv_heads": hybrid.get("num_kv_heads"),
        "window": hybrid.get("window_size"),
        "bias": biased,
        "rope": {"base": hybrid.get("rope_theta", 10_000.0)},
    }
    biases: Table = {f"mixer.W_{name}.bias": f"attn.{name}_proj.bias" for name in "qkv"}
    return mixer, {
        **projections("q", "k", "v", "o"),
        **({**biases, "mixer.W_o.bias": ConstantTensor(0.0)} if biased else {}),
    }


def swiglu_width(d: int, ratio: int) -> int:
    """Return the width of an MLP of about 2 · ratio · d² weights: a multiple of 256."""
    return -(-int(d * ratio * 2 / 3) // 256) * 256
