"""The training loop of language models, conversions and sweeps, in memory or resumable in a
folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from fastweights.errors import CheckpointError, NonFiniteError, Stopped
from fastweights.training.loop.checkpoint import Checkpoint, Checkpoints, Progress
from fastweights.training.loop.files import remove_partials
from fastweights.training.loop.folder import (
    create_run,
    is_run,
    lock_run,
    missing_folders,
    remove_if_refused,
)
from fastweights.training.loop.layout import Layout, clip_gradients, divide_groups, gather, own_part
from fastweights.training.loop.metrics import Metrics, Row
from fastweights.training.loop.optimizers import (
    load_state_tensors,
    set_learning_rates,
    state_tensors,
)
from fastweights.training.loop.parts import (
    PARTS,
    finish_behind,
    read_parts,
    stored_tensors,
    write_parts,
)
from fastweights.training.loop.processes import Alone, Processes, connected, join_processes
from fastweights.training.loop.report import Reporter, Summary
from fastweights.training.loop.results import remove_damaged, seal
from fastweights.training.loop.stage import (
    Due,
    Optimization,
    Stage,
    StoredStage,
    trainable_parameters,
)

EXPLODED = 1000.0
"""Times its first value, or 1 nat where that was less, a loss has exploded."""
MODEL, OPTIMIZER = "model/", "optimizer/"
"""Of the names of tensors in a checkpoint of parts."""
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
        layout: Layout = Layout(),
        step: int = 0,
    ) -> None:
        self.stage, self.config, self.processes, self.step = stage, config, processes, step
        self.losses: dict[str, Tensor] = {}
        self.norms: list[Tensor] = []
        self._size = config.sequences_at_once(processes)
        self.placement = layout.place(stage, config, processes)
        stage.module = self.placement.module
        self.optimizers = config.optimizer.build(stage.model)
        divide_groups(self.optimizers)
        set_learning_rates(self.optimizers, lambda peak: peak)

    def memory(self) -> dict[str, Tensor]:
        """Return what the optimisers keep, as ``"<parameter>/<quantity>"`` → tensor."""
        return state_tensors(self.optimizers, self.stage.model)

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Restore what `memory` returned, whole tensors or parts."""
        own = {
            name: self.placement.adopt(name.rpartition("/")[0], tensor)
            for name, tensor in memory.items()
        }
        load_state_tensors(self.optimizers, self.stage.model, own)

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
        self.placement.exchange()
        if config.clip is not None:
            self.norms = [
                clip_gradients(part.parameters(), config.clip) for part in stage.clipped_parts()
            ]
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def validate(
        self, stop: Callable[[], bool] = lambda: False, reporter: Reporter = Reporter()
    ) -> Mapping[str, float]:
        """Compute the stage's numbers on held-out data.

        Raises:
            Stopped: If `stop()` is True in any process before the end.
        """
        with self.config.precision(self.processes.device):
            return self.stage.validate(self.processes.watched(stop, reporter))

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
        start = self.step * self.config.batch + self.processes.reader * parts * size
        starts = range(start, start + parts * size, size)
        found, shares = list[Mapping[str, Tensor]](), self._shares(starts)
        for first, share in zip(starts, shares, strict=True):
            is_last = first == starts[-1]
            with self.placement.accumulate(is_last), self.config.precision(self.processes.device):
                found.append(self.stage.backward(first, size, share, self.step))
        return self.stage.combine(found, shares, self.processes)

    def _shares(self, starts: range) -> list[float]:
        """What each part of the batch counts: its share of all that is learnt in the update, times
        the number of processes, over which gradients are averaged.
        """
        if len(starts) == self.processes.count == 1:
            return [1.0]
        learnt = [self.stage.learnt(first, self._size) for first in starts]
        total = self.processes.total({"learnt": sum(learnt)})["learnt"]
        return [count * self.processes.count / max(total, 1) for count in learnt]


