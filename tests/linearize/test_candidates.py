"""Candidates that are trained before layers are ranked (KL-guided layer selection)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conversions import SHORT, conversion
from fastweights.linearize import LinearAttentionConfig, linearize
from fastweights.linearize.distill.adapt import TeacherSource, TokenLoss
from fastweights.linearize.distill.fit import copy_parameters
from fastweights.linearize.distill.pipeline import run_conversion
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    AlignmentConfig,
    LinearizationRecipe,
)
from fastweights.linearize.distill.run import ConversionRun, ConversionText
from fastweights.linearize.distill.trained import AllWeights
from fastweights.linearize.evaluate.criteria import CRITERIA, Candidates, Divergence
from killable_runs import stop_after

pytestmark = pytest.mark.long


def guided(**changes: Any) -> LinearizationRecipe:
    """Alignment, and KL of all weights, half of whose steps every candidate is trained for."""
    loss = TokenLoss(0.0, 1.0, TeacherSource(top_k=8))
    kl = AdaptationConfig(AllWeights(), loss, SHORT, name="kl")
    given = {"stages": (AlignmentConfig(fit=SHORT), kl), "selection": 0.5, **changes}
    return LinearizationRecipe(LinearAttentionConfig(window=4), **given)


def test_every_candidate_is_trained_before_it_is_judged(source, tmp_path) -> None:
    """For half of the steps, from what the alignment left, and stopped anywhere; then by KL."""
    recipe, by = guided(), CRITERIA["restored"]
    whole = conversion(source, recipe=recipe, softmax_layers=1, rank_by=by)
    sittings = 0
    while not run_conversion(whole, tmp_path, until="rank-layers", stop=stop_after(9 * sittings)):
        sittings += 1
    assert sittings >= 2
    found = json.loads((tmp_path / "ranking.json").read_text())
    assert found["measure"] == "KL from softmax, nats per token, after 0.5 of the steps of kl"
    losses, original = {}, llama_at(source / "model")
    for kept in ("none", "0", "1", "2"):
        folder = tmp_path / f"candidate-{kept}"
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        assert json.loads(rows[-1])["step"] == 2
        linear = [layer for layer in range(3) if str(layer) != kept]
        model = linearize(llama_at(source / "model"), recipe.analog, linear)
        copy_parameters(model, load_file(folder / "trained.safetensors"))
        assert any("layers.1.mlp" in name for name in load_file(folder / "trained.safetensors"))
        losses[kept] = divergence_of(model, original, linear, whole, tmp_path)
    want = {str(layer): losses["none"] - losses[str(layer)] for layer in range(3)}
    assert found["damage"] == pytest.approx(want, abs=1e-6)
    assert [path.name for path in (tmp_path / "teacher").iterdir()] == ["kl"]


def llama_at(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def divergence_of(model: Any, original: Any, linear: list[int], whole: Any, out: Path) -> float:
    text = ConversionText(ConversionRun(whole, out))
    models = Candidates(model, lambda: original)
    return Divergence().losses(models, text.comparison_batches(), [linear])[0]


def test_nobody_is_trained_where_no_layer_stays(source, tmp_path) -> None:
    whole = conversion(source, recipe=guided(), rank_by=CRITERIA["restored"])
    assert run_conversion(whole, tmp_path, until="rank-layers")
    assert list(tmp_path.glob("candidate-*")) == []


def test_without_an_adaptation_there_is_nothing_to_train_them_by() -> None:
    alone = guided().with_stages((AlignmentConfig(fit=SHORT),))
    assert alone == guided(stages=(AlignmentConfig(fit=SHORT),), selection=0.0)
    with pytest.raises(ValueError, match="and the recipe has none"):
        guided(stages=(AlignmentConfig(fit=SHORT),))
