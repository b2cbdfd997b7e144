"""MiniMax-Text-01: lightning attention with softmax attention between it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastweights.importers.attention import attention, projections
from fastweights.importers.experts import LIKE_MIXTRAL, experts
from fastweights.importers.plan import (
    NORMS,
    ImportPlan,
    LayerPlan,
    Table,
    TensorSource,
    plan_layers,
    scaled,
)
from fastweights.importers.qwen3_next import of_heads
from fastweights.importers.source import CheckpointSource, Settings

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
    alpha = _residual_scale(settings)
    layers = list(_layers(settings, alpha))
    beta = settings["mlp_beta_factor"] / alpha
    return plan_layers(
        source,
        layers,
        NORMS,
        mlps=[_mlp(source, beta)] * len(layers),
        published=[LIKE_MIXTRAL],
        ignored=(*(f"*.self_attn.{name}" for name in TABLES_OF_DECAYS), "*.gate.weight"),
        **{**settings.decoder, "norm_eps": settings["rms_norm_eps"] / alpha**2},
        normalized_residual=True,
        embedding_scale=1 / alpha,
    )


def _residual_scale(settings: Settings) -> float:
    """α, which layers of all kinds share."""
    alpha = settings["mlp_alpha_factor"]
    for name in ("full_attn_alpha_factor", "linear_attn_alpha_factor"):
        settings.require(name, alpha)
    return alpha


def _layers(settings: Settings, alpha: float) -> Iterator[LayerPlan]:
    kinds = settings["layer_types"]
    softmax = attention(settings, settings["sliding_window"])
    attending = scaled(
        projections(""), {"mixer.W_o.weight": settings["full_attn_beta_factor"] / alpha}
    )
    lightning = {"name": "lightning", "heads": softmax["heads"], "width": softmax["width"]}
    weights = _lightning_weights(softmax, settings["linear_attn_beta_factor"] / alpha)
    for layer, kind in enumerate(kinds):
        if kind == "full_attention":
            yield softmax, attending
        else:
            yield {**lightning, "depth": layer / (len(kinds) - 1 + 1e-5), "eps": EPS}, weights


def _lightning_weights(softmax: dict[str, Any], beta: float) -> Table:
    heads, width = softmax["heads"], softmax["width"]
    fused = {"q": (0, width), "k": (width, 2 * width), "v": (2 * width, 3 * width)}
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


def _mlp(source: CheckpointSource, beta: float) -> LayerPlan:
    """The experts and their router, or the one expert, which is an MLP."""
    settings = source.settings
    count, width = settings["num_local_experts"], settings["intermediate_size"]
    table = scaled(experts(source, "mlp.experts", count, width), {"*.W_3.weight": beta})
    if count == 1:
        plain = {name.replace("experts.0.", ""): part for name, part in table.items()}
        return {"name": "gated", "width": width}, plain
    routing = {"count": count, "chosen": settings["num_experts_per_tok"]}
    router: Table = {"mlp.router.W.weight": "mlp.gate.weight"}
    return {"name": "experts", "width": width, "routing": routing}, {**router, **table}
