"""What a run reads, and the files that this comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from transformers import PreTrainedTokenizerFast

from fastweights.errors import DataError
from fastweights.ranges import POSITIVE_NUMBER, SEQUENCE_LENGTH
from fastweights.training.data.packing import Framing
from fastweights.training.data.sources import BUNDLED, data_set_name, paths

TRAIN, VALIDATION = "train", "validation"
"""Names of the texts that a run stores; those of a mixture are numbered."""
FEWEST = 16
"""Sequences that a block has at least."""
LARGEST = 1 << 31
"""Most tokens of a block."""
StoredSources = tuple[Mapping[str, Any], ...]
"""What texts are read from: path, bytes and time of modification of each file, or a name."""
_PATTERN = "*?["


@dataclass(frozen=True)
class StoredCollection:
    """One of the sources of a mixture, or all sources of a text, and where a run stores it.

    Attributes:
        name: What the source is called in metrics; empty if there is no other.
        sources: What is read.
        weight: Its share of training, beside the weights of the others.
        text: Name of its text, which is stored in a folder of that name.
        held_out: Most tokens to validate on.
    """

    name: str
    sources: tuple[str, ...]
    weight: float
    text: str
    held_out: int


@dataclass(frozen=True)
class Sources(ABC):
    """The sources of a text, and what of them is held out: of a training and of a conversion.

    Attributes:
        sources: Files, folders or data sets, as `data.sources.read_documents` takes them.
        validation: Separate sources for validation; none means that a part of `sources` is held
            out, as `data.holdout.hold_out` does.
        boundaries: Whether a token sees only its own document among those packed into its sequence.
        field: The column of the text in records; none means those that `read_documents` names.
        held_out: Most tokens to validate on.
        weights: The share of training of each source, in any unit; none if they are one text.
        stream: Tokens of the blocks in whose order a text is trained on while it is being
            tokenized; None to tokenize all of it before.
        template: The chat template that writes chats and instructions, and that the tokenizer has
            from then on; empty for none, None for the tokenizer's own.

    Raises:
        DataError: If there is no source, or not one weight for each.
        TrainingError: If a number lies outside of its range.
    """

    sources: tuple[str, ...]
    validation: tuple[str, ...] = ()
    _: KW_ONLY
    boundaries: bool = True
    field: str | None = None
    held_out: int = 1 << 16
    weights: tuple[float, ...] = ()
    stream: int | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("there is no text to train on; give at least one source")
        SEQUENCE_LENGTH.require(held_out=self.held_out)
        _ = self.collections

    @abstractmethod
    def framing(self, tokenizer: PreTrainedTokenizerFast) -> Framing:
        """Return what stands around the documents."""

    def set_template(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
        """Give a tokenizer the chat template that is asked for."""
        if self.template is not None:
            tokenizer.chat_template = self.template or None
        return tokenizer

    def require_blocks(self, length: int) -> None:
        """Raise DataError if a block is too small for sequences of so many tokens, or too large."""
        if self.stream is not None and not FEWEST * length <= self.stream <= LARGEST:
            raise DataError(
                f"stream = {self.stream:,} tokens of a block; take {FEWEST * length:,}"
                f" ({FEWEST} sequences of {length:,}) to {LARGEST:,}"
            )

    @cached_property
    def collections(self) -> tuple[StoredCollection, ...]:
        """The sources of the mixture, or all of them as one."""
        if not self.weights:
            return (StoredCollection("", self.sources, 1, TRAIN, self.held_out),)
        if len(self.weights) != len(self.sources):
            raise DataError(
                f"{len(self.weights)} weights for {len(self.sources)} sources; give one for each (a"
                " shell makes many sources of a pattern that is not quoted: write 'web/*.jsonl', or"
                " name the folder)"
            )
        return tuple(self._mix())

    def _mix(self) -> Iterator[StoredCollection]:
        POSITIVE_NUMBER.require(**{f"weights[{n}]": x for n, x in enumerate(self.weights)})
        named = zip(name_sources(self.sources), self.sources, self.weights, strict=True)
        for number, (name, source, weight) in enumerate(named):
            most = int(self.held_out * weight / sum(self.weights))
            most = self.held_out if self.validation else max(2, most)
            yield StoredCollection(name, (source,), weight, f"{TRAIN}-{number}", most)

    @property
    def names(self) -> set[str]:
        """Names of the texts that are stored."""
        apart = {VALIDATION} if self.validation else set[str]()
        return {collection.text for collection in self.collections} | apart

    def texts(self, run: Path) -> Mapping[str, list[str]]:
        """Return the sources of each text that is stored, file by file.

        Args:
            run: The run's own folder, whose files are no text.

        Raises:
            DataError: If a source has no files.
        """
        named = {collection.text: collection.sources for collection in self.collections}
        named |= {VALIDATION: self.validation} if self.validation else {}
        own = run.resolve()
        return {
            text: [file for source in sources for file in _files_of(source, own)]
            for text, sources in named.items()
        }


def name_sources(sources: Sequence[str]) -> tuple[str, ...]:
    """Name each source of a mixture after its file or folder; names that come again are
    numbered."""
    names = list[str]()
    for source in sources:
        name = _name(source)
        same = sum(other == name or other.rpartition("-")[0] == name for other in names)
        names.append(f"{name}-{same + 1}" if same else name)
    return tuple(names)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of a source before what is wrong with it; "" names nothing."""
    try:
        yield
    except DataError as error:
        if not name:
            raise
        raise DataError(f"{name}: {error}") from error


def describe(texts: Mapping[str, list[str]]) -> StoredSources:
    """Describe every file of some texts as it is now."""
    return tuple(one for files in texts.values() for file in files for one in _describe(file))


def read_alike(stored: StoredSources, now: StoredSources) -> bool:
    """Whether two descriptions are of the same files, wherever they lie."""
    return list(map(_without_folder, stored)) == list(map(_without_folder, now))


def _name(source: str) -> str:
    parts = PurePath(source.removeprefix("hub:")).parts
    plain = [part for part in parts if not any(letter in part for letter in _PATTERN)]
    return (plain[-1].split(".")[0] if plain else "") or "text"


def _files_of(source: str, own: Path) -> list[str]:
    """A data set is one, whatever files it has."""
    if source in BUNDLED or data_set_name(source):
        return [source]
    return [str(path) for path in paths(source) if not path.resolve().is_relative_to(own)]


def _describe(file: str) -> StoredSources:
    if file in BUNDLED:
        return ({"source": file},)
    found = [Path(file)] if Path(file).is_file() else sorted(Path(file).glob("**/*.arrow"))
    return tuple(
        {"path": str(path), "bytes": there.st_size, "modified": there.st_mtime_ns}
        for path in found
        for there in [path.stat()]
    ) or ({"source": file},)


def _without_folder(source: Mapping[str, Any]) -> dict[str, Any]:
    return {**source, "path": Path(source["path"]).name} if "path" in source else dict(source)
