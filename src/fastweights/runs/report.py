"""What a run tells those who watch it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastweights.runs.metrics import Row


@dataclass(frozen=True)
class Summary:
    """A run as it begins."""

    out: Path
    device: str
    parameters: int
    vocabulary: int
    train_tokens: int
    validation_tokens: int
    tokens_per_step: int
    step: int
    steps: int


@dataclass(frozen=True)
class Result:
    """A run as it ends: complete, or stopped after `step`.

    Attributes:
        nats_per_token, nats_per_byte: the last validation loss; None if there was no evaluation
            yet
    """

    folder: Path
    step: int
    steps: int
    nats_per_token: float | None
    nats_per_byte: float | None

    @property
    def complete(self) -> bool:
        return self.step == self.steps


class Reporter:
    """Is told what happens; this one keeps it to itself. Called in the main process only."""

    def begin(self, summary: Summary) -> None:
        """Training is about to begin or go on."""

    def progress(self, row: Row) -> None:
        """A line has been added to the metrics."""

    def note(self, message: str) -> None:
        """Something its user should know."""
