"""Sources of text as documents: files of every common format, folders, globs, data sets.

`data.files` reads what stands on the disk, `data.formats` knows what records look like; both go
block by block or record by record, so that memory stays small however much there is.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from functools import partial
from importlib.resources import as_file, files
from itertools import count
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from fastweights.environment import require_package
from fastweights.errors import DataError
from fastweights.training.data.files import (
    COMPRESSED,
    KINDS,
    ROWS,
    Advance,
    Record,
    ignore,
    kind_of,
    read_json,
    read_parquet,
    read_table,
    read_text,
    without_missing,
)
from fastweights.training.data.formats import TextPiece, document_of, needed_columns
from fastweights.training.data.left_out import LeftOut, is_hidden
from fastweights.training.data.tokenizers import cut

BUNDLED = {"shakespeare": "tinyshakespeare.txt.gz"}
HUB = "hub:"
SAVED = ("dataset_info.json", "dataset_dict.json")
"""Either is in a folder that `datasets` saved."""
METADATA = (*SAVED, "dataset_infos.json", "state.json")
"""JSON files that tell of a data set and hold no text."""
Document = Iterator[TextPiece]
"""The pieces of a document, in order; it is finished before the next one is asked for."""


def read_documents(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerFast | None = None,
    field: str | None = None,
    advance: Advance = ignore,
) -> Iterator[Document]:
    """Yield the documents of `sources`, one after the other, in little memory.

    A text file is one document, however large; each record of other files is one. What is left
    out, such as hidden files of a folder and records without text, a `LeftOutWarning` counts.

    Args:
        sources: Files of text (.txt, and any ending that is not named here) or of records (.jsonl
            or .ndjson, .json, .csv, .tsv, .parquet), also compressed (.gz, .zst), folders, globs,
            the bundled "shakespeare", folders that `datasets` saved, or "hub:NAME",
            "hub:NAME:SPLIT" and "hub:NAME:CONFIGURATION:SPLIT" for a data set of the Hugging Face
            hub. A record has "text", or "instruction" and "output" (Alpaca), or "prompt" and
            "response", or "messages" of "role" and "content" (chat).
        tokenizer: Its chat template writes chats and instructions; without one, chats are ``role:
            content`` lines, and instructions have Alpaca's prompt.
        field: The column of the text (or of messages) in records; none means those named above.
        advance: Hears how many bytes of files have just been read, of `size_of` them.

    Raises:
        DataError: If a source cannot be read (the message names file and line), or there is no text
            at all.
    """
    full, left_out = 0, LeftOut()
    for source in sources:
        for document in _read_source(source, tokenizer, field, advance, left_out):
            full += 1
            yield iter(document)
    if not full:
        raise DataError(f"there is no text in {', '.join(sources)}{_but(left_out)}")
    left_out.warn("the text")


def size_of(sources: Sequence[str]) -> int | None:
    """Number of bytes that `read_documents` will read from files, as they are on the disk; None
    where that is not known, for data sets.

    Raises:
        DataError: If a source has no files.
    """
    if any(map(data_set_name, sources)):
        return None
    return sum(path.stat().st_size for source in sources for path in paths(source))


def data_set_name(source: str) -> str | None:
    """Return the name of a data set behind "hub:", or the folder that `datasets` saved; None of
    other sources."""
    if source.startswith(HUB):
        return source.removeprefix(HUB)
    return source if source.strip() and _is_saved(_expand(source)) else None


def paths(source: str) -> list[Path]:
    """List the files that a source names, in alphabetical order.

    Raises:
        DataError: If there are none.
    """
    if source in BUNDLED:
        with as_file(files("fastweights") / "data" / BUNDLED[source]) as path:
            return [path]
    if not source.strip():
        raise DataError("a source of text is empty; name a file, or . for the working folder")
    path = _expand(source)
    if path.is_file():
        return [path]
    left_out = LeftOut()
    texts = list(_find(path, left_out))
    if not texts:
        raise DataError(
            f"no text found at {source!r}{_but(left_out)}; give files, folders or globs of"
            f" {', '.join(KINDS)} (also {' and '.join(COMPRESSED)}), a data set as {HUB}NAME, or a"
            f" name: {', '.join(BUNDLED)}"
        )
    left_out.warn(source)
    return texts


def _but(left_out: LeftOut) -> str:
    return f" (left out: {left_out})" if left_out else ""


def _find(place: Path, left_out: LeftOut) -> Iterator[Path]:
    """The files of text in a folder, or that a glob finds, in order."""
    inside = place.is_dir()
    found = (
        place.rglob("*")
        if inside
        else map(Path, glob.glob(str(place), recursive=True, include_hidden=True))
    )
    named = [] if inside else [part for part in place.parts if is_hidden(part)]
    read = set[tuple[int, int]]()
    for path in sorted(found):
        parts = path.relative_to(place).parts if inside else path.parts
        entered = not path.is_symlink() and os.access(path, os.R_OK | os.X_OK)
        if path.is_dir() and (entered if inside else "**" in place.parts):
            continue
        hidden = any(
            is_hidden(part) and not any(fnmatch(part, one) for one in named) for part in parts
        )
        if reason := "hidden files" if hidden else _why_unread(path, read):
            left_out.add(reason, Path(*parts))
        else:
            read.add(_identity(path))
            yield path


def _why_unread(path: Path, read: Collection[tuple[int, int]]) -> str:
    """The reason for which something that is not hidden is left out, beside files that are read; ""
    of a file of text."""
    if path.is_dir():
        return "folders that are not entered"
    if not path.is_file():
        return "broken links and devices"
    if kind_of(path) not in KINDS or path.name in METADATA:
        return "files of other kinds"
    return "links to files that are read" if _identity(path) in read else ""


def _identity(path: Path) -> tuple[int, int]:
    """The same of every link to a file."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _expand(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise DataError(f"{source!r}: there is no such user; write the folder's path") from error


