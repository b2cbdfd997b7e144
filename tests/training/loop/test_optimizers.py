"""Muon beside AdamW: which weights it updates, how, and that runs of it go on."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim

from fastweights.models import FastWeightsConfig, FastWeightsForSequenceClassification
from fastweights.train import AdamW, Architecture, Bytes, Muon, TrainingError, train
from fastweights.training.language.memory import require_memory_to_train
from fastweights.training.loop.optimizers import hidden_matrices, matrices, set_learning_rates
from fastweights.training.loop.processes import Alone
from killable_runs import end_of, launch_two, sitting, stop_after, tiny

if not hasattr(optim, "Muon"):
    with pytest.raises(TrainingError, match=r"Muon needs torch 2\.9 or later"):
        Muon()
    pytest.skip("torch 2.8 has no Muon, and says so", allow_module_level=True)
MUON = Muon(lr=1e-2, others=AdamW(lr=2e-2))


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    ids = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in ids}


def held(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def language_model(**changes) -> nn.Module:
    return Architecture(layers=2, width=16, **changes).build(Bytes().build([]))


def test_hidden_matrices_are_those_between_embeddings_and_head():
    model = language_model()
    hidden = names_of(model, hidden_matrices(model))
    assert names_of(model, matrices(model)) - hidden == {"lm_head.weight"}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in hidden} == {
        *(f"W_{letter}" for letter in ("q", "alpha", "v", "g", "o")),
        *(f"W_{number}" for number in (1, 2, 3)),
    }


def test_a_classifier_keeps_its_head_from_muon():
    config = FastWeightsConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_labels=3)
    model = FastWeightsForSequenceClassification(config)
    assert names_of(model, matrices(model)) - names_of(model, hidden_matrices(model)) == {
        "score.weight"
    }


def test_every_parameter_has_one_optimizer_and_its_rate():
    model = language_model()
    muon, adamw = MUON.build(model)
    assert names_of(model, held(muon)) == names_of(model, hidden_matrices(model))
    assert sorted(map(id, held(muon) + held(adamw))) == sorted(map(id, model.parameters()))
    set_learning_rates([muon, adamw], lambda peak: peak / 2)
    assert {group["lr"] for group in muon.param_groups} == {5e-3}
    assert {group["lr"] for group in adamw.param_groups} == {1e-2}
    decays = {g["weight_decay"]: names_of(model, g["params"]) for g in adamw.param_groups}
    assert decays[0.1] == {"lm_head.weight"}


def test_only_what_is_trained_is_updated():
    model = language_model()
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    trained = {id(p) for p in model.model.layers[0].parameters()}
    assert {id(p) for one in MUON.build(model) for p in held(one)} == trained
    only = nn.Linear(3, 4, bias=False)
    assert [type(one) for one in MUON.build(only)] == [optim.Muon]


@pytest.mark.parametrize(("rows", "columns"), [(24, 24), (8, 40), (40, 8)])
@pytest.mark.parametrize("matched", [True, False])
def test_an_update_is_orthogonal_and_of_the_stated_size(rows, columns, matched):
    """Newton-Schulz with Jordan's coefficients ends between 0.68 and 1.13, not at 1."""
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows, bias=False)
    left, _, right = torch.linalg.svd(torch.randn(rows, columns), full_matrices=False)
    start = layer.weight.detach().clone()
    layer.weight.grad = left @ torch.linspace(1, 4, min(rows, columns)).diag() @ right
    config = replace(MUON, lr=0.05, weight_decay=0.1, matched=matched)
    config.build(layer)[0].step()
    scale = 0.2 * max(rows, columns) ** 0.5 if matched else max(1, rows / columns) ** 0.5
    update = ((1 - 0.05 * 0.1) * start - layer.weight.detach()) / (0.05 * scale)
    found = left.mT @ update @ right.mT
    assert 0.65 < found.diagonal().min() < found.diagonal().max() < 1.2
    assert (found - found.diagonal().diag()).abs().max() < 0.03


