"""MiniMax-Text-01: lightning attention with softmax attention between it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastweights.importers.attention import attention, projections
from fastweights.importers.experts import LIKE_MIXTRAL, experts
from fastweights.importers.llama import OUTER
from fastweights.importers.plan import (
    ImportPlan,
    Table,
    TensorSource,
    rename_missing,
    scaled,
    shortest_period,
    stack_layers,
)
from fastweights.importers.qwen3_next import of_heads
from fastweights.importers.source import CheckpointSource, Settings
from fastweights.models import FastWeightsConfig

EPS = 1e-6
"""Of the norm of lightning attention's heads, which config.json does not state."""

TABLES_OF_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""What a checkpoint may store of the fixed decays."""


def minimax(source: CheckpointSource) -> ImportPlan:
    """Plan the import of a MiniMax-Text-01 checkpoint.

    A layer adds β times its output to α times what it reads, the normalised stream. A norm follows,
    so that α can be divided out: of β, of ε and of the embeddings.
    """
    settings = source.settings
    kinds, alpha = settings["layer_types"], _residual_scale(settings)
    config = FastWeightsConfig(
        **settings.common,
        hidden_size=settings["hidden_size"],
        num_hidden_layers=len(kinds),
        mixers=shortest_period(list(_mixers(settings))),
        norm_eps=settings["rms_norm_eps"] / alpha**2,
        hidden_act=settings["hidden_act"],
        intermediate_size=settings["intermediate_size"],
        mlps=[_experts(settings)] if settings["num_local_experts"] > 1 else None,
        normalized_residual=True,
        embedding_scale=1 / alpha,
    )
    block: Table = {
        "mixer_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        **_mlp(source, settings["mlp_beta_factor"] / alpha),
    }
    tables = [{**block, **_mixer_weights(settings, kind, alpha)} for kind in kinds]
    ignored = tuple(f"*.self_attn.{name}" for name in TABLES_OF_DECAYS)
    tensors = {**OUTER, **stack_layers(config, "model.layers", tables)}
    return ImportPlan(
        config,
        rename_missing(tensors, source.names, LIKE_MIXTRAL),
        ignored=(*ignored, "*.gate.weight"),
    )


def _residual_scale(settings: Settings) -> float:
    """α, which layers of all kinds share."""
    alpha = settings["mlp_alpha_factor"]
    for name in ("full_attn_alpha_factor", "linear_attn_alpha_factor"):
        settings.require(name, alpha)
    return alpha


def _mixers(settings: Settings) -> Iterator[dict[str, Any]]:
    kinds = settings["layer_types"]
    softmax = attention(settings, settings["sliding_window"])
    for layer, kind in enumerate(kinds):
        if kind == "full_attention":
            yield softmax
        else:
            yield {
                "name": "lightning",
                "heads": softmax["heads"],
                "width": softmax["width"],
                "depth": layer / (len(kinds) - 1 + 1e-5),
                "eps": EPS,
            }


def _mixer_weights(settings: Settings, kind: str, alpha: float) -> Table:
    if kind == "full_attention":
        beta = settings["full_attn_beta_factor"] / alpha
        return scaled(projections(""), {"mixer.W_o.weight": beta})
    heads = settings["num_attention_heads"]
    width = attention(settings)["width"]
    fused = {"q": (0, width), "k": (width, 2 * width), "v": (2 * width, 3 * width)}
    beta = settings["linear_attn_beta_factor"] / alpha
    return {
        **{
            f"mixer.W_{name}.weight": TensorSource(
                "self_attn.qkv_proj.weight", of_heads(heads, *span)
            )
            for name, span in fused.items()
        },
        "mixer.W_g.weight": "self_attn.output_gate.weight",
        "mixer.norm.weight": "self_attn.norm.weight",
        **scaled({"mixer.W_o.weight": "self_attn.out_proj.weight"}, {"*": beta}),
    }


def _experts(settings: Settings) -> dict[str, Any]:
    routing = {"count": settings["num_local_experts"], "chosen": settings["num_experts_per_tok"]}
    return {"name": "experts", "width": settings["intermediate_size"], "routing": routing}


def _mlp(source: CheckpointSource, beta: float) -> Table:
    """The experts and their router, or the one expert, which is an MLP."""
    settings = source.settings
    count, width = settings["num_local_experts"], settings["intermediate_size"]
    table = scaled(experts(source, "mlp.experts", count, width), {"*.W_3.weight": beta})
    if count == 1:
        return {name.replace("experts.0.", ""): part for name, part in table.items()}
    return {"mlp.router.W.weight": "mlp.gate.weight", **table}