@dataclass(frozen=True, kw_only=True)
class Session:
    """How a run goes on here and now, which may be otherwise the next time.

    Attributes:
        processes: The processes that train together.
        layout: How the model lies in their memory.
        reporter: Receives progress events.
        stop: Called between steps, and between batches of a validation; once it returns True, a
            checkpoint is written and training ends.
    """

    processes: Processes = Alone()
    layout: Layout = Layout()
    reporter: Reporter = Reporter()
    stop: Callable[[], bool] = lambda: False

    @classmethod
    def of(cls, model: nn.Module) -> Session:
        """Return one of the processes that this one was launched with, where a model lies."""
        return cls(processes=join_processes(next(model.parameters()).device))


@dataclass(frozen=True)
class End:
    """The end of a session of a run in a folder.

    Attributes:
        step: Updates made, in all sessions.
        is_complete: Whether all updates have been made, and validated.
        rows: The run's metrics.
    """

    step: int
    is_complete: bool
    rows: list[Row]


@connected()
def run_in_folder(
    stage: StoredStage,
    config: Optimization,
    out: Path,
    session: Session,
) -> End:
    """Train in the folder `out`, or resume the training that was stopped or killed there.

    out/metrics.jsonl is the curve, out/checkpoints holds the last two checkpoints.

    Args:
        stage: What is trained.
        config: How it is trained.
        out: The run's folder, new or of this same run.
        session: Who trains it here and now, and how.

    Raises:
        CheckpointError: If `out` holds another run, or is damaged.
        NonFiniteError: If a loss, gradient or parameter becomes infinite or NaN, or the loss
            explodes.
        Stopped: If the stage was asked to stop while it was prepared.
        TrainingError: If the processes cannot share a batch.
    """
    config.sequences_at_once(session.processes)
    with ExitStack() as held:
        run = _FolderRun(stage, config, out, session, held)
        run.validate_left()
        run.loop.run(run.record, session.stop)
        return run.finish()


class TrainingClock:
    """Measures the seconds of a run, across restarts, and its speed."""

    def __init__(self, progress: Progress) -> None:
        self._began = time.perf_counter() - progress.seconds
        self.restart(progress.step)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def restart(self, step: int) -> None:
        """Measure the speed from this step on."""
        self._since, self._step = self.seconds, step

    def steps_per_second(self, step: int) -> float:
        """Return the speed since the last `restart`."""
        return (step - self._step) / max(self.seconds - self._since, 1e-9)


