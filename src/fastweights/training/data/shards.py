"""Tokens on disk: a folder of files of bounded size, written one after the other and mapped into
memory.

A shard is three files: its tokens; the places at which documents begin; the places at which what
follows becomes a response or ceases to be one, the first of which makes it one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastweights.training.data.packing import EncodedPart
from fastweights.training.data.tokens import Concatenated, Stretch, WholeText
from fastweights.training.loop.files import room_for, sync

SHARD = 1 << 25
"""Tokens of a shard, and up to one piece of text more."""
MAPPED = 64
"""Most shards whose files are mapped into memory at once."""
PLACE = np.dtype("<u4")
"""The type of a place in a shard."""
_BLOCK = 1 << 20  # tokens that are written at once


@dataclass(frozen=True)
class ShardRecord:
    """What is known of a shard.

    Attributes:
        tokens: Number of tokens.
        documents: Number of documents that begin in it.
        pieces: Number of pieces of text.
        bytes: UTF-8 bytes of the text.
        has_prompts: Whether some of its tokens are not responses.
        files: SHA-256 of each file, by its name.
    """

    tokens: int
    documents: int
    pieces: int
    bytes: int
    has_prompts: bool
    files: Mapping[str, str]


def write_shards(
    folder: Path,
    parts: Iterable[EncodedPart],
    dtype: np.dtype[Any],
    first: int = 0,
    size: int = SHARD,
) -> Iterator[ShardRecord]:
    """Write the parts of a stream to shards in `folder`; yields the record of each that is done.

    Args:
        folder: Where the files are written.
        parts: The parts, of which only those of one shard are taken before its record is yielded.
        dtype: The type of a token.
        first: Number of the first shard.
        size: Tokens of a shard; it ends with the part that reaches them.
    """
    stream, number = iter(parts), first
    while (part := next(stream, None)) is not None:
        tokens = folder / ShardFiles.of(number).tokens
        with room_for(tokens, tokens):
            with _ShardWriter(folder, number, dtype) as shard:
                shard.add(part)
                while shard.tokens < size and (part := next(stream, None)) is not None:
                    shard.add(part)
            record = shard.record()
        yield record
        number += 1


class _ShardWriter:
    """The files of a shard that is being written, in little memory."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any]) -> None:
        self.tokens = 0
        self._names = ShardFiles.of(number)
        self._folder, self._dtype = folder, dtype
        self._begins, self._turns = array("I"), array("I")
        self._pieces = self._bytes = self._waiting = 0
        self._response = self._has_prompts = False
        self._block = list[np.ndarray]()
        self._hash = hashlib.sha256()

    def __enter__(self) -> _ShardWriter:
        self._file = (self._folder / self._names.tokens).open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._file.close()

    def add(self, part: EncodedPart) -> None:
        if part.begin is not None:
            self._begins.append(self.tokens + part.begin)
        for run in part.runs:
            self._add_run(run.tokens, run.response)
        self._pieces += 1
        self._bytes += part.bytes
        if self._waiting >= _BLOCK:
            self._flush()

    def _add_run(self, tokens: np.ndarray, response: bool) -> None:
        if len(tokens) == 0:
            return
        if response != self._response:
            self._turns.append(self.tokens)
            self._response = response
        self._has_prompts = self._has_prompts or not response
        self._block.append(tokens)
        self.tokens += len(tokens)
        self._waiting += len(tokens)

    def _flush(self) -> None:
        if self._block:
            content = np.concatenate(self._block, dtype=self._dtype).data
            self._file.write(content)
            self._hash.update(content)
        self._block, self._waiting = [], 0

    def record(self) -> ShardRecord:
        """Write the other files, make all last, and return what is known of the shard."""
        files = {self._names.tokens: self._hash.hexdigest()}
        places = {self._names.begins: self._begins, self._names.turns: self._turns}
        for name, values in places.items():
            content = np.array(values, dtype=PLACE).tobytes()
            (self._folder / name).write_bytes(content)
            files[name] = hashlib.sha256(content).hexdigest()
        for name in files:
            sync(self._folder / name)
        return ShardRecord(
            tokens=self.tokens,
            documents=len(self._begins),
            pieces=self._pieces,
            bytes=self._bytes,
            has_prompts=self._has_prompts,
            files=files,
        )


class ShardFiles(NamedTuple):
    """The names of a shard's files."""

    tokens: str
    begins: str
    turns: str

    @classmethod
    def of(cls, number: int) -> ShardFiles:
        return cls(*(f"{number:06d}.{kind}" for kind in cls._fields))


class _ShardArrays(NamedTuple):
    """The files of a shard, mapped into memory."""

    tokens: np.ndarray
    begins: np.ndarray
    turns: np.ndarray


class Shards(Concatenated, WholeText):
    """A text in the shards of a folder.

    Args:
        folder: The folder.
        records: The records of its shards.
        dtype: The type of a token.
        begins_are_targets: Whether the first token of a document is predicted from the one before.
        first: Number of the first of these shards in the folder.
    """

    def __init__(
        self,
        folder: Path,
        records: Sequence[ShardRecord],
        dtype: np.dtype[Any],
        begins_are_targets: bool,
        first: int = 0,
    ) -> None:
        self.folder, self.records, self.begins_are_targets = folder, records, begins_are_targets
        self._dtype, self._first = dtype, first
        self._mapped = lru_cache(MAPPED)(self._map)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def documents(self) -> int:
        return sum(record.documents for record in self.records)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return sum(record.bytes for record in self.records)

    @cached_property
    def has_prompts(self) -> bool:
        return any(record.has_prompts for record in self.records)

    def _sizes(self) -> Iterable[int]:
        return (record.tokens for record in self.records)

    def _read_part(self, number: int, start: int, stop: int) -> Stretch:
        return _read_mapped(self._mapped(number), start, stop)

    def begins(self, start: int, stop: int) -> np.ndarray:
        found = [np.empty(0, np.int64)]
        for number, first, last in self._places(start, stop):
            begins = self._mapped(number).begins
            low, high = _search(begins, first, last)
            found.append(begins[low:high] + self._offsets[number])
        return np.concatenate(found)

    def _map(self, number: int) -> _ShardArrays:
        names = ShardFiles.of(self._first + number)
        return _ShardArrays(
            _map_file(self.folder / names.tokens, self._dtype),
            _map_file(self.folder / names.begins, PLACE),
            _map_file(self.folder / names.turns, PLACE),
        )


def _map_file(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """An empty file cannot be mapped."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


def _search(places: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The first of ascending `places` from `start` on, and the first from `stop` on."""
    low, high = places.searchsorted(np.array((start, stop), PLACE))  # of one type: none is copied
    return int(low), int(high)


def _read_mapped(shard: _ShardArrays, start: int, stop: int) -> Stretch:
    begins, response = np.zeros(stop - start, bool), np.zeros(stop - start, bool)
    low, high = _search(shard.begins, start, stop)
    begins[shard.begins[low:high].astype(np.int64) - start] = True
    turned, last = _search(shard.turns, start + 1, max(start + 1, stop))
    response[shard.turns[turned:last].astype(np.int64) - start] = True
    response = (response.cumsum() + turned) % 2 == 1
    return Stretch(shard.tokens[start:stop], begins, response)
