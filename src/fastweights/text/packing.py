"""How documents stand in one stream of tokens, and documents as the parts of that stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, tee
from typing import NamedTuple, cast

import numpy as np
from transformers import PreTrainedTokenizerFast

from fastweights.text.sources import Document
from fastweights.text.tokenizers import encode_texts, token_ids, token_type
from fastweights.text.tokens import Sequences

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


class Part(NamedTuple):
    """Some tokens of a stream of documents, one piece of text and what frames it.

    Attributes:
        runs: The tokens.
        begin: Where among them a document begins, if one does.
        bytes: UTF-8 bytes of the text.
    """

    runs: tuple[Run, ...]
    begin: int | None
    bytes: int


class _Piece(NamedTuple):
    """A piece of text and its place: in the first document, and as a document's first or last."""

    text: str
    response: bool
    in_first: bool
    first: bool
    last: bool


def encode_documents(
    tokenizer: PreTrainedTokenizerFast,
    documents: Iterable[Document],
    framing: Framing,
    skip: int = 0,
) -> Iterator[Part]:
    """Tokenize documents to the parts of one stream, one for each piece of text.

    Args:
        tokenizer: The tokenizer.
        documents: The documents; empty ones are left out.
        framing: What stands around them.
        skip: Number of pieces at the beginning that are read, but neither tokenized nor yielded.
    """
    kind = token_type(tokenizer)
    before, between, after = (
        np.array(ids, dtype=kind) for ids in (framing.before, framing.between, framing.after)
    )
    pieces, again = tee(islice(_place_pieces(documents), skip, None))
    encoded = encode_texts(tokenizer, (piece.text for piece in again))
    for piece, tokens in zip(pieces, encoded, strict=True):
        runs, begin = [Run(tokens, piece.response)], None
        if piece.first:
            apart = between[: 0 if piece.in_first else None]
            runs[:0] = [Run(apart, True), Run(before, False)]
            begin = max(0, len(apart) - 1)
        if piece.last:
            runs.append(Run(after, piece.response))
        yield Part(tuple(runs), begin, len(piece.text.encode()))


def gather(parts: Iterable[Part], framing: Framing) -> tuple[Sequences, int]:
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


def _place_pieces(documents: Iterable[Document]) -> Iterator[_Piece]:
    in_first = True
    for document in documents:
        pieces = (piece for piece in document if piece.text)
        piece, first = next(pieces, None), True
        while piece is not None:
            following = next(pieces, None)
            yield _Piece(piece.text, piece.response, in_first, first, following is None)
            piece, first = following, False
        in_first = in_first and first
