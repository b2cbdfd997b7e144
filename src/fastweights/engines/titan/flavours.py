"""The models that torchtitan trains by a name: its flavours."""

from __future__ import annotations

from pathlib import Path

from fastweights.models import PRESETS, FastWeightsConfig, FastWeightsForCausalLM, find_preset
from fastweights.runs.checkpoint import model_folder


def flavours() -> list[str]:
    """List the presets that are language models, in the order of `PRESETS`."""
    return [name for name, entry in PRESETS.items() if entry.model is FastWeightsForCausalLM]


def find_config(flavour: str) -> FastWeightsConfig:
    """Find the configuration that a flavour means.

    Args:
        flavour: The name of a preset, or the folder of a language model of ours or of its run.

    Raises:
        ValueError: There is neither such a preset nor such a folder, or it is no language model.
        CheckpointError: There is such a folder, but no model in it.
    """
    if Path(flavour).is_dir():
        return FastWeightsConfig.from_pretrained(model_folder(Path(flavour)))
    if find_preset(flavour).model is not FastWeightsForCausalLM:
        raise ValueError(
            f"the preset {flavour!r} is a classifier, and torchtitan trains language models; take"
            f" one of {', '.join(flavours())}"
        )
    return find_preset(flavour).config()
