"""What a run reads, and the files that this comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from fastweights.text.packing import Framing
from fastweights.text.sources import BUNDLED, is_data_set, paths

TRAIN, VALIDATION = "train", "validation"
"""Names of the texts that a run stores, and of its parts."""
Sources = tuple[Mapping[str, Any], ...]
"""What texts are read from: path, bytes and time of modification of each file, or a name."""


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
    """

    sources: tuple[str, ...]
    validation: tuple[str, ...]
    field: str | None
    held_out: int
    length: int
    framing: Callable[[PreTrainedTokenizerFast], Framing]

    @property
    def names(self) -> set[str]:
        """Names of the texts that are stored."""
        return {TRAIN, VALIDATION} if self.validation else {TRAIN}

    def texts(self, run: Path) -> Mapping[str, list[str]]:
        """Return the sources of each text that is stored, file by file.

        Args:
            run: The run's own folder, whose files are no text.

        Raises:
            DataError: If a source has no files.
        """
        named = {TRAIN: self.sources} | ({VALIDATION: self.validation} if self.validation else {})
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