def _read_source(
    source: str,
    tokenizer: PreTrainedTokenizerFast | None,
    field: str | None,
    advance: Advance,
    left_out: LeftOut,
) -> Iterator[Iterable[TextPiece]]:
    for name, records in _record_sources(source, field, advance):
        if records is None:
            yield (TextPiece(piece, True) for piece in cut(read_text(Path(name), advance)))
            continue
        place = None
        for place, record in records:
            document = document_of(record, place, tokenizer, field)
            if any(piece.text for piece in document):
                yield document
            else:
                left_out.add("records without text", place)
        if place is None:
            left_out.add("files without records", name)


def _record_sources(
    source: str, field: str | None, advance: Advance
) -> Iterator[tuple[str, Iterator[Record] | None]]:
    """The files of a source, or the data set that it is, and their records; None of text."""
    if name := data_set_name(source):
        yield name, _data_set_records(name, field)
        return
    for path in paths(source):
        yield str(path), _file_records(path, field, advance)


def _file_records(path: Path, field: str | None, advance: Advance) -> Iterator[Record] | None:
    """None of a file of text."""
    match kind_of(path):
        case ".jsonl" | ".json":
            return read_json(path, advance)
        case ".csv" | ".tsv":
            return read_table(path, advance)
        case ".parquet":
            return read_parquet(path, advance, partial(needed_columns, field=field))
    return None


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _data_set_records(name: str, field: str | None) -> Iterator[Record]:
    try:
        found = _open_data_set(name)
        columns = needed_columns(found.column_names or (), field)
        chosen = found.select_columns(columns) if columns else found
        number = count(1)
        for batch in chosen.iter(ROWS):
            for values in zip(*batch.values(), strict=True):
                record = dict(zip(batch, values, strict=True))
                yield f"{name}, record {next(number)}", without_missing(record)
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"cannot read the data set {name}: {error}") from error


def _open_data_set(name: str) -> Any:
    """The data set ``NAME``, ``NAME:SPLIT`` or ``NAME:CONFIGURATION:SPLIT``."""
    require_package("datasets", f"{HUB}{name}", "or give the text as files")
    import datasets

    place, *choices = name.split(":")
    split = choices[-1] if choices else "train"
    configuration = choices[0] if len(choices) > 1 else None
    if not _is_saved(_expand(place)):
        return datasets.load_dataset(place, configuration, split=split, streaming=True)
    found = datasets.load_from_disk(str(_expand(place)))
    return found[split] if isinstance(found, datasets.DatasetDict) else found
