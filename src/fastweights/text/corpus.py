"""Text files to tokens on disk, and tokens to batches that are a function of (seed, step)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastweights.runs.errors import DataError
from fastweights.runs.files import atomic_folder
from fastweights.text.sources import read_documents
from fastweights.text.tokenizers import Bytes, Tokenization, encode


@dataclass(frozen=True)
class Text:
    """What to read, and how to cut it into tokens.

    Attributes:
        sources: as `text.sources.read_documents` takes them
        validation: sources of their own for validation; none means the last tenth of `sources`
        tokenization: how the tokenizer is made; only the training part is used for it
    """

    sources: tuple[str, ...] = ("shakespeare",)
    validation: tuple[str, ...] = ()
    tokenization: Tokenization = Bytes()


@dataclass(frozen=True)
class TextSize:
    """Of a text."""

    tokens: int
    bytes: int

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / self.bytes


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the tokens of the two parts, ``[n]`` uint16 or int32, with their sizes as
    UTF-8 text.
    """

    tokenizer: PreTrainedTokenizerFast
    train: np.ndarray
    validation: np.ndarray
    sizes: dict[str, TextSize]

    @property
    def tokens_per_byte(self) -> float:
        """Of the validation text; turns nats per token into nats per byte."""
        return self.sizes["validation"].tokens_per_byte

    def save(self, folder: Path) -> Corpus:
        """The same corpus, its tokens in files of `folder` that are mapped into memory."""
        with atomic_folder(folder) as new:
            self.tokenizer.save_pretrained(new)
            np.save(new / "train.npy", self.train)
            np.save(new / "validation.npy", self.validation)
            sizes = {part: asdict(size) for part, size in self.sizes.items()}
            (new / "corpus.json").write_text(json.dumps(sizes, indent=1))
        return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """The corpus that `Corpus.save` put into `folder`. Raises DataError if it is damaged."""
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
            f"{folder} is damaged ({error}); remove it and it will be made again"
        ) from error
    return Corpus(tokenizer, parts["train"], parts["validation"], sizes)


def read_corpus(text: Text) -> Corpus:
    """Read, split and tokenize. Raises DataError, which names the file, for text that cannot be
    used.
    """
    known = None if text.tokenization.is_learnt else text.tokenization.build(())
    texts = _texts(text.sources, known)
    parts = (texts, _texts(text.validation, known)) if text.validation else split(texts)
    tokenizer = text.tokenization.build(parts[0]) if known is None else known
    (train, train_size), (validation, size) = (_tokens(tokenizer, part) for part in parts)
    if len(validation) < 2:
        raise DataError(
            "the validation text has fewer than 2 tokens; give more text, or validation files"
        )
    return Corpus(tokenizer, train, validation, {"train": train_size, "validation": size})


def tokenize_sources(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerFast
) -> tuple[np.ndarray, TextSize]:
    """All text of `sources`, as `Text` has them, in tokens ``[n]``, and its size. Raises
    DataError.
    """
    return _tokens(tokenizer, _texts(sources, tokenizer))


def _tokens(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]
) -> tuple[np.ndarray, TextSize]:
    tokens = encode(tokenizer, documents)
    return tokens, TextSize(len(tokens), sum(len(document.encode()) for document in documents))


def split(documents: Sequence[str], fraction: float = 0.9) -> tuple[list[str], list[str]]:
    """The first `fraction` of all characters, and the rest; the document on the border is cut."""
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
    """Sequences of `length` tokens, each epoch a shuffled cover of the corpus with a shift of its
    own.

    Neighbours share one token, so that every token is once a target in an epoch.

    Attributes:
        tokens: ``[n]``, n ≥ length
    """

    tokens: np.ndarray
    length: int
    seed: int

    def __post_init__(self) -> None:
        if self.length < 2:
            raise DataError(
                f"length = {self.length}; a sequence needs two tokens to predict one from another"
            )
        if len(self.tokens) < self.length:
            raise DataError(
                f"the training text has {len(self.tokens)} tokens, fewer than one sequence of"
                f" {self.length}; add text or use a length of at most {len(self.tokens)}"
            )

    @property
    def epoch(self) -> int:
        """Sequences in an epoch."""
        return max(1, (len(self.tokens) - self.length + 1) // (self.length - 1))

    def batch(self, first: int, count: int) -> Tensor:
        """Sequences `first` … `first + count - 1` of the endless stream, ``[count length]``
        int64.
        """
        starts = [self._start(index) for index in range(first, first + count)]
        return _stack(self.tokens, starts, self.length)

    def _start(self, index: int) -> int:
        epoch, position = divmod(index, self.epoch)
        stride = self.length - 1
        shifts = min(stride, len(self.tokens) - self.length - (self.epoch - 1) * stride + 1)
        shift, order = _epoch_order(self.seed, epoch, self.epoch, shifts)
        return shift + stride * int(order[position])


def sequential_windows(tokens: np.ndarray, length: int, count: int) -> Iterator[Tensor]:
    """Batches ``[≤ count, ≤ length]`` int64 of contiguous sequences in which all tokens but the
    first are targets.
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


def _texts(sources: Sequence[str], tokenizer: PreTrainedTokenizerFast | None) -> list[str]:
    """Every document as one text; empty ones left out."""
    documents = read_documents(sources, tokenizer)
    texts = ["".join(piece.text for piece in document) for document in documents]
    return [text for text in texts if text]
