"""Jamba: Mamba layers with normalised B, C and Δ, softmax attention and experts between them."""

from __future__ import annotations

from fastweights.importers.attention import attention, projections
from fastweights.importers.bamba import NORMS, OUTER
from fastweights.importers.experts import experts, mlps_of_layers
from fastweights.importers.mamba import HYBRID_MAMBA, mamba_weights
from fastweights.importers.plan import ImportPlan, LayerPlan, glu_mlp, plan_layers
from fastweights.importers.source import CheckpointSource, Settings


def jamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Jamba checkpoint."""
    settings = source.settings
    settings.require("mamba_proj_bias", False)
    settings.require("hidden_act", "silu")
    mamba = {"name": "mamba", **settings.pick(HYBRID_MAMBA), "affine": True}
    mamba["norm_eps"], biased = settings["rms_norm_eps"], settings["mamba_conv_bias"]
    recurrent = mamba, mamba_weights(mamba, settings["hidden_size"], "mamba", conv_bias=biased)
    softmax = attention(settings, rotary=False), projections("")
    layers, several = range(settings["num_hidden_layers"]), settings["num_experts"] > 1
    sparse = [several and _recurs(settings, "expert_layer", layer) for layer in layers]
    return plan_layers(
        source,
        [softmax if _recurs(settings, "attn_layer", layer) else recurrent for layer in layers],
        NORMS,
        mlps=mlps_of_layers(source, sparse, glu_mlp("feed_forward"), _experts),
        around=OUTER,
        **settings.decoder,
    )


def _recurs(settings: Settings, what: str, layer: int) -> bool:
    """Whether a layer is one of those that come back after a period."""
    return layer % settings[f"{what}_period"] == settings[f"{what}_offset"]


def _experts(source: CheckpointSource) -> LayerPlan:
    count, width = source.settings["num_experts"], source.settings["intermediate_size"]
    chosen = source.settings["num_experts_per_tok"]
    routing = {"count": count, "chosen": chosen, "normalized": False}
    return {"name": "experts", "width": width, "routing": routing}, {
        "mlp.router.W.weight": "feed_forward.router.weight",
        **experts(source, "feed_forward.experts", count, width),
    }
