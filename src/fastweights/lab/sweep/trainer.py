"""One run of a sweep: a small model trained on a task by its protocol."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import count
from operator import add
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn, optim
from transformers import PreTrainedModel

from fastweights.lab.sweep.plan import SweepRun
from fastweights.lab.sweep.unfinished import RunState, Timer, generators, set_generators
from fastweights.lab.tasks import Batch, Protocol, Score, Task, TrainingSettings
from fastweights.lab.tasks.base import BatchShare, Examples
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM
from fastweights.models.evaluation import evaluation_mode
from fastweights.training.loop.loop import Loop
from fastweights.training.loop.optimizers import AdamW, OptimizerConfig
from fastweights.training.loop.processes import Alone, Processes
from fastweights.training.loop.stage import Due, Every, Optimization, Stage, go_backward

_INFINITE = (math.inf, -math.inf)
TEST_SEED = 0
"""Validation and test sets are the same for all runs."""


@dataclass(frozen=True)
class Point:
    """An evaluation of a run after `step` updates.

    Attributes:
        step: Updates made.
        train_loss: Loss of the last training batch, in nats per label.
        loss: Loss on the validation set, in nats per label.
        accuracy: Accuracy on the validation set, from 0 to 1.
        seconds: Seconds since the run began.
    """

    step: int
    train_loss: float
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class Row:
    """A run and its results: one row of a sweep's table.

    Attributes:
        key: Key of the run.
        task: Name of the protocol.
        mixer: Label of the model.
        width: Hidden size.
        parameters: Number of the model's parameters.
        state: Bytes that the model keeps of a sequence of the task's length; None for classifiers.
        rate: Learning rate.
        decay: Weight decay.
        seed: Seed of weights and data.
        accuracy, macro: Accuracies on the test set (micro and macro average) of the model at
            `step`: the best on the validation set, or the last.
        loss: Loss there, in nats per label.
        parts: Micro accuracies there on each segment of the test set; empty in rows of before there
            were any.
        step: Updates after which the model was tested.
        solved: Updates until validation accuracy passed the protocol's threshold; None if it never
            did.
        steps: Updates made.
        diverged: Whether the loss became infinite or NaN.
        seconds: Seconds that the run took.
        curve: All evaluations.
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
    parts: tuple[float, ...] = ()

    @classmethod
    def of(cls, content: dict[str, Any]) -> Row:
        """Build a row from what `asdict` returned, read back from JSON."""
        curve = tuple(Point(**point) for point in content["curve"])
        parts = tuple(content.get("parts", ()))
        fields: dict[str, Any] = {**content, "curve": curve, "parts": parts}
        return cls(**fields)

    def flat(self) -> dict[str, Any]:
        """Return the row as a mapping without curve and parts; numbers that are not finite are
        None, as in JSON."""
        apart = ("curve", "parts")
        content = {name: value for name, value in asdict(self).items() if name not in apart}
        return {
            name: None if value != value or value in _INFINITE else value
            for name, value in content.items()
        }


def fit(
    run: SweepRun,
    listener: Callable[[Point], None] = lambda point: None,
    processes: Processes = Alone(),
    unfinished: Path | None = None,
) -> Row:
    """Train and test one model.

    The same run on the same machine gives the same row, except for the seconds. Several processes,
    all of which call this, read the examples of one, each its share of every batch.

    Args:
        run: What to train.
        listener: Called with every evaluation.
        processes: Who trains, and where.
        unfinished: A file for the state of a long run, from which the same call goes on; None to
            begin again.
    """
    return train(run, listener, processes, unfinished).row()


