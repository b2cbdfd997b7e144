"""Live metrics by the trackers of Accelerate, whose failures never stop a training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastweights.environment import require_package
from fastweights.training.loop.files import read_json, write_json
from fastweights.training.loop.folder import RECORD
from fastweights.training.loop.metrics import Row
from fastweights.training.loop.report import Reporter, Reporters, Summary

PROJECT = "fastweights"
"""Of Weights & Biases, unless its own variable WANDB_PROJECT names another."""


class Tracker(Reporter):
    """Sends the metrics of every training that begins to a tracker, a curve each.

    What the tracker raises is a note to the user, after which it gets nothing more of this
    training.

    Attributes:
        name: Name of the tracker.
    """

    def __init__(
        self, name: str, start: Callable[[Summary], Any], note: Callable[[str], None]
    ) -> None:
        self.name, self._start, self._note = name, start, note
        self._curve: Any = None

    def begin(self, summary: Summary) -> None:
        self.close()
        self._attempt(lambda: self._open(summary))

    def progress(self, row: Row) -> None:
        numbers = {name: number for name, number in row.items() if name != "step"}
        self._attempt(lambda: self._curve and self._curve.log(numbers, step=int(row["step"])))

    def close(self) -> None:
        """End the curve of the last training."""
        self._attempt(lambda: self._curve and self._curve.finish())
        self._curve = None

    def _open(self, summary: Summary) -> None:
        self._curve = self._start(summary)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # whatever a foreign service raises
            self._curve = None
            reason = " ".join(str(error).split()) or type(error).__name__
            self._note(f"{self.name} fails, and the training goes on without it: {reason}")


@contextmanager
def track(names: Iterable[str], shown: Reporter) -> Iterator[Reporter]:
    """Yield a reporter that also sends the metrics to trackers, for the length of a block.

    Args:
        names: Names of `TRACKERS`.
        shown: Receives all progress events, and a note if a tracker fails.

    Raises:
        ValueError: If a tracker's package is not installed.
    """
    for name in names:
        require_package(name, f"tracking by {name}", "or leave it out")
    trackers = [Tracker(name, TRACKERS[name], shown.note) for name in names]
    with ExitStack() as open_curves:
        for tracker in trackers:
            open_curves.callback(tracker.close)
        yield Reporters((*trackers, shown))


def _start_tensorboard(summary: Summary) -> Any:
    """Files beside the run's; what an earlier session wrote after its last checkpoint is purged."""
    from accelerate.tracking import TensorBoardTracker

    purged = summary.step + 1
    return _started(TensorBoardTracker("tensorboard", summary.out, purge_step=purged))


def _start_wandb(summary: Summary) -> Any:
    """A run of the same id in every session, which drops the steps that it has already."""
    from accelerate.tracking import WandBTracker

    return _started(
        WandBTracker(
            os.environ.get("WANDB_PROJECT", PROJECT),
            name=str(summary.out),
            id=_wandb_id(summary.out / "wandb.json"),
            resume="allow",
            dir=str(summary.out),
            config=read_json(summary.out / RECORD),
        )
    )


def _wandb_id(path: Path) -> str:
    if not path.exists():
        write_json(path, {"id": uuid4().hex})
    return read_json(path)["id"]


def _started(tracker: Any) -> Any:
    tracker.start()
    return tracker


TRACKERS: Mapping[str, Callable[[Summary], Any]] = {
    "tensorboard": _start_tensorboard,
    "wandb": _start_wandb,
}
"""What begins the curve of a training, by the name of the tracker."""
