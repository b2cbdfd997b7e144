"""Files of text and of records, read a block or a record at a time, whatever their size."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from fastweights.environment import require_package
from fastweights.errors import DataError
from fastweights.training.data.signatures import (
    convert,
    explain_bytes,
    find_signature,
    guess_wide_encoding,
)

COMPRESSED = (".gz", ".zst")
KINDS = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Endings of the files that a folder or a glob is searched for; any of them may be compressed."""
_SAME = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}
BLOCK = 1 << 20
"""Bytes that are read at once."""
RECORD = 1 << 28
"""Most characters of a record."""
ROWS = 64
"""Rows of a Parquet file or a data set that are read at once."""
Record = tuple[str, Any]
"""Where a record stands, for messages, and its value."""
Advance = Callable[[int], object]
"""Hears how many bytes of files have just been read."""
_SHORTER = "cut it, or give long texts as .txt files"
_BETWEEN = re.compile(r"[\s,]*")
_CUT = 16  # characters before its end within which a parser stops at a value that is cut off


def kind_of(path: Path) -> str:
    """The ending that says what a file holds, one of `KINDS` if it is known, whatever its case."""
    ending = path.suffix.lower()
    if ending in COMPRESSED:
        ending = path.with_suffix("").suffix.lower()
    return _SAME.get(ending, ending)


def read_text(path: Path, advance: Advance) -> Iterator[str]:
    """Yield the text of a file, which may be compressed, in blocks; a byte order mark is dropped.

    Raises:
        DataError: If the file has no readable text; the message names it.
    """
    blank = True
    for text in _blocks(path, advance):
        blank = blank and not text.replace("\0", "").strip()  # zeros are what a disk has lost
        yield text
    if blank:
        raise DataError(f"{path} is empty; leave it out")


def read_whole(path: Path) -> str:
    """Read a small file of text, as `read_text` does; it may be empty.

    Raises:
        DataError: If the file cannot be read; the message names it.
    """
    return "".join(_blocks(path, ignore))


def _blocks(path: Path, advance: Advance) -> Iterator[str]:
    try:
        with _open(path, advance) as file:
            yield from _decode(path, file)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def ignore(_: int) -> None:
    """Hear how many bytes have been read, and do nothing."""


class _Watched(io.FileIO):
    """A file that tells how much of it is read."""

    def __init__(self, path: Path, advance: Advance) -> None:
        super().__init__(path)
        self._advance = advance

    def readinto(self, buffer: Any, /) -> int:
        read = super().readinto(buffer)
        self._advance(read)
        return read


@contextmanager
def _open(path: Path, advance: Advance) -> Iterator[Any]:
    with io.BufferedReader(_Watched(path, advance), BLOCK) as file, _unpack(path, file) as unpacked:
        yield unpacked


def _unpack(path: Path, file: io.BufferedReader[Any]) -> Any:
    match path.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=file)
        case ".zst":
            require_package("pyarrow", f"{path} (Zstandard)", "or decompress it (zstd -d)")
            import pyarrow

            return pyarrow.CompressedInputStream(file, "zstd")
    return file


def _decode(path: Path, file: Any) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    decoded, begun = 0, False
    while block := file.read(BLOCK):
        if not decoded and (found := find_signature(block)):
            raise DataError(f"{path} {found}")
        if text := _decode_block(path, decoder, block, decoded):
            yield text if begun else text.removeprefix("\N{BYTE ORDER MARK}")
            begun = True
        decoded += len(block)
    _decode_block(path, decoder, b"", decoded)


def _decode_block(
    path: Path, decoder: codecs.IncrementalDecoder, block: bytes, decoded: int
) -> str:
    begun = len(decoder.getstate()[0])
    try:
        text = decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {decoded - begun + error.start};"
            f" {explain_bytes(error.object, error.start)}"
        ) from error
    if wide := guess_wide_encoding(block):
        raise DataError(f"{path} seems to be {wide.upper()}; {convert(wide)}")
    return text


def read_json(path: Path, advance: Advance) -> Iterator[Record]:
    """Yield the records of JSON arrays, which may follow each other, and then of one JSON value per
    line."""
    text, numbers = _JsonText(read_text(path, advance)), count(1)
    while text.peek() == "[":
        text.at += 1
        while text.peek() != "]":
            place = f"{path}, record {next(numbers)}"
            yield place, _parse_next(text, place)
        text.at += 1
    yield from _line_records(path, text)


