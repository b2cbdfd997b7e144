"""What cannot become a conversion is refused before anything is written or spent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conversions import SHORT, conversion
from fastweights.cli import main
from fastweights.linearize import CannotLinearize, LinearAttentionConfig, linearize
from fastweights.linearize.distill.adapt import TokenLoss
from fastweights.linearize.distill.best import BestState
from fastweights.linearize.distill.fit import Fit, read_parameters
from fastweights.linearize.distill.phases import plan_run
from fastweights.linearize.distill.pipeline import run_conversion
from fastweights.linearize.distill.plan import plan
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    LinearizationRecipe,
    TransferConfig,
)
from fastweights.linearize.distill.recipes import RECIPES
from fastweights.linearize.evaluate.criteria import CRITERIA
from fastweights.train import Bytes, DataError, TrainingError
from fastweights.training.data.documents import Data
from fastweights.training.loop.json_lines import read_rows
from fastweights.training.loop.optimizers import AdamW
from killable_runs import Heard
from pretrained import llama
from tiny import tiny


@pytest.fixture(scope="module")
def source(source) -> Path:
    """With models that are linear already beside it."""
    tiny("metala").save_pretrained(source / "ours")
    linearize(llama(2, torch.float32)).save_pretrained(source / "linearized")
    return source


REFUSALS: dict[str, tuple[list[str], str]] = {
    "too many softmax layers": (["--softmax-layers", "3"], "cannot keep 3 of 3 layers softmax"),
    "more than are chosen": (
        ["--layers", "0,2", "--softmax-layers", "2"],
        "cannot keep 2 of 2 layers softmax",
    ),
    "no such layer": (["--layers", "1,7"], "has no such layers; choose some of 0–2"),
    "window as long as a sequence": (["--window", "24"], "window = 24 reaches over every sequence"),
    "rate that explodes": (["--transfer-lr", "1e30"], "lr = 1e+30; every update of AdamW moves"),
    "dropout of no window": (["--window", "0", "--dropout", "0.5"], "leave dropout out"),
    "weights of a rule": (
        ["--rule", "gla", "--window", "0", "--recipe", "workshop"],
        "rule = 'gla' without a window has no attention weights that the transfer could compare",
    ),
    "window of a rule without": (["--rule", "supra"], "take window = 0, or rule = 'lightning'"),
    "more landmarks than keys": (
        ["--recipe", "landmarks", "--feature-dim", "8193"],
        "feature_dim = 8,193 makes 16,386 landmarks in each head, placed among the keys of 16,384",
    ),
    "text of less than a sequence": (
        ["--length", "9999"],
        "the training text has 4011 tokens, fewer than one sequence of 9999",
    ),
    "validation within the window": (
        ["--length", "4000", "--window", "3000"],
        "the validation text has 446 tokens, all within the window of 3000",
    ),
    "no text": (["--data", "nosuch.txt"], "no text found at 'nosuch.txt'"),
    "batch": (["--batch", "3", "--accumulate", "2"], "batch = 3 is not divisible"),
}
MODELS = {
    "ours": "this library's mixers, and not the softmax attention",
    "linearized": "it is linearized already; load the model it was made from",
}


def refused(capsys, *arguments: object) -> str:
    assert main(["linearize", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert "──" not in captured.out
    assert captured.err.startswith("fastweights: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_tokenizer_of_another_model_is_refused(source, tmp_path, capsys):
    llama(3, torch.float32, vocab_size=256).save_pretrained(tmp_path / "model")
    Bytes().build([]).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    given = ["--data", source / "text.txt", "--length", 24, "--window", 4, "--device", "cpu"]
    error = refused(capsys, tmp_path / "model", *given, "--out", tmp_path / "run")
    assert "has tokens up to 256, the model embeddings for 256;" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_command_leaves_nothing_behind(source, tmp_path, capsys, options, message):
    given = ["--data", source / "text.txt", "--length", 24, "--window", 4, "--batch", 2]
    out = tmp_path / "new" / "run"
    error = refused(capsys, source / "model", *given, "--device", "cpu", "--out", out, *options)
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "message"), MODELS.items(), ids=MODELS)
def test_models_that_are_linear_already_are_refused(source, tmp_path, capsys, name, message):
    out = tmp_path / "run"
    error = refused(capsys, source / name, "--data", source / "text.txt", "--out", out)
    assert message in error
    assert message in refused(capsys, "plan", source / name)
    assert not out.exists()


def test_our_models_are_not_linearized_in_python():
    with pytest.raises(CannotLinearize, match="this library's mixers"):
        linearize(tiny("metala"))


def test_a_plan_refuses_what_the_run_would(source, capsys):
    error = refused(capsys, "plan", source / "model", "--window", 4, "--softmax-layers", 3)
    assert "cannot keep 3 of 3 layers softmax" in error


def test_the_corrected_command_begins_in_the_same_folder(source, tmp_path):
    long = conversion(source, data=Data((str(source / "text.txt"),), length=9999))
    with pytest.raises(DataError, match="fewer than one sequence of 9999"):
        run_conversion(long, tmp_path / "run")
    assert run_conversion(conversion(source), tmp_path / "run", until="plan")


def test_a_folder_that_was_there_stays(source, tmp_path):
    (tmp_path / "run").mkdir()
    long = conversion(source, data=Data((str(source / "text.txt"),), length=9999))
    with pytest.raises(DataError):
        run_conversion(long, tmp_path / "run")
    assert (tmp_path / "run").is_dir()


VALUES: dict[str, tuple[Any, str]] = {
    **{
        f"dropout {p}": (lambda p=p: TransferConfig(dropout=p), "from 0 to 1")
        for p in (-0.1, 1.1, 2.0, float("nan"))
    },
    **{
        f"rate {rate}": (lambda rate=rate: Fit(optimizer=AdamW(lr=rate)), f"lr = {rate}")
        for rate in (float("nan"), float("inf"), -1.0, 0.0)
    },
    "steps": (lambda: Fit(steps=-3), "steps = -3; it must be 1 or more"),
    "length 1": (lambda: Data(("text",), length=1), "length = 1; it must be 2 or more"),
    "length 0": (lambda: Data(("text",), length=0), "one token predicts the next"),
    "held out": (lambda: Data(("text",), held_out=0), "held_out = 0; it must be 2 or more"),
    "no source": (lambda: Data(()), "give at least one source"),
    "window 1.5": (lambda: LinearAttentionConfig(window=1.5), "window = 1.5; a number of tokens"),  # type: ignore[arg-type]
    "kl": (lambda: TokenLoss(kl=float("inf")), "at least 0 and finite"),
}


@pytest.mark.parametrize(("make", "message"), VALUES.values(), ids=VALUES)
def test_values_are_checked_where_they_are_given(make, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        make()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_layers": -1}, "softmax_layers = -1; it must be 0 or more"),
        ({"seed": -1}, "seed = -1; it must be 0 or more"),
        ({"dtype": "zz"}, "dtype = 'zz'; take the name of a dtype of torch"),
        ({"dtype": "nn"}, "dtype = 'nn'; take the name of a dtype of torch"),
        ({"bits": 3}, "bits=3: the frozen weights have 4 or 8"),
        (
            {"bits": 4, "recipe": RECIPES["t2r"]},
            "bits=4 with a recipe that trains the model's own weights",
        ),
        ({"state_budget": 10**6}, "with a recipe that gives all heads one window"),
        ({"recipe": RECIPES["lolcats"]}, "window = 64 reaches over every sequence of length = 24"),
    ],
)
def test_a_conversion_checks_its_values(source, changes, message):
    with pytest.raises(ValueError, match=message):
        conversion(source, **changes)


def test_processes_that_cannot_share_a_batch_leave_nothing_behind(source, tmp_path, monkeypatch):
    from fastweights.linearize.distill import pipeline
    from fastweights.training.loop.processes import Alone

    class Three(Alone):
        def __init__(self) -> None:
            super().__init__()
            self.count = 3

    monkeypatch.setattr(pipeline, "join_processes", lambda device, patience: Three())
    with pytest.raises(TrainingError, match=r"batch = 2 is not divisible by devices"):
        run_conversion(conversion(source), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_state_of_a_long_window_is_told_at_once(source):
    far = plan(str(source / "model"), LinearizationRecipe(LinearAttentionConfig(window=10**7)))
    assert far.state > 10**7


def test_a_plan_names_every_phase_and_its_seconds(source):
    model, recipe = str(source / "model"), RECIPES["landmarks"]
    few, many = (plan_run(model, recipe, plan(model, recipe), 256, n) for n in (512, 1 << 20))
    assert [phase.name for phase in few] == [
        *("start", "landmarks", "windows", "convert", "transfer", "transfer, measured"),
        *("finetune", "eval, report, export"),
    ]
    assert few[1].tokens == many[1].tokens == 4096
    budget = plan_run(model, recipe, plan(model, recipe), 256, 512, state_budget=1 << 20)
    assert [few[2].tokens, budget[2].tokens] == [2048, 4096]
    assert all(phase.seconds > 0 for phase in few)
    assert many[-1].seconds > 10 * few[-1].seconds
    ranked = plan_run(model, recipe, plan(model, recipe), 256, 1 << 20, CRITERIA["greedy"])
    assert [phase.name for phase in ranked[5:8]] == [
        "transfer, measured",
        "rank-layers",
        "finetune",
    ]
    ranking = ranked[6]
    choices = 1 + 3 + 2 + 1  # of three layers: all, and each left out of those that are left
    assert ranking.tokens == 16 * 256 * (1 + choices)
    guided = RECIPES["kl-guided"]
    trained = plan_run(model, guided, plan(model, guided), 256, 512, CRITERIA["restored"])
    candidates = next(phase for phase in trained if phase.name == "candidates")
    whole = next(phase for phase in trained if phase.name == guided.whole[0].name)
    assert candidates.tokens == pytest.approx(4 / 3 * whole.tokens, rel=0.01)


@pytest.mark.parametrize("rate", [10.0, 1e-2])
def test_a_stage_keeps_what_is_best_on_held_out_text(source, tmp_path, rate):
    fit = replace(SHORT, optimizer=replace(SHORT.optimizer, lr=rate))
    stages = (TransferConfig(fit=fit), AdaptationConfig(fit=fit))
    heard, recipe = Heard(), LinearizationRecipe(LinearAttentionConfig(window=4), stages)
    run_conversion(conversion(source, recipe=recipe), tmp_path, until="finetune", reporter=heard)
    before, after = (
        json.loads((tmp_path / f"{name}.json").read_text())["error"]
        for name in ("convert", "transfer")
    )
    assert after < before * (1 + 1e-6)
    for stage in stages:
        best = BestState.read(tmp_path / stage.name)
        trained = read_parameters(tmp_path / stage.name)
        assert best is not None
        assert best.tensors.keys() == trained.keys()
        assert all(torch.equal(x, trained[name]) for name, x in best.tensors.items())
        rows = read_rows(tmp_path / stage.name / "metrics.jsonl")
        for name, kept in best.losses.items():
            assert kept.loss <= min(row[name] for row in rows if name in row)
            assert kept.step or kept.loss < min(row[name] for row in rows if name in row) + 1e-9
    if rate == 10.0:
        assert any("gained nothing" in line for line in heard.notes)
