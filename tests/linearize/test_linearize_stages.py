"""Runs of several stages: every recipe on a very small model, stopped anywhere, and teachers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conversions import SHORT, conversion, copy_tokenizer, differing, killed, shorten
from fastweights.cli import main
from fastweights.errors import CheckpointError, DataError
from fastweights.linearize import LinearAttentionConfig
from fastweights.linearize.distill import training
from fastweights.linearize.distill.adapt import TeacherSource, TokenLoss
from fastweights.linearize.distill.align import HiddenLoss
from fastweights.linearize.distill.fit import TRAINED
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    AlignmentConfig,
    LinearizationRecipe,
    TransferConfig,
)
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.distill.steps import steps_of, steps_until
from fastweights.linearize.distill.trained import Adapters, AllButMLPs, AllWeights
from fastweights.linearize.distill.transfer import TransferLoss
from fastweights.train import AdamW, Every
from fastweights.training.language.adapters import LoRA
from fastweights.training.loop import layout as layouts
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.processes import leave_processes
from killable_runs import launch_two, stop_after
from pretrained import llama

TWO = replace(SHORT, steps=2, every=Every(log=1, evaluation=2, checkpoint=1))
WINDOW = LinearAttentionConfig(window=4)


pytestmark = pytest.mark.usefixtures("no_pages")


@pytest.fixture(scope="module")
def source(source) -> Path:
    """With a larger teacher beside it."""
    large = llama(3, torch.float32, vocab_size=264, hidden_size=32)
    large.save_pretrained(source / "large")
    copy_tokenizer(source / "model", source / "large")
    return source


def adapted(**changes) -> AdaptationConfig:
    return AdaptationConfig(**{"fit": TWO, **changes})


def several(**changes) -> LinearizationRecipe:
    """Stages of every kind: maps, blocks, half of the layers with a hidden window, KL."""
    loss = TokenLoss(0.5, 1.0, **changes)
    return LinearizationRecipe(
        WINDOW,
        (
            TransferConfig(TransferLoss(0, 0, 1), fit=TWO, name="maps", length=16),
            AlignmentConfig(loss=HiddenLoss(1.0, 0.5, blocks=True), fit=TWO),
            adapted(trained=AllButMLPs(), softmax=0.5, dropout=0.5, name="half"),
            adapted(trained=AllWeights(), loss=loss, name="kl", length=32),
        ),
    )


def test_blocks_are_computed_again_where_a_step_keeps_much(source, tmp_path, monkeypatch):
    whole = conversion(source, recipe=several())
    assert run_conversion(whole, tmp_path / "once", until="finetune")
    monkeypatch.setattr(training, "ROOM", 0)
    monkeypatch.setattr(training, "KEPT", 1 << 20)
    monkeypatch.setattr(layouts, "_recompute_blocks", recompute := Recompute())
    assert run_conversion(whole, tmp_path / "again", until="finetune")
    assert len(recompute.models) == 2
    assert differing(tmp_path / "again", tmp_path / "once") == []


class Recompute:
    """Lets models compute their blocks again, and notes which."""

    def __init__(self) -> None:
        self.models, self.enable = list[object](), layouts._recompute_blocks

    def __call__(self, model: object) -> None:
        self.models.append(model)
        self.enable(model)


FEW = ("mohawk", "window-dropout")
"""One with a stage of each kind, and one whose adapters several stages train."""


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES],
)
def test_every_recipe_trains_all_its_stages(source, tmp_path, name):
    recipe = shorten(RECIPES[name], TWO)
    assert run_conversion(conversion(source, recipe=recipe), tmp_path, until="finetune")
    before = load_file(source / "model" / "model.safetensors")
    for stage in recipe.stages:
        trained = load_file(tmp_path / stage.name / TRAINED)
        assert trained
        assert all(x.isfinite().all() for x in trained.values())
        own = [name for name in trained if name in before]
        assert bool(own) == stage.trained.changes_weights
        assert not own or any(not torch.equal(trained[name], before[name]) for name in own)
        assert (tmp_path / f"{stage.name}.json").exists() == stage.by_layer


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 8], ids=["teacher", "stored logits"])
def test_stages_stopped_anywhere_go_on_to_the_same_model(source, tmp_path, top_k):
    recipe = several(teacher=TeacherSource(str(source / "large"), top_k))
    whole = conversion(source, recipe=recipe, softmax_layers=1)
    assert run_conversion(whole, tmp_path / "once")
    sittings = 0
    while not run_conversion(whole, tmp_path / "often", stop=stop_after(sittings)):
        sittings += 1
    assert sittings >= 5
    assert (tmp_path / "once" / "model" / "model.safetensors").exists()
    assert differing(tmp_path / "once", tmp_path / "often", checkpoints=False) == []
    assert (tmp_path / "once" / "teacher" / "kl").exists() == (top_k is not None)


KILLS = (
    *(("maps", 9), ("hidden", 0), ("hidden", 20), ("rank-layers", 1), ("half", 12), ("kl", 1)),
    *(("kl", 4), ("kl", 25), ("export", 3)),
)
"""Steps, and how many files become final after their beginning; the logits are the first of kl."""


@pytest.mark.slow
def test_stages_killed_again_and_again_go_on_to_the_same_model(source, tmp_path):
    recipe = several(teacher=TeacherSource(str(source / "large"), 8))
    whole = conversion(source, recipe=recipe, softmax_layers=1)
    assert run_conversion(whole, tmp_path / "once")
    assert sum(killed(whole, tmp_path / "often", step, calls) for step, calls in KILLS) >= 7
    assert run_conversion(whole, tmp_path / "often")
    assert differing(tmp_path / "once", tmp_path / "often", checkpoints=False) == []


@pytest.mark.long
def test_layers_that_become_softmax_again_have_their_own_weights(source, tmp_path):
    still = replace(TWO, optimizer=AdamW(lr=1e-30, weight_decay=0.0))
    recipe = LinearizationRecipe(
        WINDOW, (AlignmentConfig(fit=TWO), adapted(trained=AllWeights(), fit=still))
    )
    whole = conversion(source, recipe=recipe, softmax_layers=1)
    assert run_conversion(whole, tmp_path)
    (kept,) = json.loads((tmp_path / "ranking.json").read_text())["softmax"]
    before = load_file(source / "model" / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name.split(".")[2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"0", "1", "2"} - {str(kept)}


def test_a_larger_teacher_of_other_tokens_is_refused(source, tmp_path, capsys):
    from tokenizers import Tokenizer, models

    other = tmp_path / "other"
    llama(1, torch.float32).save_pretrained(other)
    vocabulary = {"a": 0, "b": 1, "<unk>": 2}
    Tokenizer(models.WordLevel(vocabulary, "<unk>")).save(str(other / "tokenizer.json"))
    given = ["--data", source / "text.txt", "--length", 24, "--window", 4, "--device", "cpu"]
    words = [source / "model", *given, "--kl", 1, "--teacher", other, "--out", tmp_path / "run"]
    assert main(["linearize", *map(str, words)]) == 2
    assert "has other tokens than the model (" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_more_logits_than_there_are_are_refused(source, tmp_path):
    recipe = several(teacher=TeacherSource(top_k=258))
    with pytest.raises(DataError, match="top_k = 258 of a teacher with 258 logits are all it has"):
        run_conversion(conversion(source, recipe=recipe), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_stage_of_longer_sequences_than_the_text_is_refused(source, tmp_path):
    recipe = LinearizationRecipe(WINDOW, (adapted(length=9999),))
    with pytest.raises(DataError, match="fewer than one sequence of 9999"):
        run_conversion(conversion(source, recipe=recipe), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="window = 4 reaches over every sequence of length = 3"):
        conversion(source, recipe=LinearizationRecipe(WINDOW, (adapted(length=3),)))


def test_a_folder_of_an_earlier_version_is_refused(source, tmp_path):
    assert run_conversion(conversion(source), tmp_path, until="plan")
    record = json.loads((tmp_path / "run.json").read_text())
    record["method"] = record.pop("recipe")
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="an earlier version of fastweights began"):
        run_conversion(conversion(source), tmp_path)


def test_steps_end_with_a_phase_or_by_name():
    recipe = several()
    names = [step.name for step in steps_of(recipe)]
    assert names == [
        *("plan", "convert", "maps", "hidden", "rank-layers", "half", "kl"),
        *("eval", "report", "export"),
    ]
    last = lambda name: steps_until(recipe, name)[-1].name  # noqa: E731
    ends = {"transfer": "hidden", "finetune": "kl", "half": "half", "export": "export"}
    assert {name: last(name) for name in ends} == ends
    with pytest.raises(ValueError, match="there is no step 'zz' in this run; there are plan"):
        steps_until(recipe, "zz")


def test_the_command_says_every_stage_before_it_trains_one(source, tmp_path, capsys):
    (tmp_path / "mine.json").write_text(
        '{"stages": [{"type": "TransferConfig"}, {"type": "AdaptationConfig", "name": "b",'
        ' "trained": {"type": "AllWeights"}, "loss": {"kl": 1.0, "teacher": {"top_k": 4}}}]}'
    )
    model = str(source / "model")
    changes = ["--scale", "0.1", "--stage", "b.length=32", "--batch", "2", "--transfer-steps", "7"]
    recipe = ["--recipe", str(tmp_path / "mine.json"), "--window", "4", "--length", "24"]
    assert main(["linearize", "plan", model, *recipe, *changes]) == 0
    said = capsys.readouterr().out
    assert "transfer: 156 parameters, 7 steps, 336 tokens of length 24" in " ".join(said.split())
    assert "40 steps, 2,560 tokens of length 32" in said
    assert "of the teacher's logits" in said


def test_options_of_a_stage_that_there_is_not_are_refused(source, capsys):
    for options, message in {
        ("--transfer-steps", "3"): "the recipe has no stage 'transfer'; its stages are finetune",
        (
            "--dropout",
            "0.5",
        ): "--dropout is a setting of attention transfer, and the recipe has none",
        ("--top-logits", "9"): "--top-logits is a setting of KL, and the recipe has none",
        ("--stage", "finetune.model=x"): "teaches nothing where kl = 0",
    }.items():
        given = ["linearize", "plan", str(source / "model"), "--recipe", "t2r", *options]
        assert main(given) == 2
        assert message in capsys.readouterr().err


def _convert(out: Path, source: Path) -> None:
    """Whole and divided."""
    for name, whole in in_processes(source).items():
        for layout in (Layout(), Layout(shard=True, recompute=True)):
            assert run_conversion(whole, out / f"{name} {layout.shard}", layout=layout)
    leave_processes()


def in_processes(source: Path, accumulate: int = 1) -> dict[str, Conversion]:
    """All weights, and adapters where a layer becomes softmax again, with every kind of stage."""
    fit = replace(TWO, accumulate=accumulate)
    stored = several(teacher=TeacherSource(str(source / "large"), 8))
    lora = Adapters(LoRA(), branches=True)
    adapters = (TransferConfig(fit=fit), adapted(trained=lora), adapted(trained=lora, name="b"))
    found = {"stored": stored, "adapters": LinearizationRecipe(WINDOW, adapters)}
    return {
        name: conversion(
            source,
            recipe=recipe.with_stages(stage.with_fit(fit) for stage in recipe.stages),
            softmax_layers=int(recipe.adapters),
        )
        for name, recipe in found.items()
    }


@pytest.mark.slow
def test_two_processes_train_every_stage_as_one(source, tmp_path):
    """The two halves of a batch are the parts of one process."""
    launch_two(_convert, tmp_path, source)
    for name, whole in in_processes(source, accumulate=2).items():
        assert run_conversion(whole, tmp_path / name)
        one = load_file(tmp_path / name / "model" / "model.safetensors")
        for shard in (False, True):
            two = load_file(tmp_path / f"{name} {shard}" / "model" / "model.safetensors")
            assert two.keys() == one.keys()
            for key, tensor in one.items():
                torch.testing.assert_close(two[key], tensor, rtol=1e-3, atol=1e-4, msg=key)
