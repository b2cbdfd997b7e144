"""fastweights plan."""

from __future__ import annotations

import json

import pytest

from fastweights.budget.footprint import _trace
from fastweights.cli import main
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

OWN = ["plan", "--mixers=metala,softmax", "--layers=2", "--width=64", "--vocabulary=300"]
WORK = ["--tokens=1e6", "--length=64", "--batch=8", "--price=2"]


def said(capsys, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def refused(capsys, *words: str) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_a_model_of_ones_own(capsys, tmp_path) -> None:
    out = said(capsys, *OWN, *WORK, f"--json={tmp_path / 'plan.json'}")
    names = {line.split()[0] for line in out.splitlines() if line[0] != " "}
    assert names >= {"model", "operations", "training", "devices", "memory", "time", "cost"}
    assert "sent" not in names
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["steps"] == -(-1_000_000 // 512)
    assert found["cost"] == pytest.approx(2 * found["device_hours"])
    assert set(found["operations"]["recurrences"]) == {"Decay", "Softmax"}
    assert f"{found['steps']:,} steps of 8 × 64" in out


def test_a_folder_and_a_preset(capsys, tmp_path) -> None:
    config = FastWeightsConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, mixers=[{"name": "gla"}]
    )
    FastWeightsForCausalLM(config).save_pretrained(tmp_path)
    assert "GLA" not in (out := said(capsys, "plan", f"--from={tmp_path}", *WORK))
    assert "Decay" in out
    assert "70.43M parameters" in said(capsys, "plan", "--preset=pythia-70m", *WORK)


def test_large_counts_have_no_exponents(capsys) -> None:
    large = ["--layers=100", "--width=3072", "--devices=64", "--shard"]
    out = said(capsys, "plan", *large, "--tokens=12345678901", "--length=64")
    assert "12,350,000,000 tokens in" in out
    assert "model       11,520M parameters" in out
    counted = [line for line in out.splitlines() if not line.startswith("training")]
    assert "e+" not in "".join(counted)


def test_a_recipe_says_its_numbers_and_its_command(capsys) -> None:
    out = said(capsys, "plan", "metala-360m", "--devices=8", "--recompute")
    assert "warmup 2000: ours: the paper is silent" in out
    assert "MetaLA, Table 4: MetaLA 0.36B, 15B; MetaLA, Table 5: MetaLA 0.36B, 15B" in out
    assert "tokens 15,000,000,000: MetaLA, Table 5" in out
    assert "but         eq. A31's convolution has no activation" in out
    assert "torchrun --nproc-per-node 8 -m fastweights.cli train --preset=metala-360m" in out
    assert " --recompute" in out.split("train --preset")[1]


def test_a_recipe_recomputes_where_it_does_not_fit_otherwise(capsys) -> None:
    """By few traces: each takes a part of a second."""
    _trace.cache_clear()
    out = said(capsys, "plan", "metala-3b")
    assert "32 × a100, 312 TFLOP/s each: recompute, bf16" in out
    assert "--recompute" in out.split("train --preset")[1]
    assert _trace.cache_info().misses <= 5


def test_options_change_a_recipe(capsys) -> None:
    out = said(capsys, "plan", "mesanet-140m", "--device=h200", "--tokens=1e9", "--batch=64")
    assert "1,000,000,000 tokens in 7,630 steps of 64 × 2,048" in out
    assert "8 × h200" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["plan"], "nothing says how much is trained; name a recipe"),
        (["plan", "metala-360m", "--width=64"], "has a model already; leave out --width"),
        (["plan", "--preset=pythia-70m", "--width=64", *WORK], "name one model only"),
        ([*OWN, *WORK, "--devices=3"], "batch = 8 is not divisible"),
        (["plan", "--layers=80", "--width=16384", *WORK], "too many"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, words: list[str], error: str) -> None:
    assert error in refused(capsys, *words)


def test_recipes_are_listed(capsys) -> None:
    out = said(capsys, "recipes", "mesanet-140m", "metala, table 6")
    assert "mesanet-140m-gla-15b" in out
    assert "1  the warm-up begins at 1e-6" in out
    assert "fastweights reproduce metala-table6 --size paper" in out
    assert "one training image in 25" in out
    assert "28 of 28 rows start by one command, 18 of them by a recipe" in out
    assert "LoLCATs" not in out
    assert "no recipe, and no table of a paper, begins with zz" in refused(capsys, "recipes", "zz")
    assert said(capsys, "list", "--recipes", "dsf-") == said(capsys, "recipes", "dsf-")
