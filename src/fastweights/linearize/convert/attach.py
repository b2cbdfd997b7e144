"""A pretrained model made linear, in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fastweights.linearize.convert.analog import LinearAttentionConfig
from fastweights.linearize.convert.attention import attentions_with_branch
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.families import (
    LinearizedModel,
    config_class,
    install_branches,
    model_class,
    validate_softmax_name,
)
from fastweights.linearize.convert.sites import AttentionLayer, find_attention_layers


def linearize(
    model: PreTrainedModel,
    analog: LinearAttentionConfig = LinearAttentionConfig(),
    layers: Iterable[int] | None = None,
) -> Any:
    """`model` itself, whose chosen `layers` now attend by `analog`, as a ``linearized_<type>`` that
    can be saved.

    Args:
        layers: None: all but those that already take constant memory (sliding windows) or
            cannot be converted

    No other weight changes; with a window as long as the text, the output does not either. Raises
    CannotLinearize for a model without layers to convert, and for a chosen layer that cannot be.
    """
    if isinstance(model, LinearizedModel):
        raise CannotLinearize(
            _name(model), "it is linearized already", "load the model it was made from"
        )
    if model.config.is_encoder_decoder:
        raise CannotLinearize(
            _name(model), "its decoder also attends to an encoder", "use a decoder-only model"
        )
    validate_softmax_name(model.config._attn_implementation)
    sites = choose_layers(model, layers)
    config: Any = model.config
    made = model_class(type(model))
    config.__class__ = config_class(type(config))
    config.linearize = {"analog": asdict(analog), "sites": [asdict(site) for site in sites]}
    model.__class__ = made
    install_branches(model, sites, analog)
    return model


def choose_layers(model: PreTrainedModel, layers: Iterable[int] | None) -> list[AttentionLayer]:
    """The sites of `layers`, or all that are converted by default."""
    sites = find_attention_layers(model)
    if not sites:
        raise CannotLinearize(
            _name(model),
            "none of its layers calls transformers' attention interface",
            "use a family that does, such as llama, qwen, gemma, phi, gpt_neox or mixtral",
        )
    return (
        _layers_by_default(model, sites)
        if layers is None
        else _layers_by_number(model, sites, set(layers))
    )


def _layers_by_default(model: PreTrainedModel, sites: list[AttentionLayer]) -> list[AttentionLayer]:
    chosen = [site for site in sites if site.skip_reason is None]
    if not chosen:
        raise CannotLinearize(
            _name(model),
            f"no layer is left to convert: {_reasons(sites)}",
            "name the layers to convert, or leave it",
        )
    return chosen


def _layers_by_number(
    model: PreTrainedModel, sites: list[AttentionLayer], layers: set[int]
) -> list[AttentionLayer]:
    unknown = layers - {site.layer for site in sites}
    if unknown or not layers:
        there = ", ".join(str(site.layer) for site in sites)
        raise CannotLinearize(
            f"layers {sorted(unknown)}",
            f"{_name(model)} has no such layers",
            f"choose some of {there}",
        )
    chosen = [site for site in sites if site.layer in layers]
    refused = [site for site in chosen if site.refusal_reason is not None]
    if refused:
        raise CannotLinearize(_name(model), _reasons(refused), "leave these layers out")
    return chosen


def _reasons(sites: list[AttentionLayer]) -> str:
    """Why layers are not converted, the layers of each reason together."""
    by_reason: dict[str, list[str]] = {}
    for site in sites:
        by_reason.setdefault(str(site.skip_reason), []).append(str(site.layer))
    return "; ".join(
        f"layers {', '.join(layers)}: {reason}" for reason, layers in by_reason.items()
    )


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"


def branches(model: nn.Module) -> dict[int, LinearBranch]:
    """The branches of a linearized model by layer; with adapters that train them, the active
    adapter's copies.
    """
    return {
        module.layer_idx: _active(module.linear_branch) for module in attentions_with_branch(model)
    }


def _active(branch: Any) -> LinearBranch:
    """peft keeps trained copies (``modules_to_save``) in a wrapper."""
    return (
        branch
        if isinstance(branch, LinearBranch)
        else branch.modules_to_save[branch.active_adapters[0]]
    )
