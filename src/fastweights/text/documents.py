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
from fastweights.text.orders import Order, Span
from fastweights.text.packing import framing_of_each
from fastweights.text.request import TextRequest
from fastweights.text.tokens import TokenText
from fastweights.text.windows import Windows, batch_spans, sequential_spans


def count_learnt(labels: Tensor) -> int:
    """Return how many of the labels ``[b t]`` of a batch are predicted from tokens before."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())


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
        weights: The share of training of each source, in any unit; none if they are one text.
        stream: Tokens of the blocks in whose order a text is trained on while it is being
            tokenized; None to tokenize all of it before.

    Raises:
        TrainingError: If there is no source, not one weight for each, or a number lies outside of
            its range.
    """

    sources: tuple[str, ...]
    validation: tuple[str, ...] = ()
    length: int = 1024
    responses: bool = False
    boundaries: bool = True
    held_out: int = 1 << 16
    field: str | None = None
    weights: tuple[float, ...] = ()
    stream: int | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("there is no text to train on; give at least one source")
        SEQUENCE_LENGTH.require(length=self.length, held_out=self.held_out)
        self.request()

    def request(self) -> TextRequest:
        """Return what is to be read, each document between the tokens that begin and end it."""
        return TextRequest(
            self.sources,
            self.validation,
            self.field,
            self.held_out,
            self.length,
            framing_of_each,
            self.weights,
            self.stream,
        )


class Batches(ABC):
    """An endless stream of batches: sequences of `length` tokens as inputs of a model, with
    ``labels``.

    Attributes:
        length: Tokens per sequence.
        responses: Whether only responses have labels.
        boundaries: Whether a token sees only its own document.
    """

    length: int
    responses: bool
    boundaries: bool

    @property
    @abstractmethod
    def tokens(self) -> int | None:
        """Number of different tokens that are trained on; None as long as that is not known."""

    @abstractmethod
    def spans(self, first: int, count: int) -> list[Span]:
        """Return where sequences `first` … `first + count - 1` of the endless stream are, a
        function of these numbers."""

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        """Return sequences `first` … `first + count - 1` of the endless stream, a function of these
        numbers."""
        return self._collate(self.spans(first, count))

    def learnt(self, first: int, count: int) -> int:
        """Return how many tokens of these sequences are predicted from those before."""
        return count_learnt(self.batch(first, count)["labels"])

    def _collate(self, spans: Sequence[Span]) -> dict[str, Tensor]:
        stretches = [span.text.read(span.start, span.stop) for span in spans]
        tokens, begins, response = map(np.stack, zip(*stretches, strict=True))
        tokens, begins = torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(begins)
        begins[:, 0] = True
        learnt = ~begins | spans[0].text.begins_are_targets
        if self.responses:
            learnt &= torch.from_numpy(response)
        inputs = {"input_ids": tokens, "labels": tokens.where(learnt, IGNORE_INDEX)}
        if self.boundaries and begins[:, 1:].any():
            inputs["position_ids"] = _since(begins)
        return inputs


@dataclass(frozen=True, eq=False)
class Stream(Batches):
    """A text in an endless stream of batches; every epoch is a shuffled cover of it (`Windows`).

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

    def spans(self, first: int, count: int) -> list[Span]:
        starts = self.windows.starts(first, count)
        return [Span(self.text, start, start + self.length) for start in starts]

    def sequential_batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Yield all sequences once and in order, at most `count` at a time."""
        for spans in batch_spans(sequential_spans(len(self.text), self.length), count):
            yield self._collate([Span(self.text, start, stop) for start, stop in spans])


@dataclass(frozen=True, eq=False)
class OrderedStream(Batches):
    """An endless stream of batches whose sequences come in a given order.

    Attributes:
        order: The order.
        length: Tokens per sequence.
        responses: Whether only responses have labels.
        boundaries: Whether a token sees only its own document.
    """

    order: Order
    length: int
    responses: bool = False
    boundaries: bool = True

    @property
    def tokens(self) -> int | None:
        return self.order.tokens

    def spans(self, first: int, count: int) -> list[Span]:
        return [self.order.span(number) for number in range(first, first + count)]


def _since(begins: Tensor) -> Tensor:
    """``[b t]``: how many tokens after the last one that is True in `begins`; the first is."""
    place = torch.arange(begins.shape[1]).expand_as(begins)
    return place - (place * begins).cummax(1).values