def test_matched_updates_are_as_large_as_adamws():
    torch.manual_seed(0)
    sizes = []
    for config in (Muon(lr=1e-2, weight_decay=0.0), AdamW(lr=1e-2, weight_decay=0.0)):
        layer = nn.Linear(96, 32, bias=False)
        start = layer.weight.detach().clone()
        layer.weight.grad = torch.randn(32, 96)
        config.build(layer)[0].step()
        sizes.append(float((layer.weight.detach() - start).square().mean().sqrt()))
    assert sizes[0] == pytest.approx(0.2 * 1e-2, rel=0.2)
    assert sizes[1] == pytest.approx(1e-2, rel=1e-3), "AdamW's first update, before means settle"


@pytest.mark.parametrize(
    "numbers", [{"lr": 0.0}, {"lr": float("nan")}, {"momentum": 1.0}, {"weight_decay": -0.1}]
)
def test_bad_numbers_are_refused(numbers):
    with pytest.raises(TrainingError, match=f"{next(iter(numbers))} = .*; it must be"):
        Muon(**numbers)


def test_an_older_torch_says_what_to_do(monkeypatch):
    monkeypatch.delattr(optim, "Muon")
    with pytest.raises(TrainingError, match=r"Muon needs torch 2\.9 or later, .* with AdamW"):
        Muon()


def test_a_model_without_hidden_matrices_is_refused():
    with pytest.raises(TrainingError, match="a LayerNorm has no hidden matrices"):
        Muon().build(nn.LayerNorm(3))


def test_muon_needs_less_memory_than_adamw(folder):
    model = Architecture(layers=2, width=1 << 16).config()
    for optimizer, need in ((AdamW(), r"1\.649 TB"), (Muon(), r"1\.237 TB")):
        with pytest.raises(ValueError, match=need):
            require_memory_to_train(model, tiny(folder, optimizer=optimizer), 16, Alone())


# Runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("muon")


@pytest.fixture(scope="module")
def undisturbed(folder) -> tuple:
    train(tiny(folder, optimizer=MUON), folder / "undisturbed", cpu=True)
    return end_of(folder / "undisturbed")


@pytest.mark.usefixtures("undisturbed")
def test_a_checkpoint_has_what_each_optimizer_keeps(folder):
    kept = load_file(folder / "undisturbed/checkpoints/step-00000006/optimizer.safetensors")
    quantities: dict[str, set[str]] = {}
    for name in kept:
        parameter, _, quantity = name.rpartition("/")
        quantities.setdefault(parameter, set()).add(quantity)
    assert quantities["model.layers.0.mixer.W_q.weight"] == {"momentum_buffer"}
    assert quantities["lm_head.weight"] == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("steps", [1, 3])
def test_a_stopped_run_goes_on_to_the_same_bits(folder, undisturbed, tmp_path, steps):
    config = tiny(folder, optimizer=MUON)
    train(config, tmp_path / "out", cpu=True, stop=stop_after(steps))
    assert train(config, tmp_path / "out", cpu=True).complete
    assert end_of(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(folder, undisturbed, tmp_path):
    config = tiny(folder, optimizer=MUON)
    for calls, ended in ((45, -9), (None, 0)):
        process = sitting(config, tmp_path / "out", calls)
        process.join()
        assert process.exitcode == ended
    assert end_of(tmp_path / "out") == undisturbed


# Sharded parameters


@pytest.mark.slow
def test_sharded_matrices_are_updated_as_whole_ones(tmp_path):
    launch_two(_compare_shards, tmp_path)
    assert (tmp_path / "0").exists()


def _compare_shards(folder: Path) -> None:
    """In float64, where Newton-Schulz rounds nothing that shows."""
    from torch.distributed import init_device_mesh, init_process_group
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo")
    torch.Tensor.bfloat16 = torch.Tensor.clone  # type: ignore[method-assign]
    mesh = init_device_mesh("cpu", (2,))
    whole, sharded = _layers(5, 7, 3), _layers(5, 7, 3)
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    _train_both(whole, sharded)
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.data, rtol=0, atol=1e-12)  # type: ignore[attr-defined]
    (folder / os.environ["RANK"]).touch()


def _layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(n, m, dtype=torch.float64) for n, m in pairwise(widths)))


def _train_both(*models: nn.Module) -> None:
    optimizers = [MUON.build(model) for model in models]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 5, dtype=torch.float64, generator=generator)
        for model, several in zip(models, optimizers, strict=True):
            loss: Tensor = (model(x) - x.sum(-1, keepdim=True)).square().mean()
            loss.backward()
            for optimizer in several:
                optimizer.step()
                optimizer.zero_grad()
