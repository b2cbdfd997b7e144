"""MiniMax-Text-01: lightning attention with softmax attention between it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastweights.importers.attention import attention, projections
from fastweights.importers.llama import OUTER
from fastweights.importers.plan import (
    Convert,
    ImportPlan,
    Table,
    TensorSource,
    rows,
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
    return ImportPlan(
        config,
        {**OUTER, **stack_layers(config, "model.layers", tables)},
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
        return {**projections(""), "mixer.W_o.weight": scaled("self_attn.o_proj.weight", beta)}
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
        "mixer.W_o.weight": scaled("self_attn.out_proj.weight", beta),
    }


def _mlp(source: CheckpointSource, beta: float) -> Table:
    """The MLP, which is the one expert: a loaded model has its matrices stacked, a folder apart.

    Raises:
        ValueError: There is more than one expert.
    """
    settings = source.settings
    if settings["num_local_experts"] > 1:
        raise ValueError(
            f"this {settings.kind} checkpoint has {settings['num_local_experts']} experts in every"
            " layer, which cannot be imported; only one can"
        )
    if "model.layers.0.mlp.experts.gate_up_proj" not in source.names:
        theirs = "block_sparse_moe.experts.0"
        return {
            "mlp.W_1.weight": f"{theirs}.w1.weight",
            "mlp.W_2.weight": f"{theirs}.w3.weight",
            "mlp.W_3.weight": scaled(f"{theirs}.w2.weight", beta),
        }
    width, fused = settings["intermediate_size"], "mlp.experts.gate_up_proj"
    return {
        "mlp.W_1.weight": TensorSource(fused, _first_expert(rows(0, width))),
        "mlp.W_2.weight": TensorSource(fused, _first_expert(rows(width))),
        "mlp.W_3.weight": TensorSource(
            "mlp.experts.down_proj", _first_expert(lambda weight: weight * beta)
        ),
    }


def _first_expert(convert: Convert) -> Convert:
    return lambda experts: convert(experts[0])


def scaled(theirs: str, factor: float) -> TensorSource:
    """Take their tensor times a factor."""
    return TensorSource(theirs, lambda weight: weight * factor)
