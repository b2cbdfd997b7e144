"""Documents of any common format as tokens that know where documents end and which tokens are
trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fastweights.runs.errors import DataError
from fastweights.runs.ranges import SEQUENCE_LENGTH
from fastweights.text import IGNORE_INDEX
from fastweights.text.packing import framing_of_each
from fastweights.text.request import TextRequest
from fastweights.text.tokens import TokenText
from fastweights.text.windows import Windows, batch_spans, sequential_spans


@dataclass(frozen=True)
class Data:
    """The text to train on, and how it is cut into sequences.

    Attributes:
        sources: Files, folders or data sets, as `text.sources.read_documents` takes them.
        validation: Separate sources for validation; none means that a part of `sources` is held
            out, as `text.holdout.hold_out` does.
        length: Tokens per sequence.
        responses: Whether stage two trains on responses only; of plain text all is trained on.
        boundaries: Whether a token sees only its own document among those packed into its sequence.
        held_out: Most tokens to validate on.
        field: The column of the text in records; none means those that `read_documents` names.

    Raises:
        TrainingError: If there is no source, or a number lies outside of its range.
    """

    sources: tuple[str, ...]
    validation: tuple[str, ...] = ()
    length: int = 1024
    responses: bool = False
    boundaries: bool = True
    held_out: int = 1 << 16
    field: str | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("there is no text to train on; give at least one source")
        SEQUENCE_LENGTH.require(length=self.length, held_out=self.held_out)

    def request(self) -> TextRequest:
        """Return what is to be read, each document between the tokens that begin and end it."""
        return TextRequest(
            self.sources,
            self.validation,
            self.field,
            self.held_out,
            self.length,
            framing_of_each,
        )


class Batches(ABC):
    """A source of batches: sequences of `length` tokens as inputs of a model, with ``labels``.

    Attributes:
        length: Tokens per sequence.
    """

    length: int

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Number of different tokens that are trained on."""

    @abstractmethod
    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        """Return sequences `first` … `first + count - 1` of an endless stream, a function of these
        numbers."""

    @abstractmethod
    def sequential_batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield all sequences once and in order, at most `count` at a time."""


@dataclass(frozen=True, eq=False)
class Stream(Batches):
    """An endless stream of batches; every epoch is a shuffled cover of `text` (`Windows`).

    Attributes:
        text: The documents.
        length: Tokens per sequence.
        seed: Seed of the order.
        responses: Whether only responses have labels.
        boundaries: Whether a token sees only its own document.
    """

    text: TokenText
    length: int
    seed: int
    responses: bool = False
    boundaries: bool = True

    @property
    def tokens(self) -> int:
        return len(self.text)

    @cached_property
    def windows(self) -> Windows:
        return Windows(self.text, self.length, self.seed)

    def require_sequence(self) -> None:
        """Raise DataError if the text is shorter than one sequence."""
        _ = self.windows

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        return self._read(
            [(start, start + self.length) for start in self.windows.starts(first, count)]
        )

    def sequential_batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        for spans in batch_spans(sequential_spans(len(self.text), self.length), count):
            yield self._read(spans)

    def _read(self, spans: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
        stretches = [self.text.read(start, stop) for start, stop in spans]
        tokens, begins, response = map(np.stack, zip(*stretches, strict=True))
        tokens, begins = torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(begins)
        begins[:, 0] = True
        learnt = ~begins | self.text.begins_are_targets
        if self.responses:
            learnt &= torch.from_numpy(response)
        inputs = {"input_ids": tokens, "labels": tokens.where(learnt, IGNORE_INDEX)}
        if self.boundaries and begins[:, 1:].any():
            inputs["position_ids"] = _since(begins)
        return inputs


def _since(begins: Tensor) -> Tensor:
    """``[b t]``: how many tokens after the last one that is True in `begins`; the first is."""
    place = torch.arange(begins.shape[1]).expand_as(begins)
    return place - (place * begins).cummax(1).values
