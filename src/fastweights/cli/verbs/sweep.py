"""fastweights sweep"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fastweights.lab.sweep import (
    AXES,
    InProcess,
    Local,
    Pool,
    Ray,
    Row,
    RunFailure,
    SweepFolder,
    SweepModel,
    SweepPlan,
    SweepRun,
    best,
    draw,
    read_plan,
)
from fastweights.lab.sweep import sweep as run_sweep
from fastweights.training.loop.files import write_figure

RUNNING = 8
"""Runs in progress that are shown."""


def sweep(chosen: Namespace, console: Console) -> None:
    """Run what a sweep's plan asks for, and draw the results."""
    plan = read_plan(chosen.plan)
    plan = replace(plan, mixers=(*plan.mixers, *map(SweepModel.of, chosen.mixer)))
    out = chosen.out or Path("runs/sweeps") / chosen.plan.stem
    rows = _run_and_show(plan, out, _pool(chosen), chosen.device.torch().type, console)
    if not rows:
        raise ValueError(f"all runs failed; their tracebacks are in {out / 'failed'}")
    figures = [name for name, axis in AXES.items() if axis.separates(rows)]
    for name in figures:
        write_figure(out / f"{name}.png", draw(rows, AXES[name]))
    names = ["rows.json", *(f"{name}.png" for name in figures)]
    console.print(f"{out}: {', '.join(names)}", soft_wrap=True)


def _pool(chosen: Namespace) -> Pool:
    if chosen.ray is not None:
        return Ray(None if chosen.ray is True else chosen.ray)
    return InProcess() if chosen.workers == 0 else Local(chosen.workers)


def _run_and_show(
    plan: SweepPlan, out: Path, pool: Pool, device: str, console: Console
) -> list[Row]:
    runs, folder = list(plan.runs()), SweepFolder(out)
    board = _Board(runs, folder)
    console.print(f"{len(runs)} runs, {len(board.rows)} of them done before")
    with Live(
        get_renderable=board.picture,
        console=console,
        refresh_per_second=1,
        transient=not console.is_terminal,
    ):
        rows = run_sweep(plan, out, pool, device=device, listener=board.take)
    if not console.is_terminal:
        console.print(board.table())
    return rows


class _Board:
    """What is known of a sweep while it runs."""

    def __init__(self, runs: Sequence[SweepRun], folder: SweepFolder) -> None:
        self.folder, self.failed = folder, list[RunFailure]()
        self.left = {run.key: run for run in runs}
        self.rows = [row for run in runs if (row := folder.row(run)) is not None]
        for row in self.rows:
            self.left.pop(row.key, None)
        self.total = len(runs)

    def take(self, result: Row | RunFailure) -> None:
        key = result.run.key if isinstance(result, RunFailure) else result.key
        self.left.pop(key, None)
        (self.failed if isinstance(result, RunFailure) else self.rows).append(result)  # pyrefly: ignore[bad-argument-type]

    def picture(self) -> Group:
        counts = f"{len(self.rows)} of {self.total} done" + (
            f", {len(self.failed)} failed" if self.failed else ""
        )
        return Group(self.table(), Text(counts), *self._running())

    def table(self) -> Table:
        """Every model at its best learning rate so far."""
        table = Table(
            *("task", "mixer", "width", "lr", "seeds", "accuracy", "± over seeds"),
            *("updates to the mark", "state [B]"),
            box=box.SIMPLE_HEAD,
        )
        for one in best(self.rows):
            solved = "" if one.solved is None else f"{one.solved:g}"
            spread = f"{one.deviation:.3f}" if len(one.accuracies) > 1 else ""
            accuracy, seeds = f"{one.mean:.3f}", str(len(one.accuracies))
            state = "" if one.state is None else f"{one.state:,}"
            table.add_row(
                one.task,
                one.mixer,
                str(one.width),
                f"{one.rate:.2g}",
                seeds,
                accuracy,
                spread,
                solved,
                state,
            )
        return table

    def _running(self) -> list[Text]:
        begun = [(run, points) for run in self.left.values() if (points := self.folder.points(run))]
        return [
            Text(
                f"  {run.contender.label}, {run.task}, lr {run.rate:.2g}, seed {run.seed}: step"
                f" {points[-1].step}, loss {points[-1].loss:.3f}, accuracy"
                f" {points[-1].accuracy:.3f}",
                "dim",
            )
            for run, points in begun[-RUNNING:]
        ]
