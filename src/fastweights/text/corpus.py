"""Text files to tokens on disk, and tokens to batches that are a function of (seed, step)."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fastweights.runs.errors import DataError
from fastweights.runs.files import atomic_folder
from fastweights.text.tokenizers import Bytes, Tokenization, encode

BUNDLED = {"shakespeare": "tinyshakespeare.txt.gz"}
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Text:
    """What to read, and how to cut it into tokens.

    Attributes:
        sources: files (.txt, .jsonl with a field "text", either of them .gz), folders, globs,
            or "shakespeare"
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
    documents = _documents(text.sources)
    parts = (documents, _documents(text.validation)) if text.validation else split(documents)
    tokenizer = text.tokenization.build(parts[0])
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
    return _tokens(tokenizer, _documents(sources))


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


def _documents(sources: Sequence[str]) -> list[str]:
    documents = [
        document for source in sources for path in paths(source) for document in _read(path)
    ]
    if not any(documents):
        raise DataError(f"there is no text in {', '.join(sources)}")
    return [document for document in documents if document]


def paths(source: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files that a source names, in alphabetical order. Raises DataError if there are none."""
    if source in BUNDLED:
        with as_file(files("fastweights") / "data" / BUNDLED[source]) as path:
            return [path]
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
    texts = sorted(p for p in found if p.is_file() and p.name.endswith(suffixes))
    if not texts:
        kinds, names = ", ".join(suffixes), ", ".join(BUNDLED)
        raise DataError(
            f"no text found at {source!r}; give files, folders or globs of {kinds}, or a name:"
            f" {names}"
        )
    return texts


def _read(path: Path) -> list[str]:
    """The documents of one file."""
    text = contents(path)
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        return [
            _field(path, number, line)
            for number, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    return [text]


def contents(path: Path) -> str:
    """The text of a file, which may be packed. Raises DataError, which names it, if it has none."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {error.start}; convert it (iconv -t utf-8)"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not text.strip():
        raise DataError(f"{path} is empty; leave it out")
    return text


def _field(path: Path, number: int, line: str) -> str:
    try:
        document = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f'{path}, line {number}, is not a JSON object with a field "text"'
        ) from error
    if not isinstance(document, str):
        raise DataError(
            f'{path}, line {number}: "text" is a {type(document).__name__}, not a string'
        )
    return document
