"""One run: a small model trained on a task by its protocol."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn, optim
from transformers import PreTrainedModel

from fastweights.lab.sweep.order import batches, updates_per_epoch
from fastweights.lab.sweep.plan import SweepRun
from fastweights.lab.tasks import Batch, Score, Task
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM
from fastweights.runs.evaluation import evaluation_mode
from fastweights.runs.loop import run_in_memory
from fastweights.runs.optimizers import OptimizerConfig
from fastweights.runs.processes import Alone, Processes
from fastweights.runs.stage import Every, Optimization, Stage, go_backward

_INFINITE = (math.inf, -math.inf)
TEST_SEED = 0
"""Validation and test sets are the same for all runs."""


@dataclass(frozen=True)
class Point:
    """A run after `step` updates.

    Attributes:
        train_loss, loss: of the last batch, and of the validation set; nats per label
        seconds: since the run began
    """

    step: int
    train_loss: float
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Row:
    """A run and what came of it.

    Attributes:
        key: of the run
        width: hidden size
        state: bytes that a sequence of the task's length leaves in the model; None for
            classifiers
        accuracy, macro: on the test set, by the model at `step` (the best on the validation
            set, or the last)
        loss: there, nats per label
        solved: updates until validation accuracy passed the protocol's mark; None if it never
            did
        steps: updates made
        diverged: whether the loss became infinite or NaN
        curve: the evaluations
    """

    key: str
    task: str
    mixer: str
    width: int
    parameters: int
    state: int | None
    rate: float
    decay: float
    seed: int
    accuracy: float
    macro: float
    loss: float
    step: int
    solved: int | None
    steps: int
    diverged: bool
    seconds: float
    curve: tuple[Point, ...]

    @classmethod
    def of(cls, content: dict[str, Any]) -> Row:
        """From what `asdict` made of one, by way of JSON."""
        return cls(**{**content, "curve": tuple(Point(**point) for point in content["curve"])})

    def flat(self) -> dict[str, Any]:
        """Without the curve; numbers that are not finite are None, as in JSON."""
        content = {name: value for name, value in asdict(self).items() if name != "curve"}
        return {
            name: None if value != value or value in _INFINITE else value
            for name, value in content.items()
        }


def fit(
    run: SweepRun,
    listener: Callable[[Point], None] = lambda point: None,
    device: torch.device = torch.device("cpu"),
) -> Row:
    """Train and test one model; the same run on the same machine gives the same row, but for the
    seconds.

    Args:
        listener: called with every evaluation
    """
    stage = TaskStage(run, device, listener)
    run_in_memory(stage, stage.optimization, Alone(device))
    return stage.row()


@dataclass(frozen=True)
class AdamWOnAll(OptimizerConfig):
    """AdamW whose weight decay pulls on all parameters alike."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]

    def build(self, model: nn.Module) -> list[optim.Optimizer]:
        return [
            optim.AdamW(
                model.parameters(),
                lr=self.lr,
                weight_decay=self.weight_decay,
                betas=self.betas,
                fused=True,
            )
        ]


class TaskStage(Stage):
    """A model on a task, until its protocol's mark, divergence, or the last update.

    The batches come in the protocol's order, and randomness runs on from the seed of the model:
    nobody goes on with half a run.
    """

    def __init__(
        self, run: SweepRun, device: torch.device, listener: Callable[[Point], None]
    ) -> None:
        self.run, self.listener, self.training = run, listener, run.protocol.training
        self.began, self.step, self.points = time.perf_counter(), 0, list[Point]()
        self.validation = run.protocol.validation_set(TEST_SEED)
        self.test = run.protocol.test_set(TEST_SEED)
        self.batches = batches(run.protocol, run.seed)
        torch.manual_seed(run.seed)
        self.config = run.config()
        self.model = cast(Any, run.protocol.task.kind(self.config)).to(device)
        self.loss = torch.zeros(())
        self.result: tuple[int, Score] | None = None

    @property
    def optimization(self) -> Optimization:
        """How the protocol trains."""
        training, epoch = self.training, updates_per_epoch(self.run.protocol)
        every = self.run.every if training.epochs is None else epoch
        return Optimization(
            steps=training.steps or (training.epochs or 0) * epoch,
            batch=training.batch,
            optimizer=AdamWOnAll(self.run.rate, self.run.decay, training.betas),
            schedule=training.schedule.for_epochs(epoch),
            clip=training.clip,
            every=Every(every, every, every),
            seed=self.run.seed,
            bf16=training.bf16,
        )

    def seed(self, seed: int, step: int, process: int) -> None: ...

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        batch = next(self.batches).to(self.model.device)
        loss = self.run.protocol.task.loss(self.model, batch)
        go_backward(loss)
        self.loss, self.step = loss.detach(), step + 1
        return {"loss": self.loss}

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        """On the validation set; and on the test set if this is the model that counts, as far as is
        known now.
        """
        score = self._score(self.validation)
        seconds = time.perf_counter() - self.began
        point = Point(self.step, float(self.loss), score.loss, score.accuracy, seconds)
        best = all(point.accuracy > earlier.accuracy for earlier in self.points)
        self.points.append(point)
        last = self.is_over or self.step == self.optimization.steps
        if best if self.training.best else last:
            self.result = self.step, self._score(self.test)
        self.listener(point)
        return {"val_loss": score.loss}

    @property
    def is_over(self) -> bool:
        return self.is_divergent or self.reaches_mark

    @property
    def is_divergent(self) -> bool:
        """Whether the loss was infinite or NaN at the last evaluation."""
        return bool(self.points) and not math.isfinite(self.points[-1].train_loss)

    @property
    def reaches_mark(self) -> bool:
        """Whether the last evaluation passed the protocol's mark."""
        mark = self.training.stop
        return mark is not None and bool(self.points) and self.points[-1].accuracy > mark

    def _score(self, parts: Sequence[Batch]) -> Score:
        return score(self.model, self.run.protocol.task, parts, 4 * self.training.batch)

    def row(self) -> Row:
        """What came of the run."""
        assert self.result is not None
        step, found = self.result
        return Row(
            key=self.run.key,
            task=self.run.task,
            mixer=self.run.contender.label,
            width=self.config.hidden_size,
            parameters=sum(p.numel() for p in self.model.parameters()),
            state=state_bytes(self.model, self.run.protocol.task),
            rate=self.run.rate,
            decay=self.run.decay,
            seed=self.run.seed,
            accuracy=found.accuracy,
            macro=found.macro_accuracy,
            loss=found.loss,
            step=step,
            solved=self.step if self.reaches_mark else None,
            steps=self.step,
            diverged=self.is_divergent,
            seconds=time.perf_counter() - self.began,
            curve=tuple(self.points),
        )


def score(model: PreTrainedModel, task: Task, parts: Sequence[Batch], count: int) -> Score:
    """Of all examples of `parts`, `count` at once."""
    with evaluation_mode(model):
        pieces = [
            part[i : i + count].to(model.device)
            for part in parts
            for i in range(0, len(part), count)
        ]
        first, *others = (task.score(task.logits(model, piece), piece) for piece in pieces)
    return sum(others, first)


def state_bytes(model: PreTrainedModel, task: Task) -> int | None:
    """What a language model remembers of one sequence as long as the task's; None for
    classifiers.
    """
    if not isinstance(model, FastWeightsForCausalLM):
        return None
    cache = FastWeightsCache()
    with evaluation_mode(model):
        model(
            torch.zeros(1, task.length, dtype=torch.long, device=model.device),
            None,
            cache,
            use_cache=True,
        )
    return cache.nbytes
