"""fastweights plan"""

from __future__ import annotations

import shlex
from argparse import Namespace
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoConfig

from fastweights.budget import Placing, Workload, find_accelerator, plan_fitting, plan_training
from fastweights.cli.parsers.training import (
    DEVICE,
    PLANNED_BATCH,
    PLANNED_LENGTH,
    VOCABULARY,
)
from fastweights.cli.plans import Lines, describe
from fastweights.models import FastWeightsConfig, find_preset
from fastweights.recipes import (
    ROWS,
    ConversionRecipe,
    Recipe,
    Stated,
    TrainingRecipe,
    command_of,
    find_recipe,
    plan_conversion,
    record_of,
)
from fastweights.training.language.architectures import Architecture, PresetArchitecture
from fastweights.training.loop.checkpoint import model_folder
from fastweights.training.loop.files import write_json


def plan(chosen: Namespace, console: Console) -> None:
    """Print what a training takes."""
    _require_sense(chosen)
    recipe = None if chosen.recipe is None else find_recipe(chosen.recipe)
    workload = _workload(chosen, recipe)
    if isinstance(recipe, ConversionRecipe):
        _refuse_architecture(chosen, recipe)
        found: Any = plan_conversion(recipe, workload)
    else:
        make_plan = plan_training if recipe is None else plan_fitting
        found = make_plan(_config(chosen, recipe), workload)
    lines = [*describe(found), *(_about(recipe, found) if recipe else [])]
    for name, words in lines:
        console.print(f"{name:<12}{words}", soft_wrap=True)
    if chosen.json is not None:
        write_json(chosen.json, record_of(found))


def _require_sense(chosen: Namespace) -> None:
    if chosen.mfu > 1:
        raise ValueError(f"--mfu {chosen.mfu:g} is more than the whole peak; it is at most 1")
    if chosen.recipe is None and chosen.tokens is None:
        raise ValueError(
            "nothing says how much is trained; name a recipe (fastweights recipes) or --tokens"
        )


_ARCHITECTURE = ("mixers", "layers", "width", "preset", "start")


def _given(chosen: Namespace) -> list[str]:
    named = {"start": "from"}
    return [f"--{named.get(n, n)}" for n in _ARCHITECTURE if getattr(chosen, n) is not None]


def _refuse_architecture(chosen: Namespace, recipe: Recipe) -> None:
    if given := [*_given(chosen), *(["--vocabulary"] if chosen.vocabulary else [])]:
        raise ValueError(f"{recipe.name} has a model already; leave out {', '.join(given)}")


def _config(chosen: Namespace, recipe: Recipe | None) -> FastWeightsConfig:
    if isinstance(recipe, TrainingRecipe):
        _refuse_architecture(chosen, recipe)
        return recipe.config()
    given = {n: v for n in ("mixers", "layers", "width") if (v := getattr(chosen, n)) is not None}
    whole = [n for n in ("--preset", "--from") if n in _given(chosen)]
    if len(whole) + bool(given) > 1:
        raise ValueError(f"{', '.join(_given(chosen))}: name one model only")
    if chosen.preset is not None:
        tokens = chosen.vocabulary or find_preset(chosen.preset).config().vocab_size
        return PresetArchitecture(chosen.preset).config(tokens)
    if chosen.start is not None:
        return _stored_config(chosen.start, chosen.vocabulary)
    return Architecture(**given).config(chosen.vocabulary or VOCABULARY)


def _stored_config(start: str, vocabulary: int | None) -> FastWeightsConfig:
    config = AutoConfig.from_pretrained(model_folder(Path(start)))
    if not isinstance(config, FastWeightsConfig):
        raise ValueError(
            f"{start} is a {config.model_type}; plans are made for models of this library, and for"
            " conversions that are recipes"
        )
    config.vocab_size = vocabulary or config.vocab_size
    return config


def _workload(chosen: Namespace, recipe: Recipe | None) -> Workload:
    """The recipe's workload with what the options change of it."""
    count = chosen.devices or (recipe.devices.value if recipe else 1)
    placing = Placing(count, chosen.shard, chosen.recompute, chosen.bf16 or recipe is not None)
    if recipe is None:
        device = find_accelerator(chosen.device or DEVICE)
        workload = Workload(chosen.tokens, PLANNED_LENGTH, PLANNED_BATCH, device, placing)
    else:
        workload = recipe.workload(placing)
    given = {n: v for n in ("tokens", "length", "batch", "accumulate") if (v := getattr(chosen, n))}
    if chosen.device is not None:
        given["device"] = find_accelerator(chosen.device)
    return replace(workload, **given, utilization=chosen.mfu, price=chosen.price)


def _about(recipe: Recipe, found: Any) -> Lines:
    """Where the numbers are from, and how to start it."""
    yield "rows", "; ".join(f"{r.table}: {r.row}" for r in ROWS if r.recipe == recipe.name)
    yield "published", f"{recipe.hardware.value}; hours: {recipe.hours.value}"
    for field in fields(recipe):
        stated = getattr(recipe, field.name)
        if isinstance(stated, Stated) and field.name not in ("hardware", "hours", "shape"):
            value = f"{stated.value:,.12g}" if isinstance(stated.value, float) else stated.value
            yield "", f"{field.name.replace('_', ' ')} {value}: {stated.place}"
    placing = found.workload.placing
    verb, *words = command_of(recipe, placing, found.accumulate)
    words += [f"--{name}" for name in ("shard", "recompute") if getattr(placing, name)]
    yield "command", shlex.join([*_launcher(placing), verb, *words])
    for gap in recipe.gaps:
        yield "but", gap


def _launcher(placing: Placing) -> list[str]:
    if placing.devices == 1:
        return ["fastweights"]
    return ["torchrun", "--nproc-per-node", str(placing.devices), "-m", "fastweights.cli"]
