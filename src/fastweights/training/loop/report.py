"""Progress events of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict, TypeVar

from fastweights.errors import Stopped
from fastweights.training.loop.metrics import Row

Item = TypeVar("Item")


class Counts(TypedDict):
    """How many tokens a run has.

    Attributes:
        vocabulary: Number of different tokens.
        train_tokens: Tokens of the training text; None while it is still being written.
        validation_tokens: Tokens of the validation text.
    """

    vocabulary: int
    train_tokens: int | None
    validation_tokens: int


@dataclass(frozen=True)
class Summary:
    """A description of a run at its beginning.

    Attributes:
        out: The run's folder.
        device: Where the model is trained.
        parameters: Number of trained parameters.
        vocabulary: Number of different tokens.
        train_tokens: Tokens of the training text; None while it is still being written.
        validation_tokens: Tokens of the validation text.
        tokens_per_step: Tokens per update, over all processes.
        step: Updates made in earlier sessions.
        steps: Updates in all.
    """

    out: Path
    device: str
    parameters: int
    vocabulary: int
    train_tokens: int | None
    validation_tokens: int
    tokens_per_step: int
    step: int
    steps: int


@dataclass(frozen=True)
class Result:
    """The result of a run: complete, or stopped after `step`.

    Attributes:
        folder: The run's folder.
        step: Updates made.
        steps: Updates in all.
        nats_per_token, nats_per_byte: The last validation loss; None if there was no evaluation
            yet.
        validated: Whether the validation of the last step has come to its end.
    """

    folder: Path
    step: int
    steps: int
    nats_per_token: float | None
    nats_per_byte: float | None
    validated: bool = True

    @property
    def complete(self) -> bool:
        return self.step == self.steps and self.validated


@dataclass(frozen=True)
class Reading:
    """How far a text has been read and tokenized.

    Attributes:
        read: Bytes read, as they are on the disk.
        total: Bytes that there are; None if that is not known.
        tokens: Tokens written.
        seconds: Seconds since reading began.
    """

    read: int
    total: int | None
    tokens: int
    seconds: float


@dataclass(frozen=True)
class WorkDone:
    """How far some work beside the training has come.

    Attributes:
        what: The work, such as "placing landmarks".
        done: Pieces of it that are done.
        total: Pieces that there are.
        seconds: Seconds since it began.
    """

    what: str
    done: int
    total: int
    seconds: float


class Reporter:
    """Receives progress events, in the main process only; this base class ignores them."""

    def begin(self, summary: Summary) -> None:
        """Called before training starts or resumes."""

    def progress(self, row: Row) -> None:
        """Called with every row that is added to the metrics."""

    def note(self, message: str) -> None:
        """Called with a message to the user."""

    def reading(self, reading: Reading) -> None:
        """Called now and then while a text is read and tokenized."""

    def phase(self, phase: WorkDone) -> None:
        """Called after every piece of work beside the training."""


class Reporters(Reporter):
    """Several reporters that receive the same events, one after the other."""

    def __init__(self, reporters: Iterable[Reporter]) -> None:
        self._reporters = tuple(reporters)

    def begin(self, summary: Summary) -> None:
        for reporter in self._reporters:
            reporter.begin(summary)

    def progress(self, row: Row) -> None:
        for reporter in self._reporters:
            reporter.progress(row)

    def note(self, message: str) -> None:
        for reporter in self._reporters:
            reporter.note(message)

    def reading(self, reading: Reading) -> None:
        for reporter in self._reporters:
            reporter.reading(reading)

    def phase(self, phase: WorkDone) -> None:
        for reporter in self._reporters:
            reporter.phase(phase)


class Follow(Protocol):
    """Yields pieces of some work, and tells somebody of each."""

    def __call__(self, pieces: Collection[Item], what: str) -> Iterable[Item]: ...


def unfollowed(pieces: Collection[Item], what: str) -> Iterable[Item]:
    """Yield the pieces, and tell nobody."""
    del what
    return pieces


def follow(
    pieces: Collection[Item],
    what: str,
    reporter: Reporter,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Item]:
    """Yield pieces of work, and tell a reporter of each that is done.

    Args:
        pieces: The pieces.
        what: What the work is.
        reporter: Receives a `WorkDone` before the first piece and after each.
        stop: Asked before each piece.

    Raises:
        Stopped: If `stop` returned True.
    """
    start, total = time.monotonic(), len(pieces)
    for done, piece in enumerate(pieces):
        if stop():
            raise Stopped
        reporter.phase(WorkDone(what, done, total, time.monotonic() - start))
        yield piece
    reporter.phase(WorkDone(what, total, total, time.monotonic() - start))
