"""Text files to tokens on disk, and tokens to batches that are a function of seed and step."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import tee
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastweights.runs.errors import DataError
from fastweights.runs.files import atomic_folder
from fastweights.text.sources import Document, read_documents
from fastweights.text.tokenizers import (
    Bytes,
    Tokenization,
    count_bytes,
    encode,
    encode_texts,
    tokens_between,
)


@dataclass(frozen=True)
class Text:
    """The text to read, and how to cut it into tokens.

    Attributes:
        sources: Files, folders or data sets, as `text.sources.read_documents` takes them.
        validation: Separate sources for validation; none means the last tenth of `sources`.
        tokenization: How the tokenizer is made; only the training text is used for it.
        boundaries: Whether a token sees only its own document among those packed into its sequence.
        field: The column of the text in records; none means those that `read_documents` names.
    """

    sources: tuple[str, ...] = ("shakespeare",)
    validation: tuple[str, ...] = ()
    tokenization: Tokenization = Bytes()
    boundaries: bool = True
    field: str | None = None


@dataclass(frozen=True)
class TextSize:
    """The size of a text in tokens and in bytes."""

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
        train: ``[n]`` uint16 or int32.
        validation: ``[n]`` uint16 or int32.
        sizes: Tokens and UTF-8 bytes of the two parts.
    """

    tokenizer: PreTrainedTokenizerFast
    train: np.ndarray
    validation: np.ndarray
    sizes: dict[str, TextSize]

    @property
    def tokens_per_byte(self) -> float:
        """Tokens per byte of the validation text; turns nats per token into nats per byte."""
        return self.sizes["validation"].tokens_per_byte

    def save(self, folder: Path) -> Corpus:
        """Write to files in `folder`, and return the same corpus with its tokens mapped into
        memory."""
        with atomic_folder(folder) as new:
            self.tokenizer.save_pretrained(new)
            np.save(new / "train.npy", self.train)
            np.save(new / "validation.npy", self.validation)
            sizes = {part: asdict(size) for part, size in self.sizes.items()}
            (new / "corpus.json").write_text(json.dumps(sizes, indent=1))
        return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """Read the corpus that `Corpus.save` wrote to `folder`.

    Raises:
        DataError: If it is damaged.
    """
    try:
        parts = {
            part: np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "validation")
        }
        sizes = {
            part: TextSize(**size)
            for part, size in json.loads((folder / "corpus.json").read_text()).items()
        }
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise DataError(
            f"{folder} is damaged ({error}); remove it, and the next run will make it again"
        ) from error
    return Corpus(tokenizer, parts["train"], parts["validation"], sizes)


def read_corpus(text: Text) -> Corpus:
    """Read, split and tokenize a text.

    Raises:
        DataError: If a file cannot be used (the message names it), or the text is too short.
    """
    known = None if text.tokenization.is_learnt else text.tokenization.build(())
    texts = _texts(text.sources, known, text.field)
    parts = (texts, _texts(text.validation, known, text.field)) if text.validation else split(texts)
    tokenizer = text.tokenization.build(parts[0]) if known is None else known
    (train, train_size), (validation, size) = (_tokens(tokenizer, part) for part in parts)
    if len(validation) < 2:
        raise DataError(
            "the validation text has fewer than 2 tokens; give more text, or validation files"
        )
    return Corpus(tokenizer, train, validation, {"train": train_size, "validation": size})


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
    left = sys.maxsize if most is None else most
    found, size = list[np.ndarray](), 0
    for tokens, text in _encode(tokenizer, read_documents(sources, tokenizer, field)):
        found.append(tokens[:left])
        size += count_bytes(tokenizer, text, len(tokens), left)
        left -= len(tokens)
        if left <= 0:
            break
    tokens = np.concatenate(found)
    return tokens, TextSize(len(tokens), size)


