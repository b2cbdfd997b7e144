"""Softmax layers in whole runs: by criteria, within a cache, by the ranking of another run."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from conversions import SHORT, conversion, copy_tokenizer
from fastweights.cli import main
from fastweights.linearize import LinearAttentionConfig
from fastweights.linearize.distill import steps
from fastweights.linearize.distill.budget import CacheBudget
from fastweights.linearize.distill.pipeline import Conversion, run_conversion
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    LinearizationRecipe,
    TransferConfig,
)
from fastweights.linearize.distill.steps import RankLayersStep
from fastweights.linearize.distill.student import StudentModel
from fastweights.linearize.evaluate.criteria import CRITERIA, AloneLinear, LossMeasure
from fastweights.linearize.evaluate.ranking import Ranking, read_ranking
from fastweights.training.data.documents import Data
from fastweights.training.language.existing import fingerprint
from fastweights.training.loop.processes import leave_processes
from killable_runs import Heard, launch_two
from planted import PREVIOUS, planted_llama
from pretrained import llama

pytestmark = pytest.mark.long


def swapped(source: Path, **changes: Any):
    """A conversion without training."""
    recipe = LinearizationRecipe(LinearAttentionConfig(window=4), ())
    return conversion(source, **{"recipe": recipe, **changes})


def ranking_of(source: Path, order: tuple[int, ...]) -> Ranking:
    damage = {layer: float(-place) for place, layer in enumerate(order)}
    return Ranking("restored", "KL", damage, order, fingerprint(str(source / "model")), "a text")


@pytest.mark.parametrize("name", ["damage", "greedy"])
def test_a_run_keeps_the_layers_that_its_criterion_names(source, tmp_path, name) -> None:
    by = CRITERIA[name]
    whole = swapped(source, softmax_layers=2, rank_by=by)
    assert run_conversion(whole, tmp_path, until="report" if name == "greedy" else "rank-layers")
    found = json.loads((tmp_path / "ranking.json").read_text())
    ranking = read_ranking(tmp_path / "ranking.json")
    assert found["softmax"] == sorted(ranking.order[:2])
    assert ranking.criterion == name
    assert ranking.model == fingerprint(str(source / "model"))
    assert ranking.text.startswith("5 sequences of 24 tokens, held out of ")
    assert found["measure"] == by.measure.words
    if name == "greedy":
        page = (tmp_path / "report" / "report.html").read_text()
        assert f"Order in which they are kept: {', '.join(map(str, ranking.order))}" in page


@pytest.mark.parametrize("by", [CRITERIA["recall"], None], ids=["named", "default"])
def test_a_run_ranks_by_recall(source, tmp_path, by) -> None:
    """Of a model that predicts what followed the same letter before."""
    model = tmp_path / "model"
    planted_llama(258, ord("a")).float().save_pretrained(model)
    copy_tokenizer(source / "model", model)
    data = Data(("shakespeare",), length=320, held_out=5120)
    whole = swapped(source, model=str(model), data=data, softmax_layers=1, rank_by=by)
    assert run_conversion(whole, tmp_path / "run", until="rank-layers")
    ranking = read_ranking(tmp_path / "run" / "ranking.json")
    words = CRITERIA["recall"].measure.words
    assert (ranking.criterion, ranking.measure) == ("recall", words)
    assert ranking.order[0] == PREVIOUS
    assert 1 >= ranking.damage[PREVIOUS] > 2 * ranking.damage[ranking.order[1]] >= 0


def test_a_text_that_cannot_show_recall_ranks_by_damage(source, tmp_path) -> None:
    whole, heard = swapped(source, softmax_layers=1), Heard()
    assert run_conversion(whole, tmp_path, until="rank-layers", reporter=heard)
    assert read_ranking(tmp_path / "ranking.json").criterion == "damage"
    said = "layers are ranked by damage, not by recall: the text that copies are to be set in"
    assert any(note.startswith(said) for note in heard.notes)


def test_another_run_uses_the_ranking(source, tmp_path, monkeypatch) -> None:
    """With another window, and a budget of its own; nothing is measured, and it can be stopped."""
    assert run_conversion(swapped(source), tmp_path / "first", until="rank-layers")
    ranking = read_ranking(tmp_path / "first" / "ranking.json")
    monkeypatch.setattr(steps, "rank_now", lambda *_: pytest.fail("it is ranked again"))
    transfer = TransferConfig(fit=SHORT)
    recipe = LinearizationRecipe(LinearAttentionConfig(window=2), (transfer,))
    second = conversion(source, recipe=recipe, ranking=ranking, softmax_layers=1)
    assert run_conversion(second, tmp_path / "second", until="rank-layers")
    found = json.loads((tmp_path / "second" / "ranking.json").read_text())
    assert read_ranking(tmp_path / "second" / "ranking.json") == ranking
    assert found["softmax"] == [ranking.order[0]]
    assert run_conversion(second, tmp_path / "second", until="finetune")


def test_layers_that_are_not_converted_are_left_out_of_a_ranking(source, tmp_path) -> None:
    ranking = ranking_of(source, (1, 2, 0))
    whole = swapped(source, layers=(0, 2), ranking=ranking, softmax_layers=1)
    assert run_conversion(whole, tmp_path / "run", until="rank-layers")
    assert json.loads((tmp_path / "run" / "ranking.json").read_text())["softmax"] == [2]


def test_the_dtype_of_the_weights_counts(source, tmp_path) -> None:
    """Half as many bytes per key and value let more layers stay."""
    ranking = ranking_of(source, (0, 1, 2))
    kept = {}
    for dtype in ("float32", "bfloat16"):
        whole = swapped(source, ranking=ranking, dtype=dtype, cache_budget=CacheBudget(8_000, 100))
        assert run_conversion(whole, tmp_path / dtype, until="rank-layers")
        kept[dtype] = json.loads((tmp_path / dtype / "ranking.json").read_text())["softmax"]
    assert kept == {"float32": [0], "bfloat16": [0, 1]}


REFUSALS = {
    "another model": (
        lambda source: {"ranking": replace(ranking_of(source, (0, 1, 2)), model="ef" * 32)},
        "this ranking is of another model: of the weights efefef",
    ),
    "missing layers": (
        lambda source: {"ranking": ranking_of(source, (0, 1))},
        r"this ranking has no layers \[2\]",
    ),
    "too small a cache": (
        lambda source: {"cache_budget": CacheBudget(100, 64), "softmax_layers": 0},
        "a cache of 100 bytes per sequence cannot be met",
    ),
    "no recall": (
        lambda source: {
            "rank_by": CRITERIA["recall"],
            "data": Data(("shakespeare",), length=320, held_out=5120),
            "model": str(source / "blind"),
        },
        "the softmax model recalls no token from beyond the window of 4",
    ),
    "too little text to recall": (
        lambda source: {"rank_by": CRITERIA["recall"]},
        "the text that copies are to be set in is too short",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_chosen_is_refused_before_anything(
    source, tmp_path, changes, message
) -> None:
    if not (source / "blind").exists():
        blind = llama(3, torch.float32, vocab_size=258)
        with torch.no_grad():
            blind.lm_head.weight.zero_()
        blind.save_pretrained(source / "blind")
        copy_tokenizer(source / "model", source / "blind")
    whole = swapped(source, **{"softmax_layers": 1, **changes(source)})
    with pytest.raises(ValueError, match=message):
        run_conversion(whole, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"softmax_layers": 1, "cache_budget": CacheBudget(10**6, 64)},
            "softmax_layers = 1 and a budget of 1 MB for the cache: give one of the two",
        ),
        ({"ranking": True}, "a ranking is given, and no layer stays softmax"),
        (
            {"ranking": True, "rank_by": CRITERIA["greedy"], "softmax_layers": 1},
            "a ranking by restored is given, and a criterion to rank by",
        ),
    ],
)
def test_contradictions_are_refused(source, changes, message) -> None:
    given = {name: value for name, value in changes.items() if name != "ranking"}
    if "ranking" in changes:
        given["ranking"] = ranking_of(source, (0, 1, 2))
    with pytest.raises(ValueError, match=message):
        swapped(source, **given)


def test_the_command_ranks_and_uses_rankings(source, tmp_path, capsys) -> None:
    given = [str(source / "model"), "--data", str(source / "text.txt"), "--length", "24"]
    given += ["--window", "4", "--batch", "2", "--transfer-steps", "0", "--finetune-steps", "0"]
    given += ["--validation-tokens", "200", "--device", "cpu"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    verb = ["linearize", "rank-layers", *given]
    assert main([*verb, "--rank-by", "restored", "--out", first]) == 0
    ranking = read_ranking(tmp_path / "first" / "ranking.json")
    assert ranking.criterion == "restored"
    use = ["--ranking", f"{first}/ranking.json", "--cache-budget", "8KiB", "--cache-length", "64"]
    assert main([*verb, *use, "--out", second]) == 0
    found = json.loads((tmp_path / "second" / "ranking.json").read_text())
    assert found["softmax"] == sorted(ranking.order[:1])
    capsys.readouterr()
    plan = ["linearize", "plan", str(source / "model"), "--window", "4"]
    assert main([*plan, "--cache-budget", "8KiB", "--cache-length", "64"]) == 0
    said = capsys.readouterr().out
    assert "budget      1 of 3 layers can stay softmax:" in said
    assert "of 8 KiB per sequence at 64 tokens" in said
    assert main([*plan, *use, "--rank-by", "greedy"]) == 2
    assert "a ranking by restored is given, and a criterion" in capsys.readouterr().err
    both = ["--softmax-layers", "1", "--cache-budget", "8KiB"]
    assert main([*verb, *both, "--out", str(tmp_path / "third")]) == 2
    assert "give one of the two" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()


@dataclass(frozen=True)
class Disagreeing(LossMeasure):
    """The last layer loses most in the first process, and the first layer in the second one."""

    words: ClassVar[str] = "numbers of layers"

    def losses(self, models, batches, choices: Sequence[Collection[int]]) -> list[float]:
        sign = -1 if os.environ["RANK"] == "1" else 1
        return [float(sign * sum(layers)) for layers in choices]


def _rank(out: Path, runs: dict[str, Conversion]) -> None:
    """Write down, beside each run, which layers are linear in this process after its ranking."""
    rank = RankLayersStep.run_together

    def ranked(step: RankLayersStep, student: StudentModel) -> StudentModel | None:
        done = rank(step, student)
        assert done is not None
        path = out / f"{done.run.out.name}-{done.run.processes.index}.json"
        path.write_text(json.dumps(done.linear_layers()))
        return done

    RankLayersStep.run_together = ranked  # type: ignore[method-assign]
    for name, whole in runs.items():
        assert run_conversion(whole, out / name, until="rank-layers")
    leave_processes()


@pytest.mark.slow
def test_two_processes_keep_the_layers_that_the_first_one_names(source, tmp_path) -> None:
    """As they begin, and after every candidate was trained."""
    once = replace(SHORT, steps=2)
    given: dict[str, Any] = {"softmax_layers": 1, "rank_by": AloneLinear(Disagreeing())}
    guided = LinearizationRecipe(
        LinearAttentionConfig(window=4), (AdaptationConfig(fit=once),), selection=0.5
    )
    runs = {
        "measured": swapped(source, **given),
        "trained": swapped(source, recipe=guided, **given),
    }
    launch_two(_rank, tmp_path, runs)
    for name in runs:
        assert json.loads((tmp_path / name / "ranking.json").read_text())["softmax"] == [2]
        for index in (0, 1):
            assert json.loads((tmp_path / f"{name}-{index}.json").read_text()) == [0, 1]
