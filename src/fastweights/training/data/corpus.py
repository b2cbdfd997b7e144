"""A text to train on, read into memory; `data.folder` keeps one of any size on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from fastweights.errors import DataError
from fastweights.training.data.blocks import BlockedText, Blockwise
from fastweights.training.data.documents import Batches, Mixture, Stream
from fastweights.training.data.holdout import FRACTION, all_of, hold_out, measure, thin_out
from fastweights.training.data.packing import (
    EncodedPart,
    Framing,
    encode_documents,
    framing_between,
    framing_of_stream,
    gather,
)
from fastweights.training.data.request import TRAIN, VALIDATION, Sources, naming
from fastweights.training.data.sources import read_documents
from fastweights.training.data.tokenizers import SAMPLE, Bytes, Tokenization
from fastweights.training.data.tokens import Joined, Ranges, TokenText, WholeText
from fastweights.training.loop.seeds import random_seed_from


@dataclass(frozen=True)
class Text(Sources):
    """The text of a training: its sources, and how it is cut into tokens.

    Attributes:
        tokenization: How the tokenizer is made. One that is learnt is learnt from the beginning of
            the training text; of a text without validation sources that is short, from nine tenths
            of it.
    """

    sources: tuple[str, ...] = ("shakespeare",)
    tokenization: Tokenization = Bytes()
    _: KW_ONLY
    held_out: int = 1 << 17

    def framing(self, tokenizer: PreTrainedTokenizerFast) -> Framing:
        """Return what stands between documents: one stream of them."""
        return framing_of_stream(tokenizer)


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
        weight: Its share of training, beside the weights of the others.
        text: The text.
    """

    name: str
    weight: float
    text: TokenText | BlockedText

    def batches(self, length: int, seed: int) -> Batches:
        """Return its sequences in an endless order.

        Raises:
            DataError: If it is shorter than one sequence.
        """
        text = self.text
        written = isinstance(text, BlockedText)
        stream = Blockwise(text, length, seed) if written else Stream(text, length, seed)
        with naming(self.name):
            stream.span(0)
        return stream


@dataclass(frozen=True)
class HeldOut:
    """What is held out of one source of a mixture.

    Attributes:
        name: What the source is called.
        weight: Its share of training, beside the weights of the others.
        text: The text.
        size: Its tokens and bytes.
    """

    name: str
    weight: float
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
            stream.span(0)
            return stream
        streams = tuple(
            source.batches(length, random_seed_from(seed, number))
            for number, source in enumerate(self.sources)
        )
        weights = tuple(source.weight for source in self.sources)
        return Mixture(streams, weights, seed, responses, boundaries)

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
        total = sum(part.weight * numbers[part.name] for part in self.held_out)
        return total / sum(part.weight for part in self.held_out)


def read_corpus(text: Text) -> Corpus:
    """Read, tokenize and split a text that fits in memory.

    Raises:
        DataError: If a file cannot be used (the message names it), or the text is too short.
    """
    if text.stream is not None:
        raise DataError("a text in memory is there as a whole; leave stream out")
    tokenizer = build_tokenizer(text)
    framing = text.framing(tokenizer)
    validation = None
    if text.validation:
        validation, _ = _read_whole(text.validation, tokenizer, framing, text.field)
    found = dict[str, Corpus]()
    for collection in text.collections:
        whole, size = _read_whole(collection.sources, tokenizer, framing, text.field)
        with naming(collection.name):
            found[collection.text] = split_corpus(
                tokenizer, whole, size, validation, collection.held_out, text.held_out
            )
    return mix(text, found)


def mix(text: Sources, found: Mapping[str, Corpus]) -> Corpus:
    """Put the collections of a text together.

    Args:
        text: The text.
        found: Each of its collections, divided, by the name under which it is stored.
    """
    corpora = [found[collection.text] for collection in text.collections]
    if not text.weights:
        return corpora[0]
    parts = corpora[:1] if text.validation else corpora
    named = list(zip(text.collections, corpora, strict=True))
    # a text that is still being written stands in its corpus as its source
    sources = (
        Source(c.name, c.weight, own.sources[0].text if own.sources else own.train)
        for c, own in named
    )
    held_out = (
        HeldOut(c.name, c.weight, own.validation, own.sizes[VALIDATION]) for c, own in named
    )
    return Corpus(
        corpora[0].tokenizer,
        Joined(tuple(corpus.train for corpus in corpora)),
        Joined(tuple(corpus.validation for corpus in parts)),
        {
            TRAIN: _sum(corpus.sizes[TRAIN] for corpus in corpora),
            VALIDATION: _sum(corpus.sizes[VALIDATION] for corpus in parts),
        },
        tuple(sources),
        () if text.validation else tuple(held_out),
    )


def _sum(sizes: Iterable[TextSize]) -> TextSize:
    known = list(sizes)
    return TextSize(sum(one.tokens for one in known), sum(one.bytes for one in known))


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
        sources: Files, folders or data sets, as `data.sources.read_documents` takes them.
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
    sample = _sample(text) if text.tokenization.is_learnt else ()
    return text.set_template(text.tokenization.build(sample))


def _sample(text: Text) -> Iterator[str]:
    total = sum(collection.weight for collection in text.collections)
    for collection in text.collections:
        yield from _beginning(collection.sources, text, int(SAMPLE * collection.weight / total))


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


def _take_parts(parts: Iterator[EncodedPart], most: int | None) -> Iterator[EncodedPart]:
    """Parts until there are so many tokens."""
    size = 0
    for part in parts:
        yield part
        size += sum(len(run.tokens) for run in part.runs)
        if most is not None and size >= most:
            return
