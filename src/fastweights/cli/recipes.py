"""The recipe of a linearization that a command's options mean."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fastweights.linearize.distill.changes import StageChange, change_stages, scale_steps
from fastweights.linearize.distill.recipe import (
    LinearizationRecipe,
    StageConfig,
    TransferConfig,
)
from fastweights.linearize.distill.recipe_files import read_recipe
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.training.loop.checkpoint import model_source
from fastweights.training.loop.stage import Every

ANALOG = ("features", "feature_dim", "rule", "window", "sinks", "gates", "convolution", "positions")
"""The options that change the linear attention."""
WITHOUT_LANDMARKS = ("features", "rule", "gates", "convolution")
"""Those that may ask for linear attention that landmarks cannot be the features of."""


def recipe_of(chosen: Namespace) -> LinearizationRecipe:
    """Return the recipe that is named, with what the options change of it.

    Where none is, it is the one with landmarks, or LoLCATs' if the options exclude these.

    Raises:
        ValueError: If a file is no recipe, or an option is of a stage that there is not.
    """
    recipe, given = _named(chosen), _given(chosen, *ANALOG)
    if chosen.one_window or chosen.window == 0:
        given["windows_by_head"] = False
    recipe = scale_steps(replace(recipe, analog=replace(recipe.analog, **given)), chosen.scale)
    recipe = change_stages(recipe, _of_kinds(recipe, chosen))
    recipe = change_stages(recipe, _of_teachers(recipe, chosen))
    return change_stages(recipe, _of_single_stages(chosen))


def _named(chosen: Namespace) -> LinearizationRecipe:
    """The recipe that the options change."""
    if isinstance(chosen.recipe, Path):
        return read_recipe(chosen.recipe)
    if chosen.recipe is not None:
        return RECIPES[chosen.recipe]
    landmarks, given = RECIPES["landmarks"], _given(chosen, *WITHOUT_LANDMARKS)
    fits = all(getattr(landmarks.analog, name) == value for name, value in given.items())
    return landmarks if fits else RECIPES["lolcats"]


def with_training_options(recipe: LinearizationRecipe, chosen: Namespace) -> LinearizationRecipe:
    """Return a recipe with what the options say of every training."""
    return recipe.with_stages(_trained(stage, chosen) for stage in recipe.stages)


def _trained(stage: StageConfig, chosen: Namespace) -> StageConfig:
    every = Every(chosen.log_every, chosen.eval_every, chosen.checkpoint_every)
    settings = {"every": every, "seed": chosen.seed, "bf16": chosen.bf16}
    changed = stage.with_fit(replace(stage.fit, **settings, **_given(chosen, "accumulate")))
    if chosen.blockwise and isinstance(changed, TransferConfig):
        return replace(changed, blockwise=True)
    return changed


def _of_kinds(recipe: LinearizationRecipe, chosen: Namespace) -> Iterator[StageChange]:
    """What the options change of all stages of a kind."""
    transfers = [stage for stage in recipe.stages if isinstance(stage, TransferConfig)]
    yield from _of_all(recipe.stages, "batch", chosen.batch, "--batch", "stage")
    yield from _of_all(transfers, "dropout", chosen.dropout, "--dropout", "attention transfer")
    yield from _of_all(recipe.whole, "kl", chosen.kl, "--kl", "adaptation")


def _of_teachers(recipe: LinearizationRecipe, chosen: Namespace) -> Iterator[StageChange]:
    """What the options change of all stages with a teacher."""
    taught = [stage for stage in recipe.whole if stage.loss.kl]
    teacher = None if chosen.teacher is None else model_source(chosen.teacher)
    yield from _of_all(taught, "model", teacher, "--teacher", "KL")
    yield from _of_all(taught, "top_k", chosen.top_logits, "--top-logits", "KL")


def _of_all(
    stages: Sequence[StageConfig], field: str, value: Any, option: str, what: str
) -> Iterator[StageChange]:
    if value is None:
        return
    if not stages:
        raise ValueError(
            f"{option} is a setting of {what}, and the recipe has none; leave it out, or take"
            " another recipe"
        )
    for stage in stages:
        yield StageChange(stage.name, field, value)


def _of_single_stages(chosen: Namespace) -> Iterator[StageChange]:
    """What the options change of stages that they name."""
    for stage, field in product(("transfer", "finetune"), ("steps", "lr")):
        if (value := getattr(chosen, f"{stage}_{field}")) is not None:
            yield StageChange(stage, field, value)
    yield from map(StageChange.read, chosen.stage)


def _given(chosen: Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(chosen, name)) is not None}
