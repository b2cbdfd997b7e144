"""One run: a small model trained on a task by its protocol."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from fastweights.lab.sweep.order import batches, learning_rate, updates_per_epoch
from fastweights.lab.sweep.plan import SweepRun
from fastweights.lab.tasks import Batch, Score, Task
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM
from fastweights.train.perplexity import evaluation_mode

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
    fitting = _Fit(run, device)
    for batch in batches(run.protocol, run.seed):
        fitting.update(batch)
        if fitting.due:
            listener(fitting.evaluate())
        if fitting.over:
            break
    return fitting.row()


class _Fit:
    """A run between two updates."""

    def __init__(self, run: SweepRun, device: torch.device) -> None:
        self.run, self.device, self.training = run, device, run.protocol.training
        self.began, self.step, self.points = time.perf_counter(), 0, list[Point]()
        self.validation = run.protocol.validation_set(TEST_SEED)
        self.test = run.protocol.test_set(TEST_SEED)
        self.epoch = updates_per_epoch(run.protocol)
        self.steps = self.training.steps or (self.training.epochs or 0) * self.epoch
        torch.manual_seed(run.seed)
        self.config = run.config()
        self.model = cast(Any, run.protocol.task.kind(self.config)).to(device).train()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=run.rate,
            weight_decay=run.decay,
            betas=self.training.betas,
            fused=True,
        )
        self.loss = torch.zeros(())
        self.result: tuple[int, Score] | None = None

    @property
    def due(self) -> bool:
        """Whether to evaluate now."""
        every = self.run.every if self.training.epochs is None else self.epoch
        return self.step % every == 0 or self.step == self.steps

    @property
    def is_divergent(self) -> bool:
        """Whether the loss was infinite or NaN at the last evaluation."""
        return bool(self.points) and not math.isfinite(self.points[-1].train_loss)

    @property
    def reaches_mark(self) -> bool:
        """Whether the last evaluation passed the protocol's mark."""
        mark = self.training.stop
        return mark is not None and bool(self.points) and self.points[-1].accuracy > mark

    @property
    def over(self) -> bool:
        return self.step == self.steps or self.is_divergent or self.reaches_mark

    def update(self, batch: Batch) -> None:
        schedule, training = self.training.schedule, self.training
        rate = learning_rate(schedule, self.run.rate, self.step, self.steps, self.epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.run.protocol.task.loss(self.model, batch.to(self.device))
        loss.backward()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss, self.step = loss.detach(), self.step + 1

    def evaluate(self) -> Point:
        """On the validation set; and on the test set if this is the model that counts, as far as is
        known now.
        """
        score = self._score(self.validation)
        seconds = time.perf_counter() - self.began
        point = Point(self.step, float(self.loss), score.loss, score.accuracy, seconds)
        best = all(point.accuracy > earlier.accuracy for earlier in self.points)
        self.points.append(point)
        counts = best if self.training.best else self.over
        if counts:
            self.result = self.step, self._score(self.test)
        return point

    def _score(self, parts: Sequence[Batch]) -> Score:
        return score(self.model, self.run.protocol.task, parts, 4 * self.training.batch)

    def row(self) -> Row:
        assert self.result is not None
        step, found = self.result
        return Row(
            key=self.run.key,
            task=self.run.task,
            mixer=self.run.contender.label,
            width=self.config.hidden_size,
            parameters=sum(p.numel() for p in self.parameters),
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
