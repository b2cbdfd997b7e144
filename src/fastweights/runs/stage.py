"""What a run of training is made of: its settings, and the stage that it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.runs.errors import TrainingError
from fastweights.runs.metrics import Row
from fastweights.runs.optimizers import AdamW, OptimizerConfig
from fastweights.runs.processes import Alone, Processes
from fastweights.runs.schedules import Cosine, Schedule
from fastweights.runs.seeds import random_seed_from


class Due(NamedTuple):
    """What follows an update."""

    log: bool
    evaluation: bool
    checkpoint: bool


@dataclass(frozen=True)
class Every:
    """How often, in steps, to write a line of metrics, to evaluate, and to save a checkpoint."""

    log: int = 10
    evaluation: int = 100
    checkpoint: int = 100

    def due(self, step: int, steps: int) -> Due:
        """After update `step` of 1 … steps."""
        last = step == steps
        evaluation = last or step % self.evaluation == 0
        log = evaluation or step == 1 or step % self.log == 0
        return Due(log, evaluation, last or step % self.checkpoint == 0)


@dataclass(frozen=True)
class Optimization:
    """How a stage is trained, whatever it is; the same value on the same machine gives the same
    weights.

    Attributes:
        steps: updates
        batch: sequences per update, over all processes
        accumulate: parts in which each process takes its share of a batch, to save memory
        clip: largest norm of the gradient, of each part of the model that the stage names; None
            for no clipping
        bf16: whether matrix products are in bfloat16 (parameters stay as they are)
    """

    steps: int = 1000
    batch: int = 16
    accumulate: int = 1
    optimizer: OptimizerConfig = AdamW()
    schedule: Schedule = Cosine()
    clip: float | None = 1.0
    every: Every = Every()
    seed: int = 0
    bf16: bool = False

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("steps", "batch", "accumulate")}
        counts |= {
            f"every.{field.name}": getattr(self.every, field.name) for field in fields(self.every)
        }
        for name, count in counts.items():
            if count < 1:
                raise TrainingError(f"{name} = {count}; it must be 1 or more")
        self.sequences_at_once(Alone())

    def sequences_at_once(self, processes: Processes) -> int:
        """In each part of a process's share of a batch. Raises TrainingError."""
        shares = processes.count * self.accumulate
        if self.batch % shares:
            raise TrainingError(
                f"batch = {self.batch} is not divisible by devices · accumulate = {shares}"
            )
        return self.batch // shares

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside it, forwards are in the precision of this training."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)


class Stage(ABC):
    """What is minimised, and on what; `runs.loop` trains it."""

    model: Any
    """Those of its parameters that require a gradient are trained."""

    @abstractmethod
    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        """Add `share` of the gradient on sequences `first` … `first + count - 1`; the losses, by
        name.

        All randomness is a function of `step` and the process, for which `seed` was called.
        """

    @abstractmethod
    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        """Numbers on held-out data, which the processes share out; ``val_loss`` is what the stage
        minimises.
        """

    def clipped_parts(self) -> Iterable[nn.Module]:
        """What is clipped, each by itself."""
        return [self.model]

    def seed(self, seed: int, step: int, process: int) -> None:
        """Before every update: make PyTorch's generators a function of these numbers."""
        torch.manual_seed(random_seed_from(seed, step, process))

    @property
    def is_over(self) -> bool:
        """Whether there is no need for the updates that are left."""
        return False


class StoredStage(Stage):
    """A stage whose run lies in a folder, and can be stopped or killed at any moment.

    Attributes:
        tokens_per_sequence: for the speed
    """

    tokens_per_sequence: int

    @abstractmethod
    def summary(self) -> Mapping[str, int]:
        """``vocabulary``, ``train_tokens`` and ``validation_tokens``"""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what a checkpoint needs but for the optimiser's state into a new folder."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take up what `save` wrote."""

    @abstractmethod
    def finish(self, out: Path) -> None:
        """Write the result of the run into its folder, unless it is there."""

    def prepare(self, out: Path) -> None:
        """Called once the folder is this run's and locked: keep there what the run needs again."""

    def draw(self, rows: Sequence[Row], out: Path) -> None:
        """Draw the curve of the run into its folder."""


def go_backward(loss: Tensor) -> None:
    """Add the gradient of a loss; in the precision of its forward even inside autocast."""
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
