"""How documents stand in one stream of tokens, and documents as the parts of that stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, islice, tee
from typing import NamedTuple, cast

import numpy as np
from transformers import PreTrainedTokenizerFast

from fastweights.training.data.formats import TextPiece
from fastweights.training.data.sources import Document
from fastweights.training.data.tokenizers import Encoder, token_ids
from fastweights.training.data.tokens import Sequences

EMPTY_LINE = "\n\n"
"""What stands between documents if a tokenizer has no token that ends a text."""


@dataclass(frozen=True)
class Framing:
    """The tokens around documents.

    Attributes:
        before: Tokens before each document, which begins with them.
        between: Tokens between two documents; the second begins with the last of them.
        after: Tokens behind each document, its last.
        begins_are_targets: Whether the first token of a document is predicted from the one before.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    begins_are_targets: bool = False


def framing_of_each(tokenizer: PreTrainedTokenizerFast) -> Framing:
    """Return the begin and end tokens of a tokenizer, as far as it has them, around each
    document."""
    begin = tuple(i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id)
    end = cast(int | None, tokenizer.eos_token_id)
    return Framing(before=begin, after=() if end is None else (end,))


def framing_of_stream(tokenizer: PreTrainedTokenizerFast) -> Framing:
    """Return one end-of-text token between two documents, or an empty line if there is no such
    token; of a tokenizer that puts a begin token before every text, `framing_of_each`."""
    around = framing_of_each(tokenizer)
    return around if around.before else framing_between(tokenizer)


def framing_between(tokenizer: PreTrainedTokenizerFast) -> Framing:
    """Return one end-of-text token between two documents, or an empty line if there is no such
    token."""
    end = framing_of_each(tokenizer).after
    between = end or tuple(token_ids(tokenizer, EMPTY_LINE).tolist())
    return Framing(between=between, begins_are_targets=True)


class Run(NamedTuple):
    """Tokens that are all a response or all none."""

    tokens: np.ndarray
    response: bool


class EncodedPart(NamedTuple):
    """Some tokens of a stream of documents, one piece of text and what frames it.

    Attributes:
        runs: The tokens.
        begin: Where among them a document begins, if one does.
        bytes: UTF-8 bytes of the text.
    """

    runs: tuple[Run, ...]
    begin: int | None
    bytes: int


class _Unit(NamedTuple):
    """What is tokenized at once: a document that has prompts or that a template has written, or
    else a piece of one.

    Attributes:
        pieces: Its pieces.
        before: The piece that stands before it in its document; empty if it is the first.
        is_last: Whether it is the last of its document.
        is_apart: Whether the tokens between two documents stand before it.
    """

    pieces: tuple[TextPiece, ...]
    before: str
    is_last: bool
    is_apart: bool

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def templated(self) -> bool:
        return self.pieces[0].templated

    def is_whole(self, encoder: Encoder) -> bool:
        """Whether it is tokenized as the tokenizer itself does, neither cut nor byte by byte."""
        return self.templated or (len(self.pieces) > 1 and not encoder.is_bytes)


def encode_documents(
    tokenizer: PreTrainedTokenizerFast,
    documents: Iterable[Document],
    framing: Framing,
    skip: int = 0,
) -> Iterator[EncodedPart]:
    """Tokenize documents to the parts of one stream: one for each document that has prompts or that
    a chat template has written, for others one for each piece of text.

    What a chat template has written begins and ends as it says, so that nothing is put around it.

    Args:
        tokenizer: The tokenizer.
        documents: The documents; empty ones are left out.
        framing: What stands around them.
        skip: Number of parts at the beginning that are read, but neither tokenized nor yielded.
    """
    encoder = Encoder(tokenizer)
    units, again = tee(islice(_units(documents), skip, None))
    encoded = (
        found
        for is_whole, group in groupby(again, lambda unit: unit.is_whole(encoder))
        for found in (_encode_whole if is_whole else _encode_pieces)(encoder, group)
    )
    special = frozenset(map(int, tokenizer.all_special_ids))
    for unit, (tokens, response) in zip(units, encoded, strict=True):
        yield _frame(unit, tokens, response, framing, special)


