"""A text to train on, read into memory; `text.folder` keeps one of any size on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from fastweights.runs.errors import DataError
from fastweights.runs.ranges import SEQUENCE_LENGTH
from fastweights.runs.seeds import random_seed_from
from fastweights.text.blocks import BlockedText, Blockwise
from fastweights.text.documents import Batches, OrderedStream, Stream
from fastweights.text.holdout import FRACTION, all_of, hold_out, measure, thin_out
from fastweights.text.orders import Mixture, Order, Shuffled
from fastweights.text.packing import (
    Framing,
    Part,
    encode_documents,
    framing_between,
    framing_of_stream,
    gather,
)
from fastweights.text.request import TRAIN, VALIDATION, StoredCollection, TextRequest
from fastweights.text.shares import Shares, naming
from fastweights.text.sources import read_documents
from fastweights.text.tokenizers import SAMPLE, Bytes, Tokenization
from fastweights.text.tokens import Joined, Ranges, TokenText, WholeText


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
        weights: The share of training of each source, in any unit; none if they are one text.
        stream: Tokens of the blocks in whose order a text is trained on while it is being
            tokenized; None to tokenize all of it before.
    """

    sources: tuple[str, ...] = ("shakespeare",)
    validation: tuple[str, ...] = ()
    tokenization: Tokenization = Bytes()
    boundaries: bool = True
    field: str | None = None
    held_out: int = 1 << 17
    weights: tuple[float, ...] = ()
    stream: int | None = None

    def __post_init__(self) -> None:
        SEQUENCE_LENGTH.require(held_out=self.held_out)

    def request(self, length: int) -> TextRequest:
        """Return what is to be read for sequences of `length` tokens: one stream of documents.

        Raises:
            TrainingError: If there is not one weight for each source, or a number lies outside of
                its range.
        """
        return TextRequest(
            self.sources,
            self.validation,
            self.field,
            self.held_out,
            length,
            framing_of_stream,
            self.weights,
            self.stream,
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
class Source:
    """A text to train on beside others, or one that is still being written.

    Attributes:
        name: What it is called; empty if there is no other.
        share: Its share of training, in whole numbers beside those of the others.
        text: The text.
    """

    name: str
    share: int
    text: TokenText | BlockedText

    def order(self, length: int, seed: int) -> Order:
        """Return the order of its sequences.

        Raises:
            DataError: If it is shorter than one sequence.
        """
        text = self.text
        blocks = isinstance(text, BlockedText)
        order = Blockwise(text, length, seed) if blocks else Shuffled(text, length, seed)
        with naming(self.name):
            order.span(0)
        return order


@dataclass(frozen=True)
class HeldOut:
    """What is held out of one source of a mixture.

    Attributes:
        name: What the source is called.
        share: Its share of training, in whole numbers beside those of the others.
        text: The text.
        size: Its tokens and bytes.
    """

    name: str
    share: int
    text: TokenText
    size: TextSize


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the tokens of the training and validation text.

    Attributes:
        tokenizer: The tokenizer.
        train: The training text; its slices are arrays, uint16 or int32. Of one that is still being
            written, what was there when it was opened.
        validation: The validation text, of all sources.
        sizes: Tokens and UTF-8 bytes of the two parts.
        sources: The texts of a mixture, or the one that is still being written; none of a single
            text that is there as a whole.
        held_out: What is held out of each source of a mixture; none if it has validation sources.
    """

    tokenizer: PreTrainedTokenizerFast
    train: TokenText
    validation: TokenText
    sizes: dict[str, TextSize]
    sources: tuple[Source, ...] = ()
    held_out: tuple[HeldOut, ...] = ()

    @property
    def tokens_per_byte(self) -> float:
        """Tokens per byte of the validation text, its sources weighted by their shares; turns nats
        per token into nats per byte."""
        if not self.held_out:
            return self.sizes[VALIDATION].tokens_per_byte
        bytes_per_token = {part.name: 1 / part.size.tokens_per_byte for part in self.held_out}
        return 1 / self._mean(bytes_per_token)

    def batches(
        self, length: int, seed: int, responses: bool = False, boundaries: bool = True
    ) -> Batches:
        """Return the endless stream of batches to train on, in an order that the seed decides.

        Raises:
            DataError: If a text is shorter than one sequence.
        """
        if not self.sources:
            stream = Stream(self.train, length, seed, responses, boundaries)
            stream.require_sequence()
            return stream
        orders = tuple(
            source.order(length, random_seed_from(seed, number))
            for number, source in enumerate(self.sources)
        )
        shares = Shares(tuple(source.share for source in self.sources))
        return OrderedStream(Mixture(orders, shares), length, responses, boundaries)

    @property
    def validations(self) -> dict[str, TokenText]:
        """The texts to validate on by the names of their sources; "" for the only one."""
        return {part.name: part.text for part in self.held_out} or {"": self.validation}

    def loss_metrics(self, losses: Mapping[str, float]) -> dict[str, float]:
        """Return ``val_loss`` of the losses on `validations`, their mean by shares, and
        ``val_loss/NAME`` of each if there are several."""
        if not self.held_out:
            return {"val_loss": losses[""]}
        each = {f"val_loss/{name}": loss for name, loss in losses.items()}
        return {"val_loss": self._mean(losses), **each}

    def _mean(self, numbers: Mapping[str, float]) -> float:
        total = sum(part.share * numbers[part.name] for part in self.held_out)
        return total / sum(part.share for part in self.held_out)


def read_corpus(text: Text) -> Corpus:
    """Read, tokenize and split a text that fits in memory.

    Raises:
        DataError: If a file cannot be used (the message names it), or the text is too short.
    """
    if text.stream is not None:
        raise DataError("a text in memory is there as a whole; leave stream out")
    tokenizer, request = build_tokenizer(text), text.request(2)
    framing = framing_of_stream(tokenizer)
    validation = None
    if text.validation:
        validation, _ = _read_whole(text.validation, tokenizer, framing, text.field)
    found = dict[str, Corpus]()
    for collection in request.collections:
        whole, size = _read_whole(collection.sources, tokenizer, framing, text.field)
        with naming(collection.name):
            found[collection.text] = split_corpus(
                tokenizer, whole, size, validation, collection.held_out, text.held_out
            )
    return mix(request, found)


def mix(request: TextRequest, found: Mapping[str, Corpus]) -> Corpus:
    """Put the texts of a request together.

    Args:
        request: The request.
        found: The text of each of its collections, divided, by the name under which it is stored.
    """
    corpora = [found[collection.text] for collection in request.collections]
    if not request.weights:
        return corpora[0]
    parts = corpora[:1] if request.validation else corpora
    return Corpus(
        corpora[0].tokenizer,
        Joined(tuple(corpus.train for corpus in corpora)),
        Joined(tuple(corpus.validation for corpus in parts)),
        {
            TRAIN: _sum(corpus.sizes[TRAIN] for corpus in corpora),
            VALIDATION: _sum(corpus.sizes[VALIDATION] for corpus in parts),
        },
        tuple(map(_source_of, request.collections, corpora)),
        () if request.validation else tuple(map(_held_out_of, request.collections, corpora)),
    )


def _source_of(collection: StoredCollection, corpus: Corpus) -> Source:
    """A text that is still being written stands in its corpus as its source."""
    text = corpus.sources[0].text if corpus.sources else corpus.train
    return Source(collection.name, collection.share, text)


def _held_out_of(collection: StoredCollection, corpus: Corpus) -> HeldOut:
    return HeldOut(collection.name, collection.share, corpus.validation, corpus.sizes[VALIDATION])


def _sum(sizes: Iterable[TextSize]) -> TextSize:
    tokens, size = map(sum, zip(*((size.tokens, size.bytes) for size in sizes), strict=True))
    return TextSize(tokens, size)


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
    _, size = measure(first, tokenizer)
    return first[:], TextSize(most, size)


def build_tokenizer(text: Text) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a text, from the text if it is learnt: from the beginning of it, or of
    each source by its share.

    Raises:
        DataError: If the tokenizer cannot be made, or the text not be read.
    """
    return text.tokenization.build(_sample(text) if text.tokenization.is_learnt else ())


def _sample(text: Text) -> Iterator[str]:
    collections = text.request(2).collections
    total = sum(collection.share for collection in collections)
    for collection in collections:
        yield from _beginning(collection.sources, text, SAMPLE * collection.share // total)


def _beginning(sources: Sequence[str], text: Text, most: int) -> Iterator[str]:
    """At most so many characters from the beginning of some sources, without the end that is held
    out of short ones."""
    pieces, size = list[str](), 0
    for piece in _pieces(sources, text.field):
        pieces.append(piece)
        size += len(piece)
        if size * FRACTION > most:
            break
    left = min(most, size if text.validation else int(FRACTION * size))
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