def train(
    run: SweepRun,
    listener: Callable[[Point], None] = lambda point: None,
    processes: Processes = Alone(),
    unfinished: Path | None = None,
) -> TaskStage:
    """Train a model, as `fit` does, and return its training, which has the model as it is at the
    end."""
    stage, timer = TaskStage(run, processes, listener), Timer()
    state = None if unfinished is None else RunState.read(unfinished)
    if state is not None:
        stage.restore(state)
    loop = Loop(stage, stage.optimization, processes, step=stage.step)
    if state is not None:
        loop.remember(state.optimizer)
        set_generators(state.random, processes.device)

    def record(due: Due) -> None:
        if due.evaluation:
            loop.validate()
            if unfinished is not None and processes.is_first and timer.is_over():
                stage.state(loop.memory()).write(unfinished)

    loop.run(record)
    if unfinished is not None and processes.is_first:
        unfinished.unlink(missing_ok=True)
    return stage


@dataclass(frozen=True)
class AdamWOnAll(OptimizerConfig):
    """AdamW whose weight decay applies to all parameters alike."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float

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
    """The training of a model on a task, until the protocol's threshold, divergence, or the last
    update.

    The batches come in the protocol's order, and random numbers continue from the model's seed.
    Those of several processes are functions of seed, step and process.
    """

    def __init__(
        self, run: SweepRun, processes: Processes, listener: Callable[[Point], None]
    ) -> None:
        self.run, self.listener, self.training = run, listener, run.protocol.training
        self.processes = processes
        self.began, self.step, self.points = time.perf_counter(), 0, list[Point]()
        self.validation = run.protocol.validation_set(TEST_SEED)
        self.test = run.protocol.test_set(TEST_SEED)
        self.batches = batches(run.protocol, run.seed, _share(processes))
        self.batch: Batch | None = None
        torch.manual_seed(run.seed)
        self.config = run.config()
        self.model = cast(Any, run.protocol.task.build(self.config)).to(processes.device)
        self.loss = torch.zeros(())
        self.result: tuple[int, list[Score]] | None = None

    def state(self, optimizer: Mapping[str, Tensor]) -> RunState:
        """Return all that a new process needs to go on after this evaluation.

        Args:
            optimizer: What the optimisers keep.
        """
        result = self.result and (self.result[0], [part.numbers for part in self.result[1]])
        numbers = {
            "step": self.step,
            "seconds": time.perf_counter() - self.began,
            "points": list(map(asdict, self.points)),
            "result": result,
        }
        random = generators(self.processes.device)
        return RunState(numbers, self.model.state_dict(), optimizer, random)

    def restore(self, state: RunState) -> None:
        """Go on from what `state` returned, except for optimisers and generators."""
        self.model.load_state_dict(state.model)
        self.step = state.numbers["step"]
        self.began -= state.numbers["seconds"]
        self.points = [Point(**point) for point in state.numbers["points"]]
        if state.numbers["result"] is not None:
            step, parts = state.numbers["result"]
            self.result = step, list(map(Score.of, parts))
        share = _share(self.processes)
        self.batches = batches(self.run.protocol, self.run.seed, share, self.step)
        for point in self.points:
            self.listener(point)

    @property
    def optimization(self) -> Optimization:
        """The settings by which the protocol trains."""
        training, epoch = self.training, updates_per_epoch(self.run.protocol)
        every = self.run.every if training.epochs is None else epoch
        kind = AdamW if training.matrices_only else AdamWOnAll
        return Optimization(
            steps=training.steps or (training.epochs or 0) * epoch,
            batch=training.batch,
            optimizer=kind(self.run.rate, training.betas, self.run.decay),
            schedule=training.schedule.for_epochs(epoch),
            clip=training.clip,
            every=Every(every, every, every),
            seed=self.run.seed,
            bf16=training.bf16,
        )

    def seed(self, seed: int, step: int, process: int) -> None:
        if self.processes.count > 1:
            super().seed(seed, step, process)

    def learnt(self, first: int, count: int) -> int:
        self.batch = next(self.batches)
        return len(self.batch.targets)

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        read, self.batch = self.batch, None
        batch = (next(self.batches) if read is None else read).to(self.model.device)
        loss = torch.zeros((), device=self.model.device)
        if len(batch):
            loss = self.run.protocol.task.loss(self.model, batch)
            go_backward(loss * share)
        self.loss, self.step = loss.detach() * share, step + 1
        return {"loss": loss.detach()}

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        """Score the validation set, and the test set too when this is the best checkpoint so
        far."""
        score = self._score(self.validation)
        seconds = time.perf_counter() - self.began
        loss = processes.total({"loss": float(self.loss)})["loss"] / processes.count
        point = Point(self.step, loss, score.loss, score.accuracy, seconds)
        best = all(point.accuracy > earlier.accuracy for earlier in self.points)
        self.points.append(point)
        last = self.is_over or self.step == self.optimization.steps
        if best if self.training.best else last:
            self.result = self.step, [self._score([part]) for part in self.test]
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
        """Whether the last evaluation passed the protocol's threshold."""
        mark = self.training.stop
        return mark is not None and bool(self.points) and self.points[-1].accuracy > mark

    def test_score(self) -> Score:
        """Score the test set by the model as it is now."""
        return self._score(self.test)

    def _score(self, parts: Sequence[Examples]) -> Score:
        own = score(
            self.model,
            self.run.protocol.task,
            parts,
            4 * self.training.batch,
            _share(self.processes),
        )
        return Score.of(self.processes.total(own.numbers))

    def row(self) -> Row:
        """Return the results of the run."""
        assert self.result is not None
        step, parts = self.result
        found = sum(parts[1:], parts[0])
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
            parts=tuple(part.accuracy for part in parts),
        )


