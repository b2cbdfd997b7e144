"""The training loop of language models, conversions and sweeps, in memory or resumable in a
folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from fastweights.runs.checkpoint import Checkpoints, Progress
from fastweights.runs.clock import TrainingClock
from fastweights.runs.errors import NonFiniteError
from fastweights.runs.files import remove_partials
from fastweights.runs.folder import create_run, is_run, lock_run, missing_folders, remove_if_refused
from fastweights.runs.metrics import Metrics, Row
from fastweights.runs.optimizers import load_state_tensors, set_learning_rates, state_tensors
from fastweights.runs.processes import Processes, join_processes
from fastweights.runs.report import Reporter, Summary
from fastweights.runs.stage import Due, Optimization, Stage, StoredStage, trainable_parameters

EXPLODED = 1000.0
"""Times its first value, or 1 nat where that was less, a loss has exploded."""
_WHAT_TO_DO = (
    "the checkpoints before are untouched; try a lower learning rate, a longer warm-up, or float32"
    " in place of bf16"
)


class Loop:
    """The training loop of a stage, between two updates.

    Attributes:
        step: Updates made.
        losses: Losses of the last update, of this process's share of the batch.
        norms: Gradient norms of the stage's parts, before they were clipped.
    """

    def __init__(
        self,
        stage: Stage,
        config: Optimization,
        processes: Processes,
        step: int = 0,
        memory: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.stage, self.config, self.processes, self.step = stage, config, processes, step
        self.losses: dict[str, Tensor] = {}
        self.norms: list[Tensor] = []
        self._size = config.sequences_at_once(processes)
        processes.begin_alike(self.parameters)
        self.optimizers = config.optimizer.build(stage.model)
        set_learning_rates(self.optimizers, lambda peak: peak)
        if memory is not None:
            load_state_tensors(self.optimizers, stage.model, memory)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return list(trainable_parameters(self.stage.model).values())

    @property
    def is_complete(self) -> bool:
        return self.step >= self.config.steps or self.stage.is_over

    def run(self, record: Callable[[Due], None], stop: Callable[[], bool] = lambda: False) -> None:
        """Update until the end, or until `stop()` returns True in any process.

        Args:
            record: Called after each update with what is due.
            stop: Called before each update.
        """
        while not self.is_complete and not self.processes.any(stop()):
            self.update()
            record(self.config.every.due(self.step, self.config.steps))

    def update(self) -> None:
        """Make one step of the optimisers, on one batch."""
        config, stage = self.config, self.stage
        stage.seed(config.seed, self.step, self.processes.index)
        set_learning_rates(
            self.optimizers, lambda peak: config.schedule.rate(peak, self.step, config.steps)
        )
        stage.model.train()
        self.losses = self._backward()
        self.processes.average_gradients(self.parameters)
        if config.clip is not None:
            self.norms = [
                nn.utils.clip_grad_norm_(part.parameters(), config.clip)
                for part in stage.clipped_parts()
            ]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def validate(self) -> Mapping[str, float]:
        """Compute the stage's numbers on held-out data."""
        with self.config.precision(self.processes.device):
            return self.stage.validate(self.processes)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update."""
        return self.optimizers[0].param_groups[0]["lr"]

    def mean_losses(self) -> dict[str, float]:
        """Average the losses of the last update over all processes."""
        own = {name: float(loss) for name, loss in self.losses.items()}
        return {n: total / self.processes.count for n, total in self.processes.total(own).items()}

    def _backward(self) -> dict[str, Tensor]:
        """Add the gradients of this process's share of the batch, part by part."""
        parts, size = self.config.accumulate, self._size
        start = self.step * self.config.batch + self.processes.index * parts * size
        totals = dict[str, Tensor]()
        for first in range(start, start + parts * size, size):
            with self.config.precision(self.processes.device):
                losses = self.stage.backward(first, size, 1 / parts, self.step)
            for name, loss in losses.items():
                totals[name] = totals.get(name, 0) + loss / parts
        return totals


def run_in_memory(stage: Stage, config: Optimization, processes: Processes) -> Loop:
    """Train without a folder; the stage receives results only when it is validated."""
    loop = Loop(stage, config, processes)

    def record(due: Due) -> None:
        if due.evaluation:
            loop.validate()

    loop.run(record)
    return loop


@dataclass(frozen=True)
class End:
    """The end of a session of a run in a folder.

    Attributes:
        step: Updates made, in all sessions.
        is_complete: Whether all updates have been made.
        rows: The run's metrics.
    """

    step: int
    is_complete: bool
    rows: list[Row]


def run_in_folder(
    stage: StoredStage,
    config: Optimization,
    out: Path,
    *,
    processes: Processes | None = None,
    reporter: Reporter = Reporter(),
    stop: Callable[[], bool] = lambda: False,
) -> End:
    """Train in the folder `out`, or resume the training that was stopped or killed there.

    out/metrics.jsonl is the curve, out/checkpoints holds the last two checkpoints.

    Args:
        stage: What is trained.
        config: How it is trained.
        out: The run's folder, new or of this same run.
        processes: The processes that train together; None for those that this one was launched
            with.
        reporter: Receives progress events.
        stop: Called between steps; once it returns True, a checkpoint is written and training ends.

    Raises:
        CheckpointError: If `out` holds another run, or is damaged.
        NonFiniteError: If a loss, gradient or parameter becomes infinite or NaN, or the loss
            explodes.
        Stopped: If the stage was asked to stop while it was prepared.
        TrainingError: If the processes cannot share a batch.
    """
    processes = processes or join_processes(next(stage.model.parameters()).device)
    config.sequences_at_once(processes)
    with ExitStack() as held:
        run = _FolderRun(stage, config, out, processes, reporter, held)
        run.loop.run(run.record, stop)
        return run.finish()


