"""The layouts of a training over several processes: the same training, and the same checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import optim
from transformers import AutoModelForCausalLM

from fastweights.errors import TrainingError
from fastweights.train import (
    AdamW,
    Architecture,
    Bytes,
    CheckpointError,
    Constant,
    ExistingModel,
    LoRA,
    Muon,
    TrainConfig,
    model_folder,
    train,
)
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.processes import leave_processes
from killable_runs import launch, stop_after, tiny
from pretrained import llama

LAYOUTS = {
    "replicated": Layout(),
    "sharded": Layout(shard=True),
    "sliced-sharded": Layout(slices=2, shard=True, recompute=True),
}
MORE = {
    "offloaded": Layout(shard=True, offload=True),
    "recomputed": Layout(recompute=True),
    "sharded-recomputed": Layout(shard=True, recompute=True),
    "sliced": Layout(slices=2),
}


CHANGED: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 2},
    "bf16": {"bf16": True},
}
if hasattr(optim, "Muon"):  # torch 2.8 has none: `runs/test_optimizers.py`
    CHANGED["muon"] = {"optimizer": Muon(lr=1e-2), "z_loss": 1e-3}


def config_in(folder: Path, **changes) -> TrainConfig:
    mixers = ({"name": "metala", "heads": 2}, {"name": "gated_deltanet", "heads": 2})
    model = Architecture(mixers, layers=2, width=16)
    # Adam's first updates have the size of the rate whatever the gradient's, rounded to zero or not
    optimizer = AdamW(lr=1e-2, eps=1e-4)
    return tiny(folder, model=model, optimizer=optimizer, schedule=Constant(), **changes)


def run_all(folder: Path) -> None:
    """Some layouts, and sharded runs that stop half-way."""
    config, sharded = config_in(folder), Layout(shard=True)
    for name, layout in LAYOUTS.items():
        train(config, folder / name, cpu=True, layout=layout)
    for name in ("resumed", "left-sharded"):
        train(config, folder / name, cpu=True, layout=sharded, stop=stop_after(3))
    train(config, folder / "left-whole", cpu=True, stop=stop_after(3))
    train(config, folder / "resumed", cpu=True, layout=sharded)
    train(existing(folder, LoRA(2)), folder / "lora-sharded", cpu=True, layout=sharded)
    leave_processes()


def run_more(folder: Path) -> None:
    """The other layouts, and what is trained otherwise."""
    config, sharded = config_in(folder), Layout(shard=True)
    for name, layout in MORE.items():
        train(config, folder / name, cpu=True, layout=layout)
    for name, changed in CHANGED.items():
        train(replace(config, **changed), folder / name, cpu=True)
        train(replace(config, **changed), folder / f"{name}-sharded", cpu=True, layout=sharded)
    layout = Layout(shard=True, recompute=True)
    train(existing(folder, None), folder / "all-weights-sharded", cpu=True, layout=layout)
    leave_processes()


def existing(folder: Path, lora: LoRA | None) -> TrainConfig:
    """A Llama of transformers, all of it or adapters."""
    whole = config_in(folder)
    model = ExistingModel(str(folder / "llama"), lora)
    return replace(whole, model=model, text=replace(whole.text, tokenization=model.tokenization))


def go_on(folder: Path) -> None:
    for name in ("left-whole-to-four", "left-sharded-to-four"):
        train(config_in(folder), folder / name, cpu=True, layout=Layout(shard=True))
    leave_processes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs of two processes, and one of a single one."""
    folder = tmp_path_factory.mktemp("layouts")
    train(config_in(folder), folder / "alone", cpu=True)
    llama(2, torch.float32, vocab_size=258).save_pretrained(folder / "llama")
    Bytes().build([]).save_pretrained(folder / "llama")
    train(existing(folder, LoRA(2)), folder / "lora", cpu=True)
    launch(2, run_all, folder)
    return folder


@pytest.fixture(scope="module")
def more(runs) -> Path:
    """The same folder with further runs."""
    train(existing(runs, None), runs / "all-weights", cpu=True)
    launch(2, run_more, runs)
    return runs


def losses(run: Path) -> torch.Tensor:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([[row["loss"], row.get("val_loss", 0)] for row in rows])


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def distance(one: Path, other: Path) -> float:
    pairs = zip(weights(one).items(), weights(other).items(), strict=True)
    return max(float((x - y).abs().max()) for (_, x), (_, y) in pairs)


pytestmark = [pytest.mark.long, pytest.mark.sampled]


def require_alike(one: Path, other: Path) -> None:
    torch.testing.assert_close(losses(one), losses(other), rtol=2e-5, atol=0)
    assert distance(one, other) < 1e-4


@pytest.mark.parametrize("name", LAYOUTS)
def test_is_the_training_of_one_process(runs, name):
    require_alike(runs / name, runs / "alone")


def test_adapters_stay_whole(runs):
    require_alike(runs / "lora", runs / "lora-sharded")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MORE, "accumulated", "accumulated-sharded"])
def test_more_are_the_training_of_one_process(more, name):
    require_alike(more / name, more / "alone")


@pytest.mark.slow
def test_existing_models_are_divided_too(more):
    require_alike(more / "all-weights", more / "all-weights-sharded")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHANGED.keys() - {"accumulated"}))
def test_bfloat16_rounds_alike(more, name):
    """Muon's Newton-Schulz, too."""
    one, other = losses(more / name), losses(more / f"{name}-sharded")
    torch.testing.assert_close(one, other, rtol=1e-3, atol=0)


def test_resumes_bit_for_bit(runs):
    assert distance(runs / "resumed", runs / "sharded") == 0
    assert torch.equal(losses(runs / "resumed"), losses(runs / "sharded"))


def test_checkpoints_have_parts_and_say_so(runs):
    left = runs / "left-sharded"
    (newest,) = (left / "checkpoints").glob("step-00000003")
    assert len(list(newest.glob("parts/*.safetensors"))) == 2
    with pytest.raises(CheckpointError, match=r"parts of a model.*finish the run"):
        model_folder(left)


def test_result_is_a_plain_model(runs):
    model = AutoModelForCausalLM.from_pretrained(runs / "sharded" / "model")
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.slow
def test_goes_on_with_another_number_of_processes(runs):
    """From two to four and to one, and from whole checkpoints to parts and back."""
    for name in ("left-whole", "left-sharded"):
        shutil.copytree(runs / name, runs / f"{name}-to-four")
    launch(4, go_on, runs)
    train(config_in(runs), runs / "left-sharded", cpu=True)
    for name in ("left-whole-to-four", "left-sharded-to-four", "left-sharded"):
        torch.testing.assert_close(losses(runs / name), losses(runs / "alone"), rtol=2e-5, atol=0)


def test_what_cannot_be_is_refused():
    with pytest.raises(TrainingError, match="ask for shard"):
        Layout(offload=True)


def compile_divided(folder: Path) -> None:
    train(config_in(folder), folder / "compiled", cpu=True, layout=Layout(shard=True, compile=True))
    leave_processes()


@pytest.mark.slow
def test_compiled_blocks_are_divided_too(runs):
    launch(2, compile_divided, runs)
    torch.testing.assert_close(losses(runs / "compiled"), losses(runs / "alone"), rtol=1e-4, atol=0)
