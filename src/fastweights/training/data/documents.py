"""Documents of any common format as batches of tokens that know where documents end and which
tokens are trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fastweights.models.loss import IGNORE_INDEX
from fastweights.ranges import SEQUENCE_LENGTH
from fastweights.training.data.packing import Framing, framing_of_each
from fastweights.training.data.request import Sources
from fastweights.training.data.tokens import TokenText
from fastweights.training.data.windows import Windows, batch_spans, sequential_spans

DRAWN = 1 << 12
"""Sequences of a mixture whose sources are drawn at once."""


def count_learnt(labels: Tensor) -> int:
    """Return how many of the labels ``[b t]`` of a batch are predicted from tokens before."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class Data(Sources):
    """The text of a conversion: its sources, and how it is cut into sequences.

    Attributes:
        length: Tokens per sequence.
        responses: Whether stage two trains on responses only; of plain text all is trained on.
    """

    length: int = 1024
    responses: bool = False

    def __post_init__(self) -> None:
        SEQUENCE_LENGTH.require(length=self.length)
        super().__post_init__()
        self.require_blocks(self.length)

    def framing(self, tokenizer: PreTrainedTokenizerFast) -> Framing:
        """Return the tokens that begin and end each document."""
        return framing_of_each(tokenizer)


class Span(NamedTuple):
    """A sequence: tokens `start` … `stop - 1` of a text."""

    text: TokenText
    start: int
    stop: int


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
    def span(self, number: int) -> Span:
        """Return where a sequence of the endless stream is, a function of its number."""

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        """Return sequences `first` … `first + count - 1` of the endless stream, a function of these
        numbers."""
        return self._collate([self.span(number) for number in range(first, first + count)])

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
        seed: Seed of the order.
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

    def span(self, number: int) -> Span:
        [start] = self.windows.starts(number, 1)
        return Span(self.text, start, start + self.length)

    def sequential_batches(self, count: int) -> SequentialBatches:
        """Return all sequences once and in order, at most `count` at a time."""
        spans = batch_spans(sequential_spans(len(self.text), self.length), count)
        return SequentialBatches(
            self, [[Span(self.text, *ends) for ends in some] for some in spans]
        )


@dataclass(frozen=True, eq=False)
class SequentialBatches(Sequence[dict[str, Tensor]]):
    """Batches of a stream, read when they are asked for.

    Attributes:
        stream: The stream.
        spans: The sequences of each batch.
    """

    stream: Stream
    spans: Sequence[list[Span]]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return SequentialBatches(self.stream, self.spans[number])
        return self.stream._collate(self.spans[number])


@dataclass(frozen=True, eq=False)
class Mixture(Batches):
    """Sequences of several streams, of which one is drawn for each, as
    `datasets.interleave_datasets` does with probabilities; every stream goes through its own
    epochs.

    Attributes:
        streams: The streams, of sequences of one length.
        weights: The chances of each, in any unit.
        seed: Seed of what is drawn.
    """

    streams: tuple[Batches, ...]
    weights: tuple[float, ...]
    seed: int
    responses: bool = False
    boundaries: bool = True

    @property
    def length(self) -> int:
        return self.streams[0].length

    @property
    def tokens(self) -> int | None:
        counts = [stream.tokens for stream in self.streams]
        return None if None in counts else sum(count for count in counts if count is not None)

    def span(self, number: int) -> Span:
        block, place = divmod(number, DRAWN)
        drawn = self._draw(block)
        source = int(drawn[place])
        own = self._count_before(block)[source] + np.count_nonzero(drawn[:place] == source)
        return self.streams[source].span(int(own))

    def _count_before(self, block: int) -> np.ndarray:
        """How many sequences of each stream stand before a block of those that are drawn at
        once."""
        while len(self._counts) <= block:
            drawn = self._draw(len(self._counts) - 1)
            count = np.bincount(drawn, minlength=len(self.streams))
            self._counts.append(self._counts[-1] + count)
        return self._counts[block]

    @cached_property
    def _counts(self) -> list[np.ndarray]:
        return [np.zeros(len(self.streams), np.int64)]

    @cached_property
    def _draw(self) -> Callable[[int], np.ndarray]:
        chances = np.array(self.weights) / sum(self.weights)
        return lru_cache(2)(
            lambda block: np.random.default_rng([self.seed, block]).choice(
                len(chances), DRAWN, p=chances
            )
        )


def _since(begins: Tensor) -> Tensor:
    """``[b t]``: how many tokens after the last one that is True in `begins`; the first is."""
    place = torch.arange(begins.shape[1]).expand_as(begins)
    return place - (place * begins).cummax(1).values


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the batch's tensors on `device`; the host does not wait for a GPU to copy them."""
    return {name: _moved(tensor, device) for name, tensor in batch.items()}


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # only from memory that the system cannot move does a GPU copy by itself
    return tensor.pin_memory().to(device, non_blocking=True)
