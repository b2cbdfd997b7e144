"""What a run reads, and the files that this comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from fastweights.runs.errors import DataError
from fastweights.text.packing import Framing
from fastweights.text.shares import Shares, name_sources
from fastweights.text.sources import BUNDLED, is_data_set, paths

TRAIN, VALIDATION = "train", "validation"
"""Names of the texts that a run stores, and of its parts; those of a mixture are numbered."""
FEWEST = 16
"""Sequences that a block has at least."""
LARGEST = 1 << 31
"""Most tokens of a block."""
Sources = tuple[Mapping[str, Any], ...]
"""What texts are read from: path, bytes and time of modification of each file, or a name."""


@dataclass(frozen=True)
class StoredCollection:
    """One of the sources of a mixture, or all sources of a text, and where a run stores it.

    Attributes:
        name: What the source is called in metrics; empty if there is no other.
        sources: What is read.
        share: Its share of training, in whole numbers beside those of the others.
        text: Name of its text, which is stored in a folder of that name.
        held: Name of the part that is validated on.
        held_out: Most tokens of that part.
    """

    name: str
    sources: tuple[str, ...]
    share: int
    text: str
    held: str
    held_out: int


@dataclass(frozen=True)
class TextRequest:
    """What a run reads, and how it stands on disk.

    Attributes:
        sources: The sources of the text.
        validation: Separate sources to validate on; none to hold out a part of `sources`.
        field: The column of the text in records; None for those of every format.
        held_out: Most tokens to validate on.
        length: Tokens per sequence.
        framing: What stands around the documents, by the tokenizer.
        weights: The share of training of each of `sources`; none if they are one text.
        stream: Tokens of a block, in whose order the text is trained on while it is being
            tokenized; None to tokenize all of it before.

    Raises:
        DataError: If there is not one weight for each source, or a block is too small or too large.
        TrainingError: If a weight is not above 0 and finite.
    """

    sources: tuple[str, ...]
    validation: tuple[str, ...]
    field: str | None
    held_out: int
    length: int
    framing: Callable[[PreTrainedTokenizerFast], Framing]
    weights: tuple[float, ...] = ()
    stream: int | None = None

    def __post_init__(self) -> None:
        _ = self.collections
        if self.stream is not None and not FEWEST * self.length <= self.stream <= LARGEST:
            raise DataError(
                f"stream = {self.stream:,} tokens of a block; take {FEWEST * self.length:,}"
                f" ({FEWEST} sequences of {self.length:,}) to {LARGEST:,}"
            )

    @cached_property
    def collections(self) -> tuple[StoredCollection, ...]:
        """The sources of the mixture, or all of them as one."""
        if not self.weights:
            return (StoredCollection("", self.sources, 1, TRAIN, VALIDATION, self.held_out),)
        if len(self.weights) != len(self.sources):
            raise DataError(
                f"{len(self.weights)} weights for {len(self.sources)} sources; give one for each (a"
                " shell makes many sources of a pattern that is not quoted: write 'web/*.jsonl', or"
                " name the folder)"
            )
        return tuple(self._mix(Shares.of(self.weights)))

    def _mix(self, shares: Shares) -> Iterator[StoredCollection]:
        names = name_sources(self.sources)
        for number, (name, source) in enumerate(zip(names, self.sources, strict=True)):
            text, count = f"{TRAIN}-{number}", shares.counts[number]
            held, most = f"{VALIDATION}-{number}", self.held_out * count // shares.period
            if self.validation:
                held, most = VALIDATION, self.held_out
            yield StoredCollection(name, (source,), count, text, held, max(2, most))

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


def describe(texts: Mapping[str, list[str]]) -> Sources:
    """Describe every file of some texts as it is now."""
    return tuple(one for files in texts.values() for file in files for one in _describe(file))


def read_alike(stored: Sources, now: Sources) -> bool:
    """Whether two descriptions are of the same files, wherever they lie."""
    return list(map(_without_folder, stored)) == list(map(_without_folder, now))


def _files_of(source: str, own: Path) -> list[str]:
    """A data set is one, whatever files it has."""
    if source in BUNDLED or is_data_set(source):
        return [source]
    return [str(path) for path in paths(source) if not path.resolve().is_relative_to(own)]


def _describe(file: str) -> Sources:
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
