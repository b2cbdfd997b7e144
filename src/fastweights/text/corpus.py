"""A text to train on, read into memory; `text.folder` keeps one of any size on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from fastweights.runs.errors import DataError
from fastweights.runs.ranges import SEQUENCE_LENGTH
from fastweights.text.holdout import FRACTION, all_of, hold_out, measure, thin_out
from fastweights.text.packing import (
    Framing,
    Part,
    encode_documents,
    framing_between,
    framing_of_stream,
    gather,
)
from fastweights.text.request import TextRequest
from fastweights.text.sources import read_documents
from fastweights.text.tokenizers import SAMPLE, Bytes, Tokenization
from fastweights.text.tokens import Ranges, TokenText, WholeText


@dataclass(frozen=True)
class Text:
    """The text to read, and how to cut it into tokens.

    Attributes:
        sources: Files, folders or data sets, as `text.sources.read_documents` takes them.
        validation: Separate sources for validation; none means that a part of `sources` is held
            out, as `text.holdout.hold_out` does.
        tokenization: How the tokenizer is made. One that is learnt is learnt from the beginning of
            the training text; of a text without validation sources that is short, from nine tenths
            of it.
        boundaries: Whether a token sees only its own document among those packed into its sequence.
        field: The column of the text in records; none means those that `read_documents` names.
        held_out: Most tokens to validate on.
    """

    sources: tuple[str, ...] = ("shakespeare",)
    validation: tuple[str, ...] = ()
    tokenization: Tokenization = Bytes()
    boundaries: bool = True
    field: str | None = None
    held_out: int = 1 << 17

    def __post_init__(self) -> None:
        SEQUENCE_LENGTH.require(held_out=self.held_out)

    def request(self, length: int) -> TextRequest:
        """Return what is to be read for sequences of `length` tokens: one stream of documents."""
        return TextRequest(
            self.sources,
            self.validation,
            self.field,
            self.held_out,
            length,
            framing_of_stream,
        )


@dataclass(frozen=True)
class TextSize:
    """The size of a text: tokens that are predicted, and the UTF-8 bytes that they stand for.

    Tokens between documents are predicted, but stand for no bytes.
    """

    tokens: int
    bytes: int

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / self.bytes


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the tokens of the training and validation text.

    Attributes:
        tokenizer: The tokenizer.
        train: The training text; its slices are arrays, uint16 or int32.
        validation: The validation text.
        sizes: Tokens and UTF-8 bytes of the two parts.
    """

    tokenizer: PreTrainedTokenizerFast
    train: TokenText
    validation: TokenText
    sizes: dict[str, TextSize]

    @property
    def tokens_per_byte(self) -> float:
        """Tokens per byte of the validation text; turns nats per token into nats per byte."""
        return self.sizes["validation"].tokens_per_byte


def read_corpus(text: Text) -> Corpus:
    """Read, tokenize and split a text that fits in memory.

    Raises:
        DataError: If a file cannot be used (the message names it), or the text is too short.
    """
    tokenizer = build_tokenizer(text)
    framing = framing_of_stream(tokenizer)
    whole, size = _read_whole(text.sources, tokenizer, framing, text.field)
    validation = None
    if text.validation:
        validation, _ = _read_whole(text.validation, tokenizer, framing, text.field)
    return split_corpus(tokenizer, whole, size, validation, text.held_out, text.held_out)


def split_corpus(
    tokenizer: PreTrainedTokenizerFast,
    whole: WholeText,
    size: int,
    validation: WholeText | None,
    held_out: int,
    length: int,
) -> Corpus:
    """Divide a text into what is trained on and what is validated on.

    Args:
        tokenizer: The tokenizer.
        whole: The text.
        size: Its UTF-8 bytes.
        validation: A separate text to validate on; None to hold out a part of `whole`.
        held_out: Most tokens to validate on.
        length: Tokens of the stretches of `validation` that are taken if it has more.

    Raises:
        DataError: If the text is too short.
    """
    train, held = (
        hold_out(whole, held_out, tokenizer)
        if validation is None
        else (all_of(whole), thin_out(validation, length, held_out))
    )
    for name, part in (("training", train), ("validation", held)):
        if len(part) < 2:
            raise DataError(
                f"the {name} text has fewer than 2 tokens; give more text, or validation files"
            )
    validated = TextSize(*measure(held, tokenizer))
    trained = TextSize(len(train), size - (validated.bytes if validation is None else 0))
    return Corpus(tokenizer, train, held, {"train": trained, "validation": validated})


def tokenize_sources(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    field: str | None = None,
    most: int | None = None,
) -> tuple[np.ndarray, TextSize]:
    """Tokenize the text of `sources`.

    Args:
        sources: Files, folders or data sets, as `text.sources.read_documents` takes them.
        tokenizer: The tokenizer.
        field: The column of the text in records; none means those that `read_documents` names.
        most: Number of tokens after which reading ends; none means all of the text.

    Returns:
        Tokens ``[n]``, and their number with that of the UTF-8 bytes that they stand for.

    Raises:
        DataError: If a source cannot be used.
    """
    read, size = _read_whole(sources, tokenizer, framing_between(tokenizer), field, most)
    if most is None or len(read) <= most:
        return read[:], TextSize(len(read), size)
    first = Ranges(read, np.array([[0, most]]), read.begins_are_targets)
    return first[:], TextSize(*measure(first, tokenizer))


def build_tokenizer(text: Text) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a text, from the text if it is learnt.

    Raises:
        DataError: If the tokenizer cannot be made, or the text not be read.
    """
    return text.tokenization.build(_sample(text) if text.tokenization.is_learnt else ())


def _sample(text: Text) -> Iterator[str]:
    """The beginning of the text, without the end that is held out of a short one."""
    pieces, size = list[str](), 0
    for piece in _pieces(text.sources, text.field):
        pieces.append(piece)
        size += len(piece)
        if size * FRACTION > SAMPLE:
            break
    left = size if text.validation else int(FRACTION * size)
    for piece in pieces:
        yield piece[:left]
        left = max(0, left - len(piece))


def _pieces(sources: Sequence[str], field: str | None) -> Iterator[str]:
    for document in read_documents(sources, None, field):
        for piece in document:
            yield piece.text


def _read_whole(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerFast,
    framing: Framing,
    field: str | None,
    most: int | None = None,
) -> tuple[WholeText, int]:
    """The text, from its beginning to the piece that has the last of `most` tokens, and the UTF-8
    bytes that were read."""
    documents = read_documents(sources, tokenizer, field)
    return gather(_take_parts(encode_documents(tokenizer, documents, framing), most), framing)


def _take_parts(parts: Iterator[Part], most: int | None) -> Iterator[Part]:
    """Parts until there are so many tokens."""
    size = 0
    for part in parts:
        yield part
        size += sum(len(run.tokens) for run in part.runs)
        if most is not None and size >= most:
            return
