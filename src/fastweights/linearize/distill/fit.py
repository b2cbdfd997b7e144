"""Training some of a model's parameters, such that it can be killed at any moment and go on to the
same end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastweights.runs.checkpoint import Checkpoints, Progress
from fastweights.runs.errors import NonFiniteError, TrainingError
from fastweights.runs.files import atomic_file, remove_partials
from fastweights.runs.folder import TrainingClock, create_run, is_run, lock_run, random_seed_from
from fastweights.runs.metrics import Metrics, Row
from fastweights.runs.optimizers import (
    AdamW,
    Linear,
    OptimizerConfig,
    Schedule,
    load_state_tensors,
    set_learning_rates,
    state_tensors,
)
from fastweights.runs.report import Reporter, Summary
from fastweights.train.loop import Every

TRAINED = "trained.safetensors"


@dataclass(frozen=True)
class Fit:
    """A stage of training but for its loss; the same value on the same machine gives the same
    weights.

    Attributes:
        batch: sequences per update
        accumulate: parts in which a batch is taken, to save memory
        clip: largest norm of the gradient, of each part of the model that the stage names
    """

    steps: int = 1000
    batch: int = 8
    accumulate: int = 1
    optimizer: OptimizerConfig = AdamW(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    schedule: Schedule = Linear(warmup=0)
    clip: float = 1.0
    every: Every = Every()
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("steps", "batch", "accumulate")}
        counts |= {
            f"every.{field.name}": getattr(self.every, field.name) for field in fields(self.every)
        }
        for name, count in counts.items():
            if count < 1:
                raise TrainingError(f"{name} = {count}; it must be 1 or more")
        if self.batch % self.accumulate:
            raise TrainingError(
                f"batch = {self.batch} is not divisible by accumulate = {self.accumulate}"
            )


class Stage(ABC):
    """What a fit minimises, and on what."""

    model: Any
    """Those of its parameters that require a gradient are trained."""
    tokens_per_sequence: int

    @abstractmethod
    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        """Add `share` of the gradient on sequences `first` … `first + count - 1`; the losses, by
        name.

        All randomness is a function of `step`, for which PyTorch's generators are seeded already.
        """

    @abstractmethod
    def parts(self) -> Iterable[nn.Module]:
        """What is clipped, each by itself."""

    @abstractmethod
    def validate(self) -> Mapping[str, float]:
        """Numbers on held-out text; ``val_loss`` is what the stage minimises."""

    @abstractmethod
    def summary(self) -> Mapping[str, int]:
        """``vocabulary``, ``train_tokens`` and ``validation_tokens``"""


def fit(
    stage: Stage,
    config: Fit,
    out: Path,
    *,
    reporter: Reporter = Reporter(),
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train in the folder `out`, or go on where training in it was stopped or killed; whether it is
    complete.

    out/trained.safetensors holds the trained parameters, out/metrics.jsonl the curve. When `stop()`
    turns true the step is finished and a checkpoint written. Raises CheckpointError (`out` holds
    another fit, or damage) or NonFiniteError.
    """
    if not is_run(out, config):
        create_run(out, config)
    if (out / TRAINED).exists():
        load_parameters(stage.model, out)
        return True
    with lock_run(out):
        run = _Run(stage, config, out, reporter)
        while run.progress.step < config.steps and not stop():
            run.advance()
        return run.finish()


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


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


