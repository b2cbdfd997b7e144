"""flash-linear-attention's language models of later delta rules: gated DeltaProduct, Comba and
MoM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.importers.fla import FLOOR, LayerPlan, convolutions, of_layers, projections
from fastweights.importers.plan import Table, TensorSource
from fastweights.importers.source import Settings

DECAY: Table = {
    "mixer.W_alpha.weight": "attn.a_proj.weight",
    "mixer.W_beta.weight": "attn.b_proj.weight",
    "mixer.decay.log_a": "attn.A_log",
    "mixer.decay.bias": "attn.dt_bias",
}


@of_layers
def deltaproduct(settings: Settings) -> LayerPlan:
    """Plan the import of a gated DeltaProduct checkpoint."""
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
    settings.require("num_v_heads", None, settings["num_heads"])
    settings.require("use_output_correction", True)
    settings.require("use_inner_decay", True)
    mixer = {**_delta_rule("comba", settings), "renormalized": True}
    return mixer, {**_delta_tensors(), "mixer.delta": "attn.decay", "mixer.D": "attn.D"}


@of_layers
def mom(settings: Settings) -> LayerPlan:
    """Plan the import of a MoM checkpoint over gated DeltaNet, with a shared memory."""
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


def _delta_rule(name: str, settings: Settings) -> dict[str, object]:
    """What the three have in common; `expand_v` is of a head's keys there, of d here."""
    settings.require("use_output_gate", True)
    settings.require("use_short_conv", True)
    heads, width = settings["num_heads"], settings["head_dim"]
    return {
        "name": name,
        "heads": heads,
        "expand_k": heads * width / settings["hidden_size"],
        "expand_v": heads * int(width * settings["expand_v"]) / settings["hidden_size"],
        "conv": settings["conv_size"],
        "eps": settings["norm_eps"],
        "floor": FLOOR,
    }


def _delta_tensors() -> Table:
    return {
        **projections("q", "k", "v", "g", "o"),
        **convolutions("q", "k", "v"),
        **DECAY,
        "mixer.norm.weight": "attn.o_norm.weight",
    }


def _stacked(name: str, memories: int) -> TensorSource:
    """The rows of all memories, those of the shared one last."""
    first, *others = (f"attn.{name}_proj.{i}.weight" for i in range(memories))
    return TensorSource(first, _stack, (*others, f"attn.shared_{name}.weight"))


def _stack(*weights: Tensor) -> Tensor:
    return torch.cat(weights)