class _FolderRun:
    """A loop and its folder; `held` keeps other runs out of it."""

    def __init__(
        self,
        stage: StoredStage,
        config: Optimization,
        out: Path,
        processes: Processes,
        reporter: Reporter,
        held: ExitStack,
    ) -> None:
        self.stage, self.config, self.out, self.processes = stage, config, out, processes
        self.reporter = reporter if processes.is_first else Reporter()
        with processes.first_then_others():
            memory = self._open(held)
        self.saved = self.progress.step
        self.loop = Loop(stage, config, processes, self.progress.step, memory)
        self._introduce()
        self.clock = TrainingClock(self.progress)

    def _open(self, held: ExitStack) -> Mapping[str, Tensor] | None:
        """Take up the newest checkpoint, if there is one; the optimisers' memory in it."""
        missing = missing_folders(self.out)
        if not is_run(self.out, self.config):
            create_run(self.out, self.config)
        if self.processes.is_first:
            held.enter_context(lock_run(self.out))
        remove_partials(self.out)
        with remove_if_refused(missing):
            self.stage.prepare(self.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints")
        found = self.checkpoints.latest(self.reporter.note)
        self.progress = Progress() if found is None else found.progress
        self.metrics = Metrics(self.out / "metrics.jsonl", self.progress.step)
        if self.processes.is_first:
            self.metrics.cut()
        if found is None:
            return None
        self.stage.load(found.folder)
        return found.optimizer()

    def _introduce(self) -> None:
        summary = Summary(
            out=self.out,
            device=str(self.processes.device),
            parameters=sum(p.numel() for p in self.loop.parameters),
            tokens_per_step=self._tokens_per_step,
            step=self.progress.step,
            steps=self.config.steps,
            **self.stage.summary(),
        )
        self.reporter.begin(summary)

    @property
    def _tokens_per_step(self) -> int:
        return self.config.batch * self.stage.tokens_per_sequence

    def record(self, due: Due) -> None:
        """Write down what is due."""
        self.progress = Progress(self.loop.step, self.clock.seconds)
        if due.log:
            self._log(due.evaluation)
        if due.checkpoint:
            self._save()
        if due.log or due.checkpoint:
            self.clock.restart(self.loop.step)

    def finish(self) -> End:
        """Save what is not saved yet; the result, if the run is complete."""
        loop = self.loop
        if loop.step != self.saved:
            self._save()
        if loop.is_complete and self.processes.is_first:
            self.stage.finish(self.out)
            self.stage.draw(self.metrics.rows, self.out)
        self.processes.wait()
        return End(loop.step, loop.is_complete, self.metrics.rows)

    def _log(self, evaluate: bool) -> None:
        loop = self.loop
        speed = self.clock.steps_per_second(loop.step) * self._tokens_per_step
        row = {
            "step": loop.step,
            **self._sound_losses(),
            "lr": loop.learning_rate,
            "tokens_per_second": round(speed),
            "seconds": round(self.clock.seconds, 3),
        }
        row |= loop.validate() if evaluate else {}
        if not self.processes.is_first:
            return
        self.metrics.append(row)
        if evaluate:
            self.stage.draw(self.metrics.rows, self.out)
        self.reporter.progress(row)

    def _sound_losses(self) -> dict[str, float]:
        """Return the losses of the last update.

        Raises:
            NonFiniteError: If one of them, or a gradient, is infinite or NaN, or has exploded.
        """
        losses = self.loop.mean_losses()
        norms = [float(norm) for norm in self.loop.norms]
        if not all(map(math.isfinite, [*losses.values(), *norms])):
            shown = ", ".join(f"{name} {loss:.4g}" for name, loss in losses.items())
            raise NonFiniteError(
                f"{shown}, largest gradient norm {max(norms, default=math.nan):.4g} by step"
                f" {self.loop.step}; {_WHAT_TO_DO}"
            )
        self._require_no_explosion(losses)
        return losses

    def _require_no_explosion(self, losses: Mapping[str, float]) -> None:
        first = self.metrics.rows[0]["loss"] if self.metrics.rows else math.inf
        if losses.get("loss", 0) > EXPLODED * max(first, 1.0):
            raise NonFiniteError(
                f"the loss was {first:.4g} in the beginning and is {losses['loss']:.4g} by step"
                f" {self.loop.step}; {_WHAT_TO_DO}"
            )

    def _require_finite_parameters(self) -> None:
        for name, parameter in trainable_parameters(self.stage.model).items():
            if not parameter.isfinite().all():
                raise NonFiniteError(
                    f"{name} has become infinite or NaN by step {self.loop.step}; {_WHAT_TO_DO}"
                )

    def _save(self) -> None:
        self._sound_losses()
        self._require_finite_parameters()
        if self.processes.is_first:
            self.checkpoints.write(self.progress, self._fill)
        self.saved = self.loop.step
        self.processes.wait()

    def _fill(self, folder: Path) -> None:
        self.stage.save(folder)
        memory = state_tensors(self.loop.optimizers, self.stage.model)
        save_file(memory, folder / "optimizer.safetensors")
