"""Conversions of a very small softmax model, of a few steps each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fastweights.linearize import LinearAttentionConfig
from fastweights.linearize.distill.fit import Fit
from fastweights.linearize.distill.pipeline import Conversion
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    LinearizationRecipe,
    TransferConfig,
)
from fastweights.train import Bytes, Every
from fastweights.training.data.documents import Data
from pretrained import llama

SHORT = Fit(steps=4, batch=2, every=Every(log=1, evaluation=2, checkpoint=2))


def write_source(folder: Path) -> Path:
    """A softmax model on disk, with its tokenizer and a text."""
    llama(3, torch.float32, vocab_size=258).save_pretrained(folder / "model")
    Bytes().build([]).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(
        "".join(f"{n} sheep and {n * n % 97} goats\n" for n in range(200))
    )
    return folder


def conversion(source: Path, **changes) -> Conversion:
    recipe = LinearizationRecipe(
        LinearAttentionConfig(window=4), (TransferConfig(fit=SHORT), AdaptationConfig(fit=SHORT))
    )
    data = Data((str(source / "text.txt"),), length=24, held_out=94)
    return replace(Conversion(str(source / "model"), data, recipe), **changes)


def shorten(recipe: LinearizationRecipe, fit: Fit = SHORT) -> LinearizationRecipe:
    """The recipe with a window and stages for a very small model."""
    analog = replace(recipe.analog, window=min(recipe.analog.window, 4))
    stages = (replace(stage, length=None).with_fit(fit) for stage in recipe.stages)
    return replace(recipe, analog=analog).with_stages(stages)
