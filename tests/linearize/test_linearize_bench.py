"""Generation benchmarks of linearized models, and branches that LoLCATs' own code has trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from families import LAYERS, logits, padded, student, teacher
from fastweights.lab.bench.linearized import crossover, memory_ratio, plot_generation
from fastweights.linearize import (
    CannotLinearize,
    LinearAttentionConfig,
    branches,
    from_lolcats,
    linearize,
)
from fastweights.linearize.evaluate.generation import GenerationRow, bench_generation
from fastweights.render.plots import png


@pytest.mark.usefixtures("pictures")
def test_generation_rows_say_what_was_measured() -> None:
    model = student().train()
    rows = list(bench_generation(model, batches=(1, 2), prompt=5, tokens=(6, 3)))
    assert [(r.contender, r.batch, r.tokens) for r in rows] == [
        (name, batch, tokens)
        for batch in (1, 2)
        for tokens in (3, 6)
        for name in ("linear", "softmax")
    ]
    assert all(0 < row.last <= row.seconds and row.throughput > 0 for row in rows)
    assert memory_ratio(rows) == 1.0
    assert memory_ratio(rows, "softmax") == (5 + 6) / (5 + 3)
    assert [r.state_bytes for r in rows[1::2]] == [
        2 * LAYERS * 16 * 4 * b * (5 + t) for b in (1, 2) for t in (3, 6)
    ]
    assert png(plot_generation(rows)).startswith(b"\x89PNG")
    assert model.training


def test_a_batch_is_over_when_its_time_is() -> None:
    rows = list(
        bench_generation(student(), batches=(1, 2), prompt=2, tokens=(1, 2, 3), seconds=0.0)
    )
    assert [(row.batch, row.tokens) for row in rows[::2]] == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("linear", "want"),
    [((1.0, 1.0, 1.0), 10), ((3.0, 3.0, 3.0), 30), ((1.0, 3.0, 3.0), 30), ((9.0, 9.0, 9.0), None)],
)
def test_the_crossover_is_where_linear_stays_ahead(
    linear: tuple[float, ...], want: int | None
) -> None:
    softmax = [
        GenerationRow("softmax", 1, 0, tokens, 0, tokens / 10, 0, 1) for tokens in (10, 20, 30)
    ]
    rows = [
        replace(row, contender="linear", seconds=spent)
        for row, spent in zip(softmax, linear, strict=True)
    ]
    assert crossover([*rows, *softmax], 1) == want


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "peft"])
def test_branches_of_the_official_code(wrapped: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, prefix = {}, "base_model.model." * wrapped
    for layer in range(LAYERS):
        name = f"{prefix}model.layers.{layer}.self_attn"
        for side in "qk":
            saved[f"{name}.feature_map_{side}.mlp.layer"] = torch.randn(4, 8, 6)
        saved[f"{name}.window_factors"] = torch.randn(1, 4, 1, 1)
        saved[f"{name}.q_proj.lora_A.default.weight"] = torch.randn(4, 32)
    torch.save(
        {"model_state_dict": saved, "step": 7} if wrapped else saved, tmp_path / "distill.pt"
    )
    model = from_lolcats(teacher(), tmp_path / "distill.pt", window=4)
    branch, name = branches(model)[1], f"{prefix}model.layers.1.self_attn"
    x = torch.randn(2, 3, 4, 8)
    projected = torch.einsum("hdf,blhd->blhf", saved[f"{name}.feature_map_k.mlp.layer"], x)
    want = torch.cat([projected.softmax(-1), (-projected).softmax(-1)], -1)
    torch.testing.assert_close(branch.phi_k(x), want)
    torch.testing.assert_close(branch.mix, saved[f"{name}.window_factors"].flatten())
    assert model.config.linearize["analog"]["per_query_head"]
    assert not torch.equal(
        logits(model, padded()),
        logits(linearize(teacher(), LinearAttentionConfig(window=4)), padded()),
    )


def test_a_file_without_branches_is_refused(tmp_path: Path) -> None:
    torch.save({"lm_head.weight": torch.zeros(2, 2)}, tmp_path / "other.pt")
    with pytest.raises(CannotLinearize, match=r"it has none of feature_map_q\.mlp\.layer"):
        from_lolcats(teacher(), tmp_path / "other.pt")
