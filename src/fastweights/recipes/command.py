"""The command lines that train a recipe, as far as options exist."""

from __future__ import annotations

from fastweights.budget import Placing
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.recipes.recipe import ConversionRecipe, Recipe, TrainingRecipe


def command_of(recipe: Recipe, placing: Placing, accumulate: int) -> list[str]:
    """The words of the command that trains a recipe, without those of `placing` but ``--bf16``.

    Args:
        recipe: The recipe.
        placing: How the model lies on the devices, each of which is a process.
        accumulate: Parts of a device's share of a batch.
    """
    words = (
        _convert(recipe, accumulate)
        if isinstance(recipe, ConversionRecipe)
        else _train(recipe, accumulate)  # type: ignore[arg-type]
    )
    return [*words, *(["--bf16"] if placing.bf16 else [])]


def _train(recipe: TrainingRecipe, accumulate: int) -> list[str]:
    options: dict[str, object] = {
        "preset": recipe.preset,
        "data": recipe.source,
        "tokenizer": recipe.tokenizer.value,
        "steps": recipe.steps,
        "batch": recipe.batch.value,
        "length": recipe.length.value,
        "accumulate": accumulate,
        "lr": recipe.lr.value,
        "schedule": recipe.schedule.value,
        "warmup": recipe.warmup.value,
        "weight-decay": recipe.weight_decay.value,
        "beta2": recipe.betas.value[1],
        "clip": recipe.clip.value,
        "checkpoint-every": 1000,
        "eval-every": 1000,
        "out": f"runs/{recipe.name}",
    }
    return ["train", *_words(options), *(["--stream"] if recipe.stream else [])]


def _convert(recipe: ConversionRecipe, accumulate: int) -> list[str]:
    rates = {"transfer": recipe.transfer_lr.value, "finetune": recipe.finetune_lr.value}
    options: dict[str, object] = {
        "recipe": recipe.recipe,
        "features": recipe.features.value,
        "window": recipe.window.value,
        "data": recipe.source,
        "length": recipe.length.value,
        "batch": recipe.batch.value,
        "accumulate": accumulate,
    }
    for stage, steps in recipe.stage_steps.items():
        options |= {f"{stage}-steps": steps, f"{stage}-lr": rates[stage]}
    left_out = {stage.name for stage in RECIPES[recipe.recipe].stages} - {*recipe.stage_steps}
    options |= {f"{stage}-steps": 0 for stage in left_out}
    options |= {"dtype": recipe.dtype, "out": f"conversions/{recipe.name}"}
    return ["linearize", recipe.model.value, *_words(options), "--responses"]


def _words(options: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]
