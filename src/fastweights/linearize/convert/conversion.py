"""Conversion of a pretrained model to linear attention, in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from fastweights.linearize.convert.attention import install_branches
from fastweights.linearize.convert.attention_layers import (
    AttentionLayer,
    CannotLinearize,
    find_attention_layers,
    softmax_name,
    use_softmax,
)
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.model_classes import convert_model
from fastweights.linearize.convert.transformers_seams import implementation_of
from fastweights.models.quantize import stored_bits
from fastweights.render.units import in_ranges, layers_by_reason


def linearize(
    model: PreTrainedModel,
    config: LinearAttentionConfig = LinearAttentionConfig(),
    layers: Iterable[int] | None = None,
) -> Any:
    """Replace the softmax attention of a pretrained language model by linear attention, in place.

    The model's own modules still project, normalise and rotate; only what happens to q, k and v
    changes. No other weight changes, and with a window as long as the text the output does not
    either. `fastweights.linearize.distill` trains the new parameters.

    Args:
        model: A causal language model of transformers that attends by "sdpa" or "eager".
        config: The linear attention.
        layers: Numbers of the layers to convert. None for all except those that already take
            constant memory (sliding windows) and those that cannot be converted.

    Returns:
        `model` itself, whose type is now ``linearized_<type>``: it can be saved, loaded by
        ``AutoModelForCausalLM``, wrapped by peft, and used to generate.

    Raises:
        CannotLinearize: If the model has no layer to convert, or a chosen one cannot be converted.
    """
    require_softmax(model.config, _name(model))
    softmax = softmax_name(implementation_of(model.config))
    attentions = choose_layers(model, layers)
    stored = {"analog": asdict(config), "sites": [asdict(attention) for attention in attentions]}
    convert_model(model, stored)
    install_branches(model, attentions, config)
    use_softmax(model, softmax)
    return model


def require_softmax(config: PretrainedConfig, name: str) -> None:
    """Check that a configuration is of a softmax model that generates text.

    Args:
        config: The model's configuration.
        name: What the error calls the model.

    Raises:
        CannotLinearize: If it is not.
    """
    if hasattr(config, "linearize"):
        raise CannotLinearize(name, "it is linearized already", "load the model it was made from")
    if config.model_type.startswith("fastweights"):
        raise CannotLinearize(
            name,
            "its layers are this library's mixers, and not the softmax attention of transformers",
            "take a softmax model of transformers, which `fastweights export` writes of one that"
            " was imported",
        )
    if (bits := stored_bits(config)) is not None:
        raise CannotLinearize(
            name, f"its weights are of {bits} bits", "name the model that it was made from"
        )
    if config.is_encoder_decoder:
        raise CannotLinearize(
            name, "its decoder also attends to an encoder", "use a decoder-only model"
        )


def choose_layers(model: PreTrainedModel, layers: Iterable[int] | None) -> list[AttentionLayer]:
    """Return the attentions of the chosen layers, or all that are converted by default.

    Raises:
        CannotLinearize: If there is none, or a chosen one cannot be converted.
    """
    attentions = find_attention_layers(model)
    if not attentions:
        raise CannotLinearize(
            _name(model),
            "none of its layers calls transformers' attention interface",
            "use a family that does, such as llama, qwen, gemma, phi, gpt_neox or mixtral",
        )
    return (
        _layers_by_default(model, attentions)
        if layers is None
        else _layers_by_number(model, attentions, set(layers))
    )


def _layers_by_default(
    model: PreTrainedModel, attentions: list[AttentionLayer]
) -> list[AttentionLayer]:
    chosen = [attention for attention in attentions if attention.skip_reason is None]
    if not chosen:
        raise CannotLinearize(
            _name(model),
            f"no layer is left to convert: {_reasons(attentions)}",
            "name the layers to convert, or leave it",
        )
    return chosen


def _layers_by_number(
    model: PreTrainedModel, attentions: list[AttentionLayer], layers: set[int]
) -> list[AttentionLayer]:
    unknown = layers - {attention.layer for attention in attentions}
    if unknown or not layers:
        there = in_ranges(attention.layer for attention in attentions)
        raise CannotLinearize(
            f"layers {sorted(unknown)}",
            f"{_name(model)} has no such layers",
            f"choose some of {there}",
        )
    chosen = [attention for attention in attentions if attention.layer in layers]
    refused = [attention for attention in chosen if attention.refusal_reason is not None]
    if refused:
        raise CannotLinearize(_name(model), _reasons(refused), "leave these layers out")
    return chosen


def _reasons(attentions: list[AttentionLayer]) -> str:
    """Why layers are not converted, the layers of each reason together."""
    reasons = ((attention.layer, str(attention.skip_reason)) for attention in attentions)
    return "; ".join(layers_by_reason(reasons))


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"
