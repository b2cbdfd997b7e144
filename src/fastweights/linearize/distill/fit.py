"""The training of some of a model's parameters, those that require a gradient, in a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastweights.runs.files import atomic_file
from fastweights.runs.folder import is_run
from fastweights.runs.loop import run_in_folder
from fastweights.runs.metrics import Metrics, Row
from fastweights.runs.optimizers import AdamW, OptimizerConfig
from fastweights.runs.processes import Processes
from fastweights.runs.report import Reporter
from fastweights.runs.schedules import Linear, Schedule
from fastweights.runs.stage import Optimization, StoredStage, trainable_parameters

TRAINED = "trained.safetensors"


@dataclass(frozen=True)
class Fit(Optimization):
    """How a stage of a linearization is trained, with LoLCATs' defaults."""

    batch: int = 8
    optimizer: OptimizerConfig = AdamW(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: Schedule = Linear(warmup=0)


class PartialStage(StoredStage):
    """A stage of which the trained parameters alone are stored, in ``trained.safetensors``."""

    def save(self, folder: Path) -> None:
        self._save_parameters(folder / TRAINED)

    def load(self, folder: Path) -> None:
        load_parameters(self.model, folder)

    def finish(self, out: Path) -> None:
        with atomic_file(out / TRAINED) as new:
            self._save_parameters(new)

    def _save_parameters(self, path: Path) -> None:
        trained = trainable_parameters(self.model)
        save_file({name: p.detach().contiguous() for name, p in trained.items()}, path)


def fit(
    stage: PartialStage,
    config: Fit,
    out: Path,
    *,
    processes: Processes | None = None,
    reporter: Reporter = Reporter(),
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train in the folder `out`, or go on in it, as `run_in_folder` does; whether it is complete.

    out/trained.safetensors holds the trained parameters in the end. Raises CheckpointError (`out`
    holds another fit, or damage) or NonFiniteError.
    """
    if is_run(out, config) and (out / TRAINED).exists():
        stage.load(out)
        return True
    end = run_in_folder(stage, config, out, processes=processes, reporter=reporter, stop=stop)
    return end.is_complete


def load_parameters(model: nn.Module, out: Path) -> None:
    """Give `model` the parameters in ``out/trained.safetensors`` that it has. Raises ValueError if
    it has none.
    """
    copy_parameters(model, load_file(out / TRAINED))


def copy_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy those of `tensors` whose names `model` has. Raises ValueError if there are none."""
    there = dict(model.named_parameters())
    shared = there.keys() & tensors.keys()
    if not shared:
        raise ValueError(
            f"{type(model).__name__} has none of {len(tensors)} trained tensors, such as"
            f" {min(tensors)}"
        )
    with torch.no_grad():
        for name in shared:
            there[name].copy_(tensors[name])


def read_curve(out: Path) -> list[Row]:
    """The curve of a fit."""
    return Metrics(out / "metrics.jsonl", step=2**62).rows
