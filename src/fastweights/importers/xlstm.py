"""xLSTM-7B and its like as transformers names their weights: mLSTM layers with capped gates."""

from __future__ import annotations

from torch import Tensor

from fastweights.importers.plan import (
    ConstantTensor,
    ImportPlan,
    Table,
    TensorSource,
    linear,
    outer,
    plan_layers,
)
from fastweights.importers.source import CheckpointSource


def xlstm(source: CheckpointSource) -> ImportPlan:
    """Plan the import of an xLSTM-7B checkpoint.

    The weights of the norm over heads, one per channel, are multiplied into the projection that
    follows.
    """
    settings = source.settings
    settings.require("use_bias", False)
    settings.require("v_dim_factor", 1.0)
    settings.require("weight_mode", "single")
    rounding = settings["ffn_round_up_to_multiple_of"]
    width = -settings["hidden_size"] * settings["ffn_proj_factor"]
    mixer = {
        "name": "mlstm",
        "heads": settings["num_heads"],
        "conv": 1,
        "expand_k": settings["qk_dim_factor"],
        "bias": False,
        "cap": settings["gate_soft_cap"],
        "eps": settings["norm_eps"],
    }
    layer: Table = {
        "mixer_norm.weight": "norm_mlstm.weight",
        "mlp_norm.weight": "norm_ffn.weight",
        "mlp.W_3.weight": "ffn.proj_down.weight",
        "mlp.W_1.weight": "ffn.proj_up_gate.weight",
        "mlp.W_2.weight": "ffn.proj_up.weight",
        **{f"mixer.W_{name}.weight": f"mlstm_layer.{name}.weight" for name in "qkv"},
        "mixer.W_g.weight": "mlstm_layer.ogate_preact.weight",
        **linear("mixer.W_i", "mlstm_layer.igate_preact", bias=True),
        **linear("mixer.W_f", "mlstm_layer.fgate_preact", bias=True),
        "mixer.norm.weight": ConstantTensor(1.0),
        "mixer.W_o.weight": TensorSource(
            "mlstm_layer.out_proj.weight", Tensor.mul, ("mlstm_layer.multihead_norm.weight",)
        ),
    }
    return plan_layers(
        source,
        [(mixer, {})] * settings["num_hidden_layers"],
        layer,
        around=outer("backbone.embeddings", "backbone.out_norm"),
        theirs="backbone.blocks",
        norm_eps=settings["norm_eps"],
        intermediate_size=-int(width // rounding) * rounding,
        logit_cap=settings["output_logit_soft_cap"],
    )
