"""The papers' trainings: their numbers, their places, and the commands that start them."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaConfig

from fastweights.budget import NoRoomError, Placing, count_by_part, find_accelerator, plan_fitting
from fastweights.cli import build_parser
from fastweights.cli.verbs.linearize import conversion
from fastweights.cli.verbs.train import train_config
from fastweights.linearize.distill.plan import plan as plan_of_linearize
from fastweights.linearize.distill.trained import Adapters
from fastweights.recipes import (
    RECIPES,
    ConversionRecipe,
    Stated,
    TrainingRecipe,
    command_of,
    find_recipe,
    plan_conversion,
)
from fastweights.recipes import conversion as conversion_plans
from fastweights.training.loop.schedules import Cosine

TRAININGS = [r for r in RECIPES.values() if isinstance(r, TrainingRecipe)]
CONVERSIONS = [r for r in RECIPES.values() if isinstance(r, ConversionRecipe)]
WHOLE = Placing(bf16=True)
ROOT = Path(__file__).parents[2]
PAPERS = ("MetaLA", "MesaNet", "DSF", "LoLCATs")


def names(recipes: list) -> list[str]:
    return [recipe.name for recipe in recipes]


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_has_its_place(name: str) -> None:
    recipe = RECIPES[name]
    stated = [getattr(recipe, field.name) for field in fields(recipe)]
    places = [one.place for one in stated if isinstance(one, Stated)]
    assert len(places) >= 10
    assert all(p.startswith((*PAPERS, "ours: ", "config")) for p in places)


@pytest.mark.parametrize("recipe", TRAININGS, ids=names(TRAININGS))
def test_models_have_their_published_size(recipe: TrainingRecipe) -> None:
    """Table A8 has one digit: 0.4 billion are 0.38."""
    found = count_by_part(recipe.config()).total
    assert found == pytest.approx(recipe.parameters.value, rel=0.055)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", TRAININGS, ids=names(TRAININGS))
def test_the_command_of_a_training_means_the_recipe(recipe: TrainingRecipe) -> None:
    chosen = build_parser().parse_args(command_of(recipe, WHOLE, 4))
    config = train_config(chosen)
    assert config.model.name == recipe.preset
    assert config.text.sources == (recipe.source,)
    assert (config.batch, config.length) == (recipe.batch.value, recipe.length.value)
    assert (config.accumulate, config.bf16) == (4, True)
    assert (config.text.stream is not None) == recipe.stream
    assert config.optimizer.betas == recipe.betas.value
    assert (config.clip, config.schedule) == (recipe.clip.value, Cosine(recipe.warmup.value))
    assert config.optimizer.lr == recipe.lr.value
    assert config.optimizer.weight_decay == recipe.weight_decay.value
    seen = config.steps * config.batch * config.length
    assert 0 <= seen - recipe.tokens.value < config.batch * config.length


@pytest.mark.parametrize("recipe", TRAININGS, ids=names(TRAININGS))
def test_what_the_command_cannot_say_is_named(recipe: TrainingRecipe) -> None:
    said = " ".join(recipe.gaps)
    assert recipe.precision.value == "bf16" or recipe.precision.value in said


@pytest.mark.parametrize("recipe", CONVERSIONS, ids=names(CONVERSIONS))
def test_the_command_of_a_conversion_means_the_recipe(recipe: ConversionRecipe) -> None:
    found = conversion(build_parser().parse_args(command_of(recipe, WHOLE, 8)))
    assert found.model == recipe.model.value
    assert found.recipe.analog == recipe.settings.analog
    assert found.data.responses
    assert {s.name: s.fit.steps for s in found.recipe.stages} == recipe.stage_steps
    rates = {"transfer": recipe.transfer_lr.value, "finetune": recipe.finetune_lr.value}
    for stage in found.recipe.stages:
        assert stage.fit.optimizer.lr == rates[stage.name]
        assert (stage.fit.batch, stage.fit.accumulate, stage.fit.bf16) == (8, 8, True)
    adapted = found.recipe.stages[-1].trained
    rank = adapted.lora.rank if isinstance(adapted, Adapters) else 0
    assert rank == recipe.rank.value


SMALL = replace(
    find_recipe("lolcats-8b"),
    shape=Stated(
        {
            "vocab_size": 1000,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "ours: a test",
    ),
    length=Stated(128, "ours: a test"),
)


def test_a_conversion_trains_what_linearize_says() -> None:
    """All layers follow from one and two."""
    from transformers import LlamaForCausalLM

    workload = replace(SMALL.workload(WHOLE), price=3.0)
    found = plan_conversion(SMALL, workload)
    planned = plan_of_linearize(LlamaForCausalLM(LlamaConfig(**SMALL.shape.value)), SMALL.settings)
    transfer, adapt = found.stages
    assert found.parameters == planned.parameters
    assert (transfer.trained, adapt.trained) == (planned.branch, planned.adapter)
    assert found.cost == pytest.approx(3.0 * found.device_hours)
    peak = workload.device.bf16 * workload.utilization
    assert found.device_hours == pytest.approx(found.total_operations / peak / 3600)


def test_transfer_is_a_forward_pass_and_adaptation_two_more_of_some() -> None:
    """2 operations per weight forward, without logits; 4 with gradients of inputs alone."""
    transfer, adapt = plan_conversion(SMALL, SMALL.workload(WHOLE)).stages
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert transfer.products == pytest.approx(2 * 3 * block, rel=0.25)
    assert adapt.products == pytest.approx(4 * (3 * block + 64 * 1000), rel=0.15)


def test_a_plan_needs_no_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    sizes = replace(SMALL.workload(WHOLE), batch=4)
    assert plan_conversion(SMALL, sizes).stages[1].trained > 0


def test_adapters_of_a_plan_take_what_those_of_peft_take(monkeypatch: pytest.MonkeyPatch) -> None:
    of = conversion_plans._texts(SMALL), SMALL.settings
    measure = partial(conversion_plans._measure, *of, 2, "finetune", 2, 128, None)
    planned = measure()
    adapted = SMALL.settings.stages[1].trained
    monkeypatch.setattr(conversion_plans, "_adapt", lambda model, lora: adapted.prepare(model))
    conversion_plans._measure.cache_clear()
    assert measure() == planned
    conversion_plans._measure.cache_clear()


def test_a_conversion_that_does_not_fit_is_refused() -> None:
    tiny = replace(find_accelerator("a100"), memory=1e6)
    with pytest.raises(NoRoomError, match="take a device with more memory"):
        plan_conversion(SMALL, replace(SMALL.workload(WHOLE), device=tiny))


def test_recipes_are_named() -> None:
    with pytest.raises(ValueError, match=r"did you mean metala-360m\? All"):
        find_recipe("metala-360")


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["metala-360m", "mesanet-440m"])
def test_the_page_of_plans_has_what_the_command_says(name: str) -> None:
    recipe, costs = find_recipe(name), ROOT / "benchmarks/results/plan/costs.json"
    assert isinstance(recipe, TrainingRecipe)
    rows = json.loads(costs.read_text())["rows"]
    (stored,) = (row for row in rows if (row["recipe"], row["device"]) == (name, "a100"))
    work = recipe.workload(Placing(recipe.devices.value, bf16=True))
    found = plan_fitting(recipe.config(), replace(work, device=find_accelerator("a100")))
    assert found.memory.total == pytest.approx(stored["memory"], rel=0.01)
    assert found.hours == pytest.approx(stored["hours"], rel=0.01)