class _FolderRun:
    """A loop and its folder; `held` keeps other runs out of it."""

    def __init__(
        self,
        stage: StoredStage,
        config: Optimization,
        out: Path,
        session: Session,
        held: ExitStack,
    ) -> None:
        processes, self.stop = session.processes, session.stop
        self.stage, self.config, self.out, self.processes = stage, config, out, processes
        self.reporter = session.reporter if processes.is_first else Reporter()
        with processes.first_then_others():
            found = self._open(held)
        self.saved = self.progress.step
        self.loop = Loop(stage, config, processes, session.layout, self.progress.step)
        if found is not None:
            self._take_up(found)
        self.writing: Future[Any] | None = None
        self._introduce()
        self.clock = TrainingClock(self.progress)

    def _open(self, held: ExitStack) -> Checkpoint | None:
        """Open the folder; the newest checkpoint, if there is one, read as far as that is possible
        before the model is laid out."""
        missing = missing_folders(self.out)
        is_run(self.out, self.config)
        if self.processes.is_first:
            create_run(self.out, self.config)
            held.enter_context(lock_run(self.out))
            remove_partials(self.out)
        with remove_if_refused(missing):
            self.stage.prepare(self.out)
        self.checkpoints = Checkpoints(self.out / "checkpoints")
        found = self.checkpoints.latest(self.reporter.note, self.processes.is_first)
        self.progress = Progress() if found is None else found.progress
        copy = None if found is None else found.metrics
        self.metrics = Metrics(self.out / "metrics.jsonl", self.progress.step, copy)
        if self.processes.is_first:
            self.metrics.cut()
        if found is not None and found.parts is None:
            self.stage.load(found.folder)
        return found

    def _take_up(self, found: Checkpoint) -> None:
        """Go on from a checkpoint, whatever layout it was written under."""
        if found.parts is None:
            self.loop.remember(load_file(found.folder / "optimizer.safetensors"))
            return
        read_parts(found.parts, _prefix(MODEL, self.stage.tensors()))
        memory = {
            name.removeprefix(OPTIMIZER): self.loop.placement.adopt(
                name.removeprefix(OPTIMIZER).rpartition("/")[0], torch.empty(shape, dtype=dtype)
            )
            for name, (shape, dtype) in stored_tensors(found.parts).items()
            if name.startswith(OPTIMIZER)
        }
        read_parts(found.parts, _prefix(OPTIMIZER, memory))
        self.loop.remember(memory)

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
        self._await_writing()
        if self._is_complete:
            tensors = gather(self.stage.tensors(), self.processes.is_first)
            if self.processes.is_first:
                self._write_results(tensors)
                self.stage.draw(self.metrics.rows, self.out)
        self.processes.wait()
        return End(loop.step, self._is_complete, self.metrics.rows)

    def _write_results(self, tensors: Mapping[str, Tensor]) -> None:
        results = [self.out / name for name in self.stage.results]
        for path in remove_damaged(self.out, results):
            self.reporter.note(f"{path} is missing or damaged; writing it again.")
        self.stage.finish(self.out, tensors)
        seal(self.out, results)

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
        self._add(row, evaluate)

    def validate_left(self) -> None:
        """Validate where that was stopped."""
        row, self.progress = self.progress.unvalidated, replace(self.progress, unvalidated=None)
        if row is not None:
            self._add(row, evaluate=True)
            self.saved = -1 if self._is_complete else self.saved

    @property
    def _is_complete(self) -> bool:
        return self.loop.is_complete and self.progress.unvalidated is None

    def _add(self, row: Row, evaluate: bool) -> None:
        """Add a row to the curve, or leave it to the next session if validation is stopped."""
        try:
            row = {**row, **(self.loop.validate(self.stop, self.reporter) if evaluate else {})}
        except Stopped:
            self.progress = replace(self.progress, unvalidated=row)
            return
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
        trained = trainable_parameters(self.stage.model)
        bad = {name: 1.0 for name, p in trained.items() if not own_part(p).isfinite().all()}
        if found := self.processes.total(bad):
            raise NonFiniteError(
                f"{min(found)} has become infinite or NaN by step {self.loop.step}; {_WHAT_TO_DO}"
            )

    def _save(self) -> None:
        self._sound_losses()
        self._require_finite_parameters()
        self._await_writing()
        if self.loop.placement.is_divided:
            self.writing = self._begin_writing()
        elif self.processes.is_first:
            with self._new_checkpoint() as folder:
                self.stage.save(folder, self.stage.tensors())
                save_file(self.loop.memory(), folder / "optimizer.safetensors")
        self.saved = self.loop.step
        self.processes.wait()

    @contextmanager
    def _new_checkpoint(self) -> Iterator[Path]:
        """The folder of a new checkpoint, with copies of the run's record and curve."""
        with self.checkpoints.new(self.progress) as folder:
            create_run(folder, self.config)
            self.metrics.copy(folder)
            yield folder

    def _begin_writing(self) -> Future[Any]:
        """Write a checkpoint of parts while training goes on; it is done when all are written."""
        made = ExitStack()
        if self.processes.is_first:
            made.enter_context(self._new_checkpoint()).joinpath(PARTS).mkdir()
        self.processes.wait()
        tensors = _prefix(MODEL, self.stage.tensors()) | _prefix(OPTIMIZER, self.loop.memory())
        folder = self.checkpoints.unfinished(self.progress.step) / PARTS
        return finish_behind(write_parts(tensors, folder, self.processes.background), made)

    def _await_writing(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: If it could not be written.
        """
        if self.writing is None:
            return
        writing, self.writing = self.writing, None
        try:
            writing.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint of step {self.saved} could not be written ({error}); those before"
                " are untouched"
            ) from error


def _prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