def _share(processes: Processes) -> BatchShare:
    return BatchShare(processes.reader, processes.readers)


def batches(
    protocol: Protocol, seed: int, share: BatchShare = BatchShare(), first: int = 0
) -> Iterator[Batch]:
    """Yield a process's share of the batch of every update: new ones without end, or epochs over
    the training set.

    Args:
        protocol: The protocol.
        seed: Seed of the examples.
        share: The part of every batch.
        first: Number of the first update, with which an epoch begins.
    """
    training = protocol.training
    if training.epochs is None:
        own = share(torch.arange(training.batch))
        yield from (protocol.fresh(seed, step, training.batch)[own] for step in count(first))
    parts = protocol.training_set(seed)
    for epoch in range(first // updates_per_epoch(protocol), training.epochs or 0):
        yield from _epoch(parts, training, [seed, epoch], share)


def _epoch(
    parts: Sequence[Examples], training: TrainingSettings, seed: Sequence[int], share: BatchShare
) -> Iterator[Batch]:
    """One part after the other, the examples of each in an order of this epoch's own if they are
    shuffled.
    """
    generator, repeats = np.random.default_rng(seed), training.repeats
    for part in parts:
        order = generator.permutation(len(part)) if training.shuffled else np.arange(len(part))
        order = (order[:, None] + len(part) * np.arange(repeats)).flatten()[: len(part)]
        yield from part.batches(torch.from_numpy(order).split(training.batch), seed, share)


def updates_per_epoch(protocol: Protocol) -> int:
    """Number of updates in an epoch; 1 where every batch is new."""
    if protocol.training.epochs is None:
        return 1
    return sum(-(-(segment.examples or 0) // protocol.training.batch) for segment in protocol.train)


def score(
    model: PreTrainedModel,
    task: Task,
    parts: Sequence[Examples],
    size: int,
    share: BatchShare = BatchShare(),
) -> Score:
    """Score a process's share of all examples of `parts`, `size` of them at a time."""
    pieces = (
        piece.to(model.device)
        for part in parts
        for piece in part.batches(torch.arange(len(part)).split(size), [TEST_SEED], share)
        if len(piece)
    )
    with evaluation_mode(model):
        scores = (task.score(task.logits(model, piece), piece) for piece in pieces)
        return reduce(add, scores, Score.nothing(task.classes))


def state_bytes(model: PreTrainedModel, task: Task) -> int | None:
    """Return the bytes that a language model keeps of one sequence of the task's length.

    None for classifiers.
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
