"""The names of weights in torchtitan's checkpoints and in our folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from fastweights.models import PRESETS, FastWeightsConfig, FastWeightsForCausalLM, find_preset
from fastweights.training.loop.checkpoint import model_folder

Weight = TypeVar("Weight")

PREFIX = "language_model."
"""Where torchtitan's model holds ours."""
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def to_folder_names(weights: Mapping[str, Weight], *, tied: bool) -> dict[str, Weight]:
    """Rename torchtitan's weights as our folders have them.

    Args:
        weights: By their names in torchtitan; others, such as an optimiser's, are left out.
        tied: Whether the head is the embeddings, which a folder holds once.
    """
    named = {
        name.removeprefix(PREFIX): weight
        for name, weight in weights.items()
        if name.startswith(PREFIX)
    }
    if tied:
        named.pop(HEAD, None)
    return named


def from_folder_names(weights: Mapping[str, Weight], *, tied: bool) -> dict[str, Weight]:
    """Rename a folder's weights as torchtitan has them.

    Args:
        weights: By their names in a folder of ours.
        tied: Whether the head is the embeddings, which torchtitan names twice.
    """
    whole = {**weights, HEAD: weights[EMBEDDINGS]} if tied else weights
    return {PREFIX + name: weight for name, weight in whole.items()}


def flavours() -> list[str]:
    """List the presets that are language models, in the order of `PRESETS`."""
    return [name for name, entry in PRESETS.items() if entry.model is FastWeightsForCausalLM]


def find_folder(flavour: str) -> Path | None:
    """Find the folder of a model that a flavour names; None for a preset's name.

    Raises:
        CheckpointError: There is such a folder, but no model in it.
    """
    is_folder = flavour not in PRESETS and Path(flavour).is_dir()
    return model_folder(Path(flavour)) if is_folder else None


def find_config(flavour: str) -> FastWeightsConfig:
    """Find the configuration that a flavour means.

    Args:
        flavour: The name of a preset, or the folder of a language model of ours or of its run.

    Raises:
        ValueError: There is neither such a preset nor such a folder, or it is no language model.
        CheckpointError: There is such a folder, but no model in it.
    """
    folder = find_folder(flavour)
    if folder is not None:
        return FastWeightsConfig.from_pretrained(folder)
    if find_preset(flavour).model is not FastWeightsForCausalLM:
        raise ValueError(
            f"the preset {flavour!r} is a classifier, and torchtitan trains language models; take"
            f" one of {', '.join(flavours())}"
        )
    return find_preset(flavour).config()