class _Run:
    """The state of a fit between two steps."""

    def __init__(self, stage: Stage, config: Fit, out: Path, reporter: Reporter) -> None:
        self.stage, self.config, self.out, self.reporter = stage, config, out, reporter
        remove_partials(out)
        self.checkpoints = Checkpoints(out / "checkpoints")
        self.optimizers = config.optimizer.build(stage.model)
        set_learning_rates(self.optimizers, 1.0)
        self.progress = self._continue()
        self.metrics = Metrics(out / "metrics.jsonl", self.progress.step)
        self.metrics.cut()
        self.clock = TrainingClock(self.progress)
        self._introduce()

    def _continue(self) -> Progress:
        """Take up the newest checkpoint, if there is one."""
        found = self.checkpoints.latest(self.reporter.note)
        if found is None:
            return Progress()
        load_parameters(self.stage.model, found.folder)
        load_state_tensors(self.optimizers, self.stage.model, found.optimizer())
        return found.progress

    def _introduce(self) -> None:
        device = next(self.stage.model.parameters()).device
        self.reporter.begin(
            Summary(
                out=self.out,
                device=str(device),
                parameters=sum(p.numel() for p in trainable_parameters(self.stage.model).values()),
                tokens_per_step=self.config.batch * self.stage.tokens_per_sequence,
                step=self.progress.step,
                steps=self.config.steps,
                **self.stage.summary(),
            )
        )

    def advance(self) -> None:
        """One update, and what is due after it."""
        step, every = self.progress.step + 1, self.config.every
        last = step == self.config.steps
        losses = self._update(step - 1)
        self.progress = Progress(step, self.clock.seconds)
        evaluate, save = last or step % every.evaluation == 0, last or step % every.checkpoint == 0
        log = evaluate or step == 1 or step % every.log == 0
        if log:
            self._log(losses, evaluate)
        if save:
            self._save()
        if log or save:
            self.clock.restart(step)

    def _update(self, step: int) -> dict[str, Tensor]:
        config, stage = self.config, self.stage
        torch.manual_seed(random_seed_from(config.seed, step))
        set_learning_rates(self.optimizers, config.schedule.factor(step, config.steps))
        stage.model.train()
        size, totals = config.batch // config.accumulate, dict[str, Tensor]()
        for first in range(step * config.batch, (step + 1) * config.batch, size):
            for name, loss in stage.backward(first, size, 1 / config.accumulate, step).items():
                totals[name] = totals.get(name, 0) + loss / config.accumulate
        self._step(totals)
        return totals

    def _step(self, losses: Mapping[str, Tensor]) -> None:
        """Move the parameters, unless a loss or gradient is no number any more."""
        norms = [
            nn.utils.clip_grad_norm_(part.parameters(), self.config.clip)
            for part in self.stage.parts()
        ]
        if not torch.stack([*norms, *losses.values()]).isfinite().all():
            raise NonFiniteError(
                f"losses {_format_losses(losses)} at step {self.progress.step + 1}; the checkpoints before"
                " are untouched; try a lower learning rate"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _log(self, losses: Mapping[str, Tensor], evaluate: bool) -> None:
        seconds, speed = self.clock.seconds, self.clock.steps_per_second(self.progress.step)
        tokens = self.config.batch * self.stage.tokens_per_sequence
        row = {"step": self.progress.step, **{name: float(loss) for name, loss in losses.items()}}
        row |= {
            "lr": self.optimizers[0].param_groups[0]["lr"],
            "tokens_per_second": round(speed * tokens),
        }
        row |= {"seconds": round(seconds, 3)}
        row |= self.stage.validate() if evaluate else {}
        self.metrics.append(row)
        self.reporter.progress(row)

    def _save(self) -> None:
        tensors = {
            name: p.detach().contiguous()
            for name, p in trainable_parameters(self.stage.model).items()
        }
        state = state_tensors(self.optimizers, self.stage.model)

        def fill(folder: Path) -> None:
            save_file(tensors, folder / TRAINED)
            save_file(state, folder / "optimizer.safetensors")

        self.checkpoints.write(self.progress, fill)

    def finish(self) -> bool:
        """Save what is not saved yet; the result, if the run is complete."""
        step = self.progress.step
        if step > 0 and not self.checkpoints.has(step):
            self._save()
        if step < self.config.steps:
            return False
        with atomic_file(self.out / TRAINED) as new:
            save_file(
                {
                    name: p.detach().contiguous()
                    for name, p in trainable_parameters(self.stage.model).items()
                },
                new,
            )
        return True


def read_curve(out: Path) -> list[Row]:
    """The curve of a fit."""
    return Metrics(out / "metrics.jsonl", step=2**62).rows


def _format_losses(losses: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {float(loss):.4g}" for name, loss in losses.items())
