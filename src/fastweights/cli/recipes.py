"""The recipe of a linearization that a command's options mean."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from fastweights.linearize.distill.changes import StageChange, change_stages, scale_steps
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    LinearizationRecipe,
    StageConfig,
    TransferConfig,
)
from fastweights.linearize.distill.recipe_files import read_recipe
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.runs.stage import Every


def recipe_of(chosen: Namespace) -> LinearizationRecipe:
    """Return the recipe that is named, with what the options change of it.

    Raises:
        ValueError: If a file is no recipe, or an option is of a stage that there is not.
    """
    is_file = isinstance(chosen.recipe, Path)
    recipe = read_recipe(chosen.recipe) if is_file else RECIPES[chosen.recipe]
    given = _given(chosen, "features", "rule", "window")
    recipe = scale_steps(replace(recipe, analog=replace(recipe.analog, **given)), chosen.scale)
    return change_stages(recipe, _changes(recipe, chosen))


def with_training_options(recipe: LinearizationRecipe, chosen: Namespace) -> LinearizationRecipe:
    """Return a recipe with what the options say of every training."""
    return recipe.with_stages(_trained(stage, chosen) for stage in recipe.stages)


def _trained(stage: StageConfig, chosen: Namespace) -> StageConfig:
    every = Every(chosen.log_every, chosen.eval_every, chosen.checkpoint_every)
    settings = {"every": every, "seed": chosen.seed, "bf16": chosen.bf16}
    changed = stage.with_fit(replace(stage.fit, **settings, **_given(chosen, "accumulate")))
    blockwise = chosen.blockwise and isinstance(changed, TransferConfig)
    return replace(changed, blockwise=True) if blockwise else changed


def _changes(recipe: LinearizationRecipe, chosen: Namespace) -> Iterator[StageChange]:
    """What the options change of single stages, the most general first."""
    for name in (stage.name for stage in recipe.stages if chosen.batch is not None):
        yield StageChange(name, "batch", chosen.batch)
    yield from _of_all(recipe, TransferConfig, "dropout", chosen.dropout, "--dropout")
    yield from _of_all(recipe, AdaptationConfig, "kl", chosen.kl, "--kl")
    yield from _of_all(recipe, AdaptationConfig, "model", chosen.teacher, "--teacher")
    yield from _of_all(recipe, AdaptationConfig, "top_k", chosen.top_logits, "--top-logits")
    for stage, field in product(("transfer", "finetune"), ("steps", "lr")):
        if (value := getattr(chosen, f"{stage}_{field}")) is not None:
            yield StageChange(stage, field, value)
    yield from map(StageChange.read, chosen.stage)


def _of_all(
    recipe: LinearizationRecipe, kind: type[StageConfig], field: str, value: Any, option: str
) -> Iterator[StageChange]:
    """A change of all stages of a kind."""
    stages = [stage for stage in recipe.stages if isinstance(stage, kind)]
    if value is not None and not stages:
        raise ValueError(
            f"{option} is of a {kind.__name__}, and the recipe has no such stage; leave it out, or"
            " take another recipe"
        )
    for stage in stages if value is not None else ():
        yield StageChange(stage.name, field, value)


def _given(chosen: Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(chosen, name)) is not None}