class _JsonText:
    """Text that comes in blocks, from where it has been parsed to.

    Attributes:
        text: Some of it.
        at: Where in `text` to go on.
        line: Number of the line in which `text` begins.
        blocks: What follows `text`.
    """

    def __init__(self, blocks: Iterator[str]) -> None:
        self.text, self.at, self.line, self.blocks = "", 0, 1, blocks

    def more(self) -> bool:
        """Read on, as much as is left of `text` at least; whether there was more."""
        more = "".join(islice(self.blocks, max(1, (len(self.text) - self.at) // BLOCK)))
        self.line += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at :] + more, 0
        return bool(more)

    def peek(self) -> str:
        """Go to the next character that is neither space nor comma, and return it; "" at the
        end."""
        while True:
            self.at = _BETWEEN.match(self.text, self.at).end()  # pyrefly: ignore[missing-attribute]
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]


def _parse_next(text: _JsonText, place: str) -> Any:
    while True:
        try:
            value, text.at = _JSON.raw_decode(text.text, text.at)
            return value
        except (ValueError, RecursionError) as error:
            if len(text.text) - text.at > RECORD:
                raise DataError(
                    f"{place}, has more than {RECORD:,} characters; {_SHORTER}"
                ) from error
            if not _is_cut(error) or not text.more():
                raise _no_json(place, error) from error


def _is_cut(error: Exception) -> bool:
    """Whether a value may only lack its end."""
    if not isinstance(error, JSONDecodeError):
        return False
    near_end = error.pos > len(error.doc) - _CUT
    return near_end or error.msg.startswith("Unterminated string")


def _line_records(path: Path, text: _JsonText) -> Iterator[Record]:
    first = text.line + text.text.count("\n", 0, text.at)
    lines = _lines(path, chain((text.text[text.at :],), text.blocks))
    for number, line in enumerate(lines, first):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _parse(line, place)


def _parse(line: str, place: str) -> Any:
    try:
        return _JSON.decode(line)
    except (ValueError, RecursionError) as error:
        raise _no_json(place, error) from error


def _no_json(place: str, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return DataError(f"{place}, {error}")
    return DataError(f"{place}, is neither a JSON array nor one JSON object per line: {error}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object that has every name once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DataError(_repeated([name for name, _ in pairs]))
    return found


def _repeated(names: Sequence[str]) -> str:
    """What is wrong with names of which one is there several times; "" if none is."""
    name, times = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    return f"has {name!r} {times} times, of which one would be read" if times > 1 else ""


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def _lines(path: Path, blocks: Iterable[str]) -> Iterator[str]:
    begun: list[str] = []
    for block in blocks:
        first, *others = block.split("\n")
        begun.append(first)
        if others:
            yield "".join(begun)
            yield from others[:-1]
            begun = others[-1:]
        if sum(map(len, begun)) > RECORD:
            raise DataError(f"{path} has a line of more than {RECORD:,} characters; {_SHORTER}")
    yield "".join(begun)


def read_table(path: Path, advance: Advance) -> Iterator[Record]:
    """Yield the rows of comma-separated values, or tab-separated ones (.tsv), by the names that
    the first row gives their columns.
    """
    csv.field_size_limit(RECORD)
    dialect = csv.excel_tab if kind_of(path) == ".tsv" else csv.excel
    lines = (f"{line}\n" for line in _lines(path, read_text(path, advance)))
    rows = csv.DictReader(lines, dialect=dialect, strict=True)
    try:
        names = rows.fieldnames or ()
        _check_columns(path, names, dialect.delimiter)
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            beyond = row.get(None, ())
            if any(beyond):
                raise DataError(
                    f"{place}, has {len(names) + len(beyond)} values in {len(names)} columns; a"
                    f" value with {dialect.delimiter!r} in it needs quotes around it"
                )
            yield place, row
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.reader.line_num}: {_explain_csv(error)}") from error


def _check_columns(path: Path, names: Sequence[str], delimiter: str) -> None:
    others = [other for other in ";\t|," if other != delimiter and other in "".join(names)]
    if len(names) == 1 and others:
        raise DataError(
            f"{path} has one column, {names[0]!r}; write {delimiter!r} between its columns in place"
            f" of {others[0]!r}"
        )
    if repeated := _repeated(names):
        raise DataError(f"{path} {repeated}")


def _explain_csv(error: csv.Error) -> str:
    if str(error).startswith("new-line character"):
        return "a line ends in \\r alone, as on old Macs; convert the file (tr '\\r' '\\n')"
    return str(error)


def without_missing(record: dict[str, Any]) -> dict[str, Any]:
    """A row of a table, in which objects have None for every field that others like them have."""
    return {name: _without_none(value) for name, value in record.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def read_parquet(
    path: Path, advance: Advance, choose: Callable[[Collection[str]], list[str]]
) -> Iterator[Record]:
    """Yield the rows of a Parquet file, with those of its columns that `choose` selects.

    Raises:
        DataError: If the file is damaged; the message names it.
    """
    require_package("pyarrow", f"{path} (Parquet)", "or give the text as .jsonl")
    import pyarrow
    from pyarrow import parquet

    try:
        with (
            io.BufferedReader(_Watched(path, advance)) as raw,
            parquet.ParquetFile(raw, buffer_size=BLOCK, pre_buffer=False) as file,
        ):
            if repeated := _repeated(file.schema_arrow.names):
                raise DataError(f"{path} {repeated}")
            columns, numbers = choose(file.schema_arrow.names) or None, count(1)
            for batch in file.iter_batches(ROWS, columns=columns):
                for record in batch.to_pylist():
                    yield f"{path}, row {next(numbers)}", without_missing(record)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
