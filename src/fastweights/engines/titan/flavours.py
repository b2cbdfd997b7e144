"""The models that torchtitan trains by a name: its flavours."""

from __future__ import annotations

from pathlib import Path

from fastweights.models import PRESETS, FastWeightsConfig, FastWeightsForCausalLM, find_preset
from fastweights.runs.checkpoint import model_folder


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
