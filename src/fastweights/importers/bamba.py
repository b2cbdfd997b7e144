"""Bamba: Mamba-2 layers with softmax attention between them."""

from __future__ import annotations

from fastweights.importers.attention import attention, projections
from fastweights.importers.mamba2 import hybrid_mamba2, mamba2_weights
from fastweights.importers.plan import (
    ImportPlan,
    Table,
    TensorSource,
    glu_mlp,
    shortest_period,
    stack_layers,
)
from fastweights.importers.source import CheckpointSource
from fastweights.models import FastWeightsConfig

OUTER = {
    "model.embed_tokens.weight": TensorSource("model.embed_tokens.weight"),
    "model.norm.weight": TensorSource("model.final_layernorm.weight"),
    "lm_head.weight": TensorSource("lm_head.weight"),
}
NORMS: Table = {
    "mixer_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "pre_ff_layernorm.weight",
}


def bamba(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a Bamba checkpoint."""
    settings = source.settings
    settings.require("mlp_bias", False)
    biased, d = "qkvo" if settings["attention_bias"] else "", settings["hidden_size"]
    mamba = hybrid_mamba2(settings)
    recurrent = (mamba, mamba2_weights(mamba, d, "mamba", conv_bias=settings["mamba_conv_bias"]))
    softmax = ({**attention(settings), "bias": bool(biased)}, projections(biased))
    attending = settings["attn_layer_indices"] or []
    layers = [
        softmax if layer in attending else recurrent
        for layer in range(settings["num_hidden_layers"])
    ]
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=d,
        num_hidden_layers=len(layers),
        mixers=shortest_period([mixer for mixer, _ in layers]),
        norm_eps=settings["rms_norm_eps"],
        hidden_act=settings["hidden_act"],
        intermediate_size=settings["intermediate_size"],
        embedding_scale=1.0,
    )
    tables = [{**NORMS, **glu_mlp("feed_forward"), **table} for _, table in layers]
    return ImportPlan(config, {**OUTER, **stack_layers(config, "model.layers", tables)})
