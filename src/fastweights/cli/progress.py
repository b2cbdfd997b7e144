"""How a training run looks on a terminal, and in a log file."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fastweights.render.units import bytes_in_words
from fastweights.training.loop.metrics import Row
from fastweights.training.loop.report import Reading, Reporter, Summary, WorkDone

SHOWN_LAYERS = 8
"""Layers whose losses a line of progress has room for."""
QUIET = 10.0
"""Seconds between two lines about a text that is read."""
STOPPING = "Finishing this step and saving. Press Ctrl-C again to stop immediately."
WIDE = 170
"""Columns of a table that is not printed on a terminal."""


class Lines(Reporter):
    """Prints a line of text for each line of metrics."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps = 0
        self._quiet_until = self._phase_quiet_until = QUIET

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def begin(self, summary: Summary) -> None:
        self.steps = summary.steps
        self.note(
            f"model       {summary.parameters:,} parameters, {summary.vocabulary:,} token"
            " vocabulary"
        )
        self.note(f"text        {_text(summary)}")
        updated, tokens = summary.steps * summary.tokens_per_step, summary.train_tokens
        epochs = "" if tokens is None else f", {updated / tokens:.1f} epochs"
        self.note(
            f"training    {summary.steps:,} steps of {summary.tokens_per_step:,} tokens{epochs}"
        )
        self.note(f"device      {summary.device}")
        self.note(f"writes to   {summary.out}")
        if summary.step:
            self.note(f"Resuming after step {summary.step:,}, where this run was stopped.")

    def progress(self, row: Row) -> None:
        done = (
            f"step {row['step']:,}/{self.steps:,}  {_losses(row)}  {row['tokens_per_second']:,}"
            " tokens/s"
        )
        self.note(
            f"{done}  {_time(row['seconds'] / row['step'] * (self.steps - row['step']))} left"
        )

    def reading(self, reading: Reading) -> None:
        if reading.seconds < self._quiet_until:
            return
        self._quiet_until = reading.seconds + QUIET
        there = "" if reading.total is None else f" of {bytes_in_words(reading.total)}"
        self.note(
            f"reading     {bytes_in_words(reading.read)}{there},"
            f" {bytes_in_words(reading.read / reading.seconds)}/s, {reading.tokens:,} tokens"
        )

    def phase(self, phase: WorkDone) -> None:
        if not phase.done:
            self._phase_quiet_until = QUIET
        if phase.seconds < self._phase_quiet_until or phase.done == phase.total:
            return
        self._phase_quiet_until = phase.seconds + QUIET
        left = phase.seconds / phase.done * (phase.total - phase.done)
        self.note(f"{phase.what}: {phase.done:,} of {phase.total:,}, {_time(left)} left")

    def note(self, message: str) -> None:
        self.console.print(message, soft_wrap=True)


class Bar(Lines):
    """Shows a progress bar of what is done now, and a line above it at every evaluation."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Progress | None = None
        self._steps = self._phases = Progress()
        self._reading = Progress(
            TextColumn("reading"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            transient=True,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._show(None)

    def reading(self, reading: Reading) -> None:
        self._show(self._reading)
        if not self._reading.tasks:
            self._reading.add_task("", total=reading.total, completed=reading.read)
        self._reading.update(
            self._reading.tasks[0].id,
            completed=reading.read,
            description=f"{reading.tokens:,} tokens,",
        )

    def begin(self, summary: Summary) -> None:
        self._show(None)
        super().begin(summary)
        self._steps = self._count_pieces()
        self._steps.add_task("steps", total=summary.steps, completed=summary.step)
        self._show(self._steps)

    def progress(self, row: Row) -> None:
        self._show(self._steps)
        description = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,} tokens/s,"
        task = self._steps.tasks[0].id
        self._steps.update(task, completed=row["step"], description=description)
        if "val_loss" in row:
            super().progress(row)

    def phase(self, phase: WorkDone) -> None:
        if not phase.done:
            self._show(None)
            self._phases = self._count_pieces()
            self._phases.add_task(f"{phase.what},", total=phase.total)
        self._show(self._phases)
        self._phases.update(self._phases.tasks[0].id, completed=phase.done)
        if phase.done == phase.total:
            self._show(None)

    def _count_pieces(self) -> Progress:
        return Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            transient=True,
        )

    def _show(self, bar: Progress | None) -> None:
        """Let `bar` be the one that is drawn."""
        if bar is self._live:
            return
        if self._live is not None:
            self._live.stop()
        self._live = bar
        if bar is not None:
            bar.start()


def reporter(console: Console) -> Lines:
    """A bar on a terminal, lines elsewhere."""
    return Bar(console) if console.is_terminal else Lines(console)


def _text(summary: Summary) -> str:
    tokens = summary.train_tokens
    there = "trained on as it is tokenized" if tokens is None else f"{tokens:,} tokens to train on"
    return f"{there}, {summary.validation_tokens:,} to validate"


def _losses(row: Row) -> str:
    validation = f"  validation {row['val_loss']:.4f}" if "val_loss" in row else ""
    return f"loss {row['loss']:.4f}{validation}{_layers(row)}  lr {row['lr']:.2e}"


def _layers(row: Row) -> str:
    """The losses of layers that have losses of their own; of many the largest."""
    losses = {
        int(name.removeprefix("loss/")): loss
        for name, loss in row.items()
        if name.startswith("loss/")
    }
    worst = sorted(sorted(losses, key=lambda layer: -losses[layer])[:SHOWN_LAYERS])
    return "".join(f"  {layer}: {losses[layer]:.3f}" for layer in worst)


def _time(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