def _encode(
    tokenizer: PreTrainedTokenizerFast, documents: Iterator[Document]
) -> Iterator[tuple[np.ndarray, str]]:
    """Each piece of text as tokens, and the text; between documents tokens that stand for none."""
    for number, document in enumerate(documents):
        if number:
            yield tokens_between(tokenizer), ""
        texts, again = tee(piece.text for piece in document)
        yield from zip(encode_texts(tokenizer, texts), again, strict=True)


def _tokens(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]
) -> tuple[np.ndarray, TextSize]:
    tokens = encode(tokenizer, documents)
    return tokens, TextSize(len(tokens), sum(len(document.encode()) for document in documents))


def split(documents: Sequence[str], fraction: float = 0.9) -> tuple[list[str], list[str]]:
    """Split documents into the first `fraction` of all characters, and the rest.

    The document on the border is cut.
    """
    left = int(fraction * sum(map(len, documents)))
    parts: tuple[list[str], list[str]] = ([], [])
    for document in documents:
        for part, piece in zip(parts, (document[:left], document[left:]), strict=True):
            part.extend([piece] if piece else [])
        left = max(0, left - len(document))
    if not all(parts):
        raise DataError(
            f"{sum(map(len, documents))} characters are too few to split into training and"
            " validation"
        )
    return parts


@dataclass(frozen=True)
class Windows:
    """Sequences of `length` tokens; each epoch is a shuffled cover of the corpus with its own
    offset.

    Neighbours share one token, so that every token is a target once in an epoch.

    Attributes:
        tokens: ``[n]``, n ≥ length.
        length: Tokens per sequence.
        seed: Seed of order and offsets.

    Raises:
        DataError: If `length` is below 2, or there are fewer tokens than one sequence needs.
    """

    tokens: np.ndarray
    length: int
    seed: int

    def __post_init__(self) -> None:
        if self.length < 2:
            raise DataError(
                f"length = {self.length}; take at least 2, since one token predicts the next"
            )
        if len(self.tokens) < self.length:
            raise DataError(
                f"the training text has {len(self.tokens)} tokens, fewer than one sequence of"
                f" {self.length}; add text or use a length of at most {len(self.tokens)}"
            )

    @property
    def epoch(self) -> int:
        """Number of sequences in an epoch."""
        return max(1, (len(self.tokens) - self.length + 1) // (self.length - 1))

    def batch(self, first: int, count: int) -> Tensor:
        """Return sequences `first` … `first + count - 1` of the endless stream, ``[count length]``
        int64."""
        starts = [self._start(index) for index in range(first, first + count)]
        return _stack(self.tokens, starts, self.length)

    def _start(self, index: int) -> int:
        epoch, position = divmod(index, self.epoch)
        stride = self.length - 1
        shifts = min(stride, len(self.tokens) - self.length - (self.epoch - 1) * stride + 1)
        shift, order = _epoch_order(self.seed, epoch, self.epoch, shifts)
        return shift + stride * int(order[position])


def sequential_windows(tokens: np.ndarray, length: int, count: int) -> Iterator[Tensor]:
    """Yield batches ``[≤ count, ≤ length]`` int64 of contiguous sequences.

    All tokens but the first are targets once.
    """
    stride = length - 1
    full = (len(tokens) - 1) // stride
    starts = [stride * i for i in range(full)]
    for first in range(0, full, count):
        yield _stack(tokens, starts[first : first + count], length)
    if full * stride < len(tokens) - 1:
        yield _stack(tokens, [full * stride], len(tokens) - full * stride)


def _stack(tokens: np.ndarray, starts: Sequence[int], length: int) -> Tensor:
    return torch.from_numpy(np.stack([tokens[s : s + length] for s in starts]).astype(np.int64))


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, count: int, shifts: int) -> tuple[int, np.ndarray]:
    """The shift of an epoch, and the order of its sequences."""
    generator = np.random.default_rng([seed, epoch])
    return int(generator.integers(shifts)), generator.permutation(count)


def _texts(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerFast | None, field: str | None
) -> list[str]:
    """Every document as one text; empty ones left out."""
    documents = read_documents(sources, tokenizer, field)
    texts = ["".join(piece.text for piece in document) for document in documents]
    return [text for text in texts if text]