def _encode_pieces(
    encoder: Encoder, units: Iterable[_Unit]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    units, again = tee(units)
    encoded = encoder.encode((unit.before, unit.text) for unit in again)
    for unit, tokens in zip(units, encoded, strict=True):
        sizes = [len(piece.text.encode()) for piece in unit.pieces]
        counts = sizes if encoder.is_bytes else [len(tokens)]
        yield tokens, np.repeat([piece.response for piece in unit.pieces], counts)


def _encode_whole(
    encoder: Encoder, units: Iterable[_Unit]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A token is a response if it stands for any character of one."""
    units, again = tee(units)
    encoded = encoder.encode_with_places(unit.text for unit in again)
    for unit, (tokens, places) in zip(units, encoded, strict=True):
        sizes = [len(piece.text) for piece in unit.pieces]
        learnt = np.repeat([piece.response for piece in unit.pieces], sizes)
        count = np.concatenate(([0], learnt.cumsum()))
        first, last = places.clip(max=len(learnt)).T
        yield tokens, count[last] > count[first]


def _frame(
    unit: _Unit, tokens: np.ndarray, response: np.ndarray, framing: Framing, special: Set[int]
) -> EncodedPart:
    """The tokens, and what stands around a document where one begins or ends."""
    between, before, after = framing.between, framing.before, framing.after
    between = between if unit.is_apart else ()
    if unit.templated:
        before = after = ()
    else:
        first = 0 if unit.before else _length_at(tokens, before or between, special)
        last = _length_at(tokens[::-1], after[::-1], special) if unit.is_last else 0
        kept = slice(first, len(tokens) - last)
        tokens, response = tokens[kept], response[kept]
    runs, begin = [*_runs(tokens, response)], None
    if not unit.before:
        kind = tokens.dtype
        runs[:0] = [Run(np.array(between, kind), True), Run(np.array(before, kind), False)]
        begin = len(between) if unit.templated else max(0, len(between) - 1)
    if unit.is_last:
        runs.append(Run(np.array(after, tokens.dtype), unit.pieces[-1].response))
    return EncodedPart(tuple(runs), begin, len(unit.text.encode()))


def _length_at(tokens: np.ndarray, ids: Sequence[int], special: Set[int]) -> int:
    """How many tokens at the beginning are these special ones, with which others are to stand."""
    there = len(tokens) > len(ids) and tokens[: len(ids)].tolist() == list(ids)
    return len(ids) if there and special >= set(ids) else 0


def _runs(tokens: np.ndarray, response: np.ndarray) -> Iterator[Run]:
    edges = np.flatnonzero(response[1:] != response[:-1]) + 1
    for part, learnt in zip(np.split(tokens, edges), np.split(response, edges), strict=True):
        yield Run(part, bool(learnt.all()))


def gather(parts: Iterable[EncodedPart], framing: Framing) -> tuple[Sequences, int]:
    """Put the parts of a stream into arrays; returns them, and the text's UTF-8 bytes."""
    tokens, response, begins, size = list[np.ndarray](), list[np.ndarray](), list[int](), 0
    bytes_read = 0
    for part in parts:
        begins += [] if part.begin is None else [size + part.begin]
        for run in part.runs:
            tokens.append(run.tokens)
            response.append(np.full(len(run.tokens), run.response))
            size += len(run.tokens)
        bytes_read += part.bytes
    document = np.zeros(size, dtype=np.int32)
    document[begins] = 1
    return (
        Sequences(
            np.concatenate(tokens),
            np.concatenate(response),
            document.cumsum(dtype=np.int32) - 1,
            framing.begins_are_targets,
        ),
        bytes_read,
    )


def _units(documents: Iterable[Document]) -> Iterator[_Unit]:
    was_templated = None  # of the document before, if there is one
    for document in documents:
        pieces = (piece for piece in document if piece.text)
        if (first := next(pieces, None)) is None:
            continue
        is_apart = was_templated is not None and not (was_templated and first.templated)
        was_templated = first.templated
        if first.templated or not first.response:
            yield _Unit((first, *pieces), "", True, is_apart)
        else:
            yield from _separate(first, pieces, is_apart)


def _separate(piece: TextPiece, others: Iterator[TextPiece], is_apart: bool) -> Iterator[_Unit]:
    before, following = "", next(others, None)
    while following is not None:
        yield _Unit((piece,), before, False, is_apart)
        is_apart, before = False, piece.text
        piece, following = following, next(others, None)
    yield _Unit((piece,), before, True, is_apart)
