"""The settings of a training, and the stage that it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.ranges import (
    NON_NEGATIVE_INTEGER,
    POSITIVE_INTEGER,
    POSITIVE_NUMBER,
    divide_batch,
)
from fastweights.training.loop.metrics import Row
from fastweights.training.loop.optimizers import AdamW, OptimizerConfig
from fastweights.training.loop.processes import Alone, Processes
from fastweights.training.loop.report import Counts
from fastweights.training.loop.schedules import Cosine, Schedule
from fastweights.training.loop.seeds import random_seed_from


class Due(NamedTuple):
    """What is due after an update."""

    log: bool
    evaluation: bool
    checkpoint: bool


@dataclass(frozen=True)
class Every:
    """How often, in steps, to log metrics, to evaluate, and to save a checkpoint."""

    log: int = 10
    evaluation: int = 100
    checkpoint: int = 100

    def due(self, step: int, steps: int) -> Due:
        """Return what is due after update `step` of 1 … steps."""
        last = step == steps
        evaluation = last or step % self.evaluation == 0
        log = evaluation or step == 1 or step % self.log == 0
        return Due(log, evaluation, last or step % self.checkpoint == 0)


@dataclass(frozen=True)
class Optimization:
    """The settings of a training, whatever is trained.

    The same value on the same machine gives the same weights.

    Attributes:
        steps: Number of updates.
        batch: Sequences per update, over all processes.
        accumulate: Parts in which each process takes its share of a batch, to save memory.
        optimizer: The optimiser.
        schedule: How the learning rate changes during training.
        clip: Largest norm of the gradient, for each part of the model that the stage names; None
            for no clipping.
        every: How often to log, evaluate and save.
        seed: Seed of all randomness.
        bf16: Whether matrix products are in bfloat16 (parameters stay as they are).

    Raises:
        TrainingError: If a number lies outside of its range.
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
        POSITIVE_INTEGER.require(steps=self.steps, batch=self.batch, accumulate=self.accumulate)
        intervals = {f"every.{name}": steps for name, steps in asdict(self.every).items()}
        POSITIVE_INTEGER.require(**intervals)
        NON_NEGATIVE_INTEGER.require(seed=self.seed)
        if self.clip is not None:
            POSITIVE_NUMBER.require(clip=self.clip)
        self.sequences_at_once(Alone())

    def sequences_at_once(self, processes: Processes) -> int:
        """Return the number of sequences in each part of a process's share of a batch.

        Raises:
            TrainingError: If the batch cannot be divided evenly.
        """
        return divide_batch(self.batch, processes.readers, self.accumulate)

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which forward passes are in the precision of this training."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)


class Stage(ABC):
    """What a training minimises, and on which data; `training.loop.loop` trains it."""

    model: Any
    """Those of its parameters that require a gradient are trained."""
    module: Any
    """What computes the model's output in training: the model, or what exchanges its gradients
    between processes; the loop sets it."""
    calls_module = False
    """Whether a call of `backward` is one call of `module` and one backward pass from there."""

    @abstractmethod
    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        """Add `share` of the gradient on some sequences, and return the losses by name; both are 0
        where nothing is learnt of them.

        All randomness is a function of `step` and the process, for which `seed` was called.

        Args:
            first: Number of the first sequence.
            count: Number of sequences.
            share: Factor of the gradient.
            step: Number of the update.
        """

    def learnt(self, first: int, count: int) -> int:
        """Return how many terms the losses of these sequences are means of, up to a factor, by
        which the parts of a batch count: the sequences, or the tokens that are learnt.
        """
        return count

    def combine(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        shares: Sequence[float],
        processes: Processes,
    ) -> dict[str, Tensor]:
        """Combine the losses of a batch's parts, before gradients are exchanged and clipped.

        Args:
            parts: What `backward` returned of each.
            shares: The shares that it was given.
            processes: The processes, over which the losses are averaged then.
        """
        totals = dict[str, Tensor]()
        for losses, share in zip(parts, shares, strict=True):
            for name, loss in losses.items():
                totals[name] = totals.get(name, 0) + loss * share
        return totals

    @abstractmethod
    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        """Compute numbers on held-out data, which the processes divide among them.

        ``val_loss`` is what the stage minimises.
        """

    def clipped_parts(self) -> Iterable[nn.Module]:
        """Return the parts of the model whose gradients are clipped, each by itself."""
        return [self.model]

    def seed(self, seed: int, step: int, process: int) -> None:
        """Make PyTorch's generators a function of these numbers; called before every update."""
        torch.manual_seed(random_seed_from(seed, step, process))

    @property
    def is_over(self) -> bool:
        """Whether the remaining updates are not needed."""
        return False


class StoredStage(Stage):
    """A stage whose run is kept in a folder, and can be stopped or killed at any moment.

    Attributes:
        tokens_per_sequence: Tokens per sequence, from which the speed is computed.
    """

    tokens_per_sequence: int
    results: tuple[str, ...] = ()
    """The files and folders, in the run's folder, that `finish` writes."""

    @abstractmethod
    def summary(self) -> Counts:
        """Return how many tokens there are."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of the model, in the model's own memory."""

    @abstractmethod
    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a checkpoint, except for the optimiser's state, into a new folder.

        Args:
            folder: The new folder.
            tensors: Those of `tensors`, whole.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, before the model is laid out for training."""

    @abstractmethod
    def finish(self, out: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the result of the run into its folder, unless it is there.

        Args:
            out: The run's folder.
            tensors: Those of `tensors`, whole.
        """

    def prepare(self, out: Path) -> None:
        """Store what the run will need again; called once the folder is locked for this run."""

    def draw(self, rows: Sequence[Row], out: Path) -> None:
        """Draw the curve of the run into its folder."""


def go_backward(loss: Tensor) -> None:
    """Add the gradient of a loss, in the precision of its forward pass even inside autocast."""
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
