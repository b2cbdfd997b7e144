"""Documents of any common format as tokens that know where documents end and which tokens are
trained on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fastweights.runs.errors import DataError
from fastweights.runs.files import atomic_folder
from fastweights.text import IGNORE_INDEX
from fastweights.text.corpus import Windows, sequential_windows
from fastweights.text.sources import TextPiece, read_documents
from fastweights.text.tokenizers import token_ids

HELD_OUT = 20
"""Every twentieth document is for validation, if no separate sources are given for it."""


@dataclass(frozen=True)
class Data:
    """The text to train on, and how it is cut into sequences.

    Attributes:
        sources: Files, folders or data sets, as `text.sources.read_documents` takes them.
        validation: Separate sources for validation; none means every twentieth document, or the end
            of a single one.
        length: Tokens per sequence.
        responses: Whether stage two trains on responses only; of plain text all is trained on.
        boundaries: Whether a token sees only its own document among those packed into its sequence.
        held_out: Most tokens of validation text that are read, from all over it.
        field: The column of the text in records; none means those that `read_documents` names.
    """

    sources: tuple[str, ...]
    validation: tuple[str, ...] = ()
    length: int = 1024
    responses: bool = False
    boundaries: bool = True
    held_out: int = 1 << 16
    field: str | None = None


@dataclass(frozen=True, eq=False)
class Sequences:
    """The tokens ``[n]`` of documents one after another.

    Attributes:
        tokens: ``[n]`` token ids.
        response: ``[n]`` bool, the tokens that a model should learn to write.
        document: ``[n]``, the number of each token's document.
    """

    tokens: np.ndarray
    response: np.ndarray
    document: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def save(self, folder: Path) -> Sequences:
        """Write to files in `folder`, and return the same sequences mapped into memory from
        there."""
        with atomic_folder(folder) as new:
            for name in ("tokens", "response", "document"):
                np.save(new / f"{name}.npy", getattr(self, name))
        return self.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Sequences:
        return cls(
            *(
                np.load(folder / f"{name}.npy", mmap_mode="r")
                for name in ("tokens", "response", "document")
            )
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
    """An endless stream of batches; every epoch is a shuffled cover of `sequences` (`Windows`).

    Attributes:
        sequences: The documents.
        length: Tokens per sequence.
        seed: Seed of the order.
        responses: Whether only responses have labels.
        boundaries: Whether a token sees only its own document.
    """

    sequences: Sequences
    length: int
    seed: int
    responses: bool = False
    boundaries: bool = True

    @property
    def tokens(self) -> int:
        return len(self.sequences)

    @cached_property
    def windows(self) -> Windows:
        return Windows(np.arange(len(self.sequences)), self.length, self.seed)

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        return self._inputs(self.windows.batch(first, count))

    def sequential_batches(self, count: int) -> Iterator[dict[str, Tensor]]:
        for places in sequential_windows(np.arange(len(self.sequences)), self.length, count):
            yield self._inputs(places)

    def _inputs(self, places: Tensor) -> dict[str, Tensor]:
        tokens, response, document = (
            torch.from_numpy(np.asarray(stream[places.numpy()]).astype(np.int64))
            for stream in (self.sequences.tokens, self.sequences.response, self.sequences.document)
        )
        begins = torch.ones_like(document, dtype=torch.bool)
        begins[:, 1:] = document[:, 1:] != document[:, :-1]
        learnt = ~begins & (response.bool() if self.responses else True)
        inputs = {"input_ids": tokens, "labels": tokens.where(learnt, IGNORE_INDEX)}
        if self.boundaries and begins[:, 1:].any():
            inputs["position_ids"] = _since(begins)
        return inputs


def _since(begins: Tensor) -> Tensor:
    """``[b t]``: how many tokens after the last one that is True in `begins`; the first is."""
    place = torch.arange(begins.shape[1]).expand_as(begins)
    return place - (place * begins).cummax(1).values


def read_sequences(data: Data, tokenizer: PreTrainedTokenizerFast) -> tuple[Sequences, Sequences]:
    """Read training and validation text.

    Raises:
        DataError: If a file cannot be used; the message names it.
    """
    documents = _read(data.sources, tokenizer, data.field)
    parts = (
        (documents, _read(data.validation, tokenizer, data.field))
        if data.validation
        else _split_validation(documents)
    )
    train, validation = (encode(tokenizer, part) for part in parts)
    validation = _spread(validation, data.length, data.held_out)
    for name, part in (("training", train), ("validation", validation)):
        if len(part) < 2:
            raise DataError(
                f"the {name} text has {len(part)} tokens; give at least two, since one predicts"
                " the next"
            )
    return train, validation


def _read(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerFast, field: str | None
) -> list[list[TextPiece]]:
    """All documents, each with neighbouring pieces of one kind joined."""
    return [
        [
            TextPiece("".join(piece.text for piece in pieces), response)
            for response, pieces in groupby(document, lambda piece: piece.response)
        ]
        for document in read_documents(sources, tokenizer, field)
    ]


def _spread(sequences: Sequences, length: int, most: int) -> Sequences:
    """Select at most `most` tokens, or one sequence: `length` at a time from all over the text.

    Each selected stretch is a document of its own.
    """
    there = len(sequences) // length
    count = max(1, most // length)
    if count >= there:
        return sequences
    places = np.arange(count)[:, None] * there // count * length + np.arange(length)
    piece = np.broadcast_to(np.arange(count)[:, None], places.shape)
    number = sequences.document[places].astype(np.int64) * count + piece
    return Sequences(
        sequences.tokens[places.ravel()], sequences.response[places.ravel()], number.ravel()
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[Sequence[TextPiece]]
) -> Sequences:
    """Tokenize documents, with the tokenizer's begin and end tokens, if it has them, around
    each."""
    begin = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens, response, numbers = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for number, document in enumerate(documents):
        parts = [
            (np.array(begin), False),
            *((token_ids(tokenizer, p.text), p.response) for p in document if p.text),
        ]
        for ids, learnt in [*parts, (np.array(end), document[-1].response)]:
            tokens.append(ids.astype(np.int32))
            response.append(np.full(len(ids), learnt))
            numbers.append(np.full(len(ids), number, dtype=np.int32))
    return Sequences(np.concatenate(tokens), np.concatenate(response), np.concatenate(numbers))


def _split_validation(
    documents: list[list[TextPiece]],
) -> tuple[list[list[TextPiece]], list[list[TextPiece]]]:
    """All but every twentieth document, and these; a single document is cut instead."""
    if len(documents) >= HELD_OUT:
        held = documents[HELD_OUT - 1 :: HELD_OUT]
        return [d for number, d in enumerate(documents) if (number + 1) % HELD_OUT], held
    cuts = [_split_text(document) for document in documents]
    return [first for first, _ in cuts], [second for _, second in cuts]


def _split_text(document: list[TextPiece]) -> tuple[list[TextPiece], list[TextPiece]]:
    """Split off the last twentieth of a single text; records are not cut.

    Raises:
        DataError: If the document is a record.
    """
    if len(document) > 1:
        raise DataError(f"fewer than {HELD_OUT} records cannot be split; give files for validation")
    text = document[0].text
    at = len(text) - max(1, len(text) // HELD_OUT)
    return [TextPiece(text[:at], True)], [TextPiece(text[at:], True)]
