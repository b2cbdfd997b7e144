"""A conversion gives the same bits in one sitting, verb by verb, and killed anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conversions import SHORT, conversion, differing, killed, shorten
from fastweights.linearize.distill.adapt import LoRA
from fastweights.linearize.distill.fit import TRAINED
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import LinearizationRecipe
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.distill.steps import steps_of
from fastweights.linearize.distill.trained import Adapters
from killable_runs import launch_two

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_pages")]


def _transfer(**changes) -> LinearizationRecipe:
    transfer, adapt = RECIPES["lolcats"].stages
    return RECIPES["lolcats"].with_stages((replace(transfer, **changes), adapt))


def _adapt(**changes) -> LinearizationRecipe:
    transfer, adapt = RECIPES["lolcats"].stages
    return RECIPES["lolcats"].with_stages((transfer, replace(adapt, **changes)))


RULES = {
    rule: replace(RECIPES["lolcats"], analog=replace(RECIPES["lolcats"].analog, rule=rule))
    for rule in ("gla", "metala", "gated_deltanet", "mesa")
}
TWO_STAGES = (
    *("lolcats", "lolcats-linear", "workshop", "hedgehog"),
    *("no-transfer", "t2r", "supra"),
)
"""Those of more have a file of their own."""
CASES: dict[str, tuple[LinearizationRecipe, dict[str, object]]] = {
    **{name: (RECIPES[name], {}) for name in TWO_STAGES},
    **{name: (recipe, {}) for name, recipe in RULES.items()},
    "softmax layers": (RECIPES["lolcats"], {"softmax_layers": 1}),
    "softmax layers, all weights": (RECIPES["t2r"], {"softmax_layers": 1}),
    "chosen layers": (RECIPES["lolcats"], {"layers": (0, 2)}),
    "blockwise": (_transfer(blockwise=True), {"layers": (0, 2), "softmax_layers": 1}),
    "dropout": (_transfer(dropout=0.5), {}),
    "blockwise dropout": (_transfer(blockwise=True, dropout=0.5), {}),
    "dropout of adapters": (_adapt(trained=Adapters(LoRA(dropout=0.5))), {"softmax_layers": 1}),
    "branches adapt": (_adapt(trained=Adapters(branches=True)), {}),
    "another seed": (RECIPES["lolcats"], {"seed": 7}),
}


EACH_TIME = ("blockwise dropout",)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        pytest.param(*case, id=name, marks=() if name in EACH_TIME else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
def test_verb_by_verb_is_one_sitting(source, tmp_path, recipe, changes):
    whole = conversion(source, recipe=shorten(recipe), **changes)
    assert run_conversion(whole, tmp_path / "once")
    ranked = (
        ("rank-layers",) if whole.softmax_layers else ()
    )  # by itself it ranks them all the same
    for verb in ("convert", "transfer", *ranked, "finetune", "export"):
        torch.seed()  # as in a process of its own
        assert run_conversion(whole, tmp_path / "verbs", until=verb)
    assert (tmp_path / "once" / "model" / "model.safetensors").exists()
    assert differing(tmp_path / "once", tmp_path / "verbs") == []


def test_dropout_is_the_same_block_by_block(source, tmp_path):
    found = []
    for blockwise in (False, True):
        recipe = _transfer(dropout=0.5, blockwise=blockwise)
        whole = conversion(source, recipe=shorten(recipe.with_stages(recipe.by_layer)))
        assert run_conversion(whole, tmp_path / str(blockwise))
        found.append((tmp_path / str(blockwise) / "model" / "model.safetensors").read_bytes())
    assert found[0] == found[1]


def test_another_seed_begins_with_other_adapters(source, tmp_path):
    for seed in (0, 1):
        recipe = conversion(source).recipe
        whole = conversion(source, seed=seed, recipe=recipe.with_stages(recipe.stages[1:]))
        assert run_conversion(whole, tmp_path / str(seed), until="finetune")
    ends = [(tmp_path / str(seed) / "finetune" / TRAINED).read_bytes() for seed in (0, 1)]
    assert ends[0] != ends[1]


KILLS = [
    *(("plan", 0), ("convert", 0), ("convert", 2), ("transfer", 0), ("transfer", 9)),
    *(("transfer", 30), ("rank-layers", 0), ("rank-layers", 1), ("finetune", 0), ("finetune", 2)),
    *(("finetune", 5), ("finetune", 30), ("eval", 1), ("report", 1), ("export", 1), ("export", 9)),
]
"""Verbs, and how many files become final after their beginning: finetune's first checkpoint is
written after its folder and its first rows."""


@pytest.mark.slow
@pytest.mark.parametrize("blockwise", [False, True], ids=["at once", "blockwise"])
def test_killed_again_and_again_it_is_one_sitting(source, tmp_path, blockwise):
    recipe = shorten(_transfer(blockwise=blockwise, dropout=0.3))
    whole = conversion(source, recipe=recipe, softmax_layers=1)
    assert run_conversion(whole, tmp_path / "once")
    kills = sum(killed(whole, tmp_path / "often", verb, calls) for verb, calls in KILLS)
    assert kills >= 12
    assert run_conversion(whole, tmp_path / "often")
    assert differing(tmp_path / "once", tmp_path / "often") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_killed_at_random_it_is_one_sitting(source, tmp_path, seed):
    whole = conversion(source, recipe=shorten(_transfer(dropout=0.3)), softmax_layers=1)
    assert run_conversion(whole, tmp_path / "once")
    random, verbs = np.random.default_rng(seed), steps_of(whole.recipe)
    for _ in range(12):
        verb = verbs[random.integers(len(verbs))].name
        killed(whole, tmp_path / "often", verb, int(random.integers(0, 60)))
    assert run_conversion(whole, tmp_path / "often")
    assert differing(tmp_path / "once", tmp_path / "often") == []


def _begin_finetune(whole: Conversion, out: Path) -> None:
    assert run_conversion(whole, out, until="rank-layers")
    torch.seed()  # every process stands elsewhere
    assert run_conversion(whole, out, until="finetune")


@pytest.mark.slow
def test_two_processes_begin_to_adapt_as_one(source, tmp_path):
    """With a learning rate of nothing to speak of, what adapters end as is what they began as."""
    still = replace(SHORT, optimizer=replace(SHORT.optimizer, lr=1e-30))
    whole = conversion(source, recipe=shorten(RECIPES["lolcats"], still))
    launch_two(_begin_finetune, whole, tmp_path / "two")
    assert run_conversion(whole, tmp_path / "one", until="finetune")
    one, two = (load_file(tmp_path / name / "finetune" / TRAINED) for name in ("one", "two"))
    begun = [name for name in one if "lora_A" in name]
    assert begun
    assert all(torch.equal(one[name], two[name]) for name in begun)
