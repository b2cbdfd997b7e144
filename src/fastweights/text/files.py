"""Files of text and of records, read a block or a record at a time, whatever their size."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count, islice
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from fastweights.runs.errors import DataError
from fastweights.runs.packages import require_package

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


def read_text(path: Path, advance: Advance) -> Iterator[str]:
    """Yield the text of a file, which may be compressed, in blocks; a byte order mark is dropped.

    Raises:
        DataError: If the file has no readable text; the message names it.
    """
    blank = True
    try:
        with _open(path, advance) as file:
            for text in _decode(path, file):
                blank = blank and (not text or text.isspace())
                yield text
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if blank:
        raise DataError(f"{path} is empty; leave it out")


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
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if path.suffix != ".zst":
        return file
    require_package("pyarrow", f"{path} (Zstandard)", "or decompress it (zstd -d)")
    import pyarrow

    return pyarrow.CompressedInputStream(file, "zstd")


def _decode(path: Path, file: Any) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    decoded, begun = 0, False
    while block := file.read(BLOCK):
        text = _decode_block(path, decoder, block, decoded)
        yield text if begun else text.removeprefix("\N{BYTE ORDER MARK}")
        decoded, begun = decoded + len(block), begun or bool(text)
    _decode_block(path, decoder, b"", decoded)


def _decode_block(
    path: Path, decoder: codecs.IncrementalDecoder, block: bytes, decoded: int
) -> str:
    begun = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 at byte {decoded - begun + error.start};"
            " convert it (iconv -t utf-8)"
        ) from error


def read_json(path: Path, advance: Advance) -> Iterator[Record]:
    """Yield the records of a JSON array, or of one JSON value per line."""
    blocks = read_text(path, advance)
    begun = ""
    for text in blocks:
        begun += text
        if not begun.isspace():
            break
    if begun.lstrip().startswith("["):
        yield from _array_records(path, begun.lstrip()[1:], blocks)
    else:
        yield from _line_records(path, chain((begun,), blocks))


def _line_records(path: Path, blocks: Iterable[str]) -> Iterator[Record]:
    for number, line in enumerate(_lines(path, blocks), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _parse(line, place)


def _parse(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _no_json(place, error) from error


def _no_json(place: str, error: Exception) -> DataError:
    return DataError(f"{place}, is neither a JSON array nor one JSON object per line: {error}")


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


def _array_records(path: Path, text: str, blocks: Iterator[str]) -> Iterator[Record]:
    """Of an array whose text behind its bracket is `text`, and then `blocks`."""
    decoder, at = json.JSONDecoder(), 0
    for number in count(1):
        place = f"{path}, record {number}"
        while True:
            at = _BETWEEN.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if text.startswith("]", at):
                return
            try:
                record, end = decoder.raw_decode(text, at)
                break
            except JSONDecodeError as error:
                more = "".join(islice(blocks, max(1, (len(text) - at) // BLOCK)))
                if len(text) - at > RECORD:
                    raise DataError(
                        f"{place}, has more than {RECORD:,} characters; {_SHORTER}"
                    ) from error
                if not more or not _is_cut(error):
                    raise _no_json(place, error) from error
                text, at = text[at:] + more, 0
        yield place, record
        at = end


def _is_cut(error: JSONDecodeError) -> bool:
    """Whether a value may only lack its end."""
    near_end = error.pos > len(error.doc) - _CUT
    return near_end or error.msg.startswith("Unterminated string")


def read_table(path: Path, advance: Advance) -> Iterator[Record]:
    """Yield the rows of comma-separated values, or tab-separated ones (.tsv), by the names that
    the first row gives their columns.
    """
    csv.field_size_limit(RECORD)
    dialect = "excel-tab" if ".tsv" in path.suffixes else "excel"
    lines = (f"{line}\n" for line in _lines(path, read_text(path, advance)))
    rows = csv.DictReader(lines, dialect=dialect, strict=True)
    try:
        for row in rows:
            yield f"{path}, line {rows.line_num}", row
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.reader.line_num}: {error}") from error


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
            columns, numbers = choose(file.schema_arrow.names) or None, count(1)
            for batch in file.iter_batches(ROWS, columns=columns):
                for record in batch.to_pylist():
                    yield f"{path}, row {next(numbers)}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
