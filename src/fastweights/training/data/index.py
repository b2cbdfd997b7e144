"""What a folder of tokenized text holds: the record of its files, and of its parts.

``index.json`` is written last and has all of it, with the SHA-256 of every file and of itself;
``shards.jsonl`` has had a line for every shard since it was done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastweights.errors import CheckpointError, DataError
from fastweights.training.data.packing import Framing
from fastweights.training.data.request import StoredSources
from fastweights.training.data.shards import ShardRecord, Shards
from fastweights.training.loop.files import write_json
from fastweights.training.loop.json_lines import append_row, read_rows, write_rows

INDEX, JOURNAL, TOKENIZER = "index.json", "shards.jsonl", "tokenizer"


@dataclass(frozen=True)
class StoredTexts:
    """The texts of a folder, as far as they are written.

    Attributes:
        dtype: The type of a token.
        framing: What stands around the documents.
        sources: What the texts are read from.
        tokenizer: SHA-256 of the tokenizer's files, by their paths in the folder.
        was_whole: Whether all texts were there before a file was damaged.
        shards: The shards of each text, in its folder of that name.
        ended: Names of the texts of which all is there.
    """

    dtype: str
    framing: Framing
    sources: StoredSources
    tokenizer: Mapping[str, str]
    was_whole: bool = False
    shards: Mapping[str, tuple[ShardRecord, ...]] = field(default_factory=dict)
    ended: tuple[str, ...] = ()

    def files(self, folder: Path) -> dict[Path, str]:
        """Return the SHA-256 of every file in `folder`."""
        shards = {
            folder / text / name: digest
            for text, records in self.shards.items()
            for record in records
            for name, digest in record.files.items()
        }
        return shards | self.tokenizer_files(folder)

    def tokenizer_files(self, folder: Path) -> dict[Path, str]:
        return {folder / name: digest for name, digest in self.tokenizer.items()}

    def before(self, damaged: set[Path]) -> StoredTexts:
        """Return the same without the first damaged shard of each text, and all behind it."""
        names = {(path.parent.name, path.name) for path in damaged}
        shards = {
            text: tuple(_take_sound(records, {name for folder, name in names if folder == text}))
            for text, records in self.shards.items()
        }
        ended = tuple(text for text in self.ended if shards[text] == self.shards[text])
        return replace(self, shards=shards, ended=ended)


def write_index(folder: Path, texts: StoredTexts) -> None:
    """Write ``index.json``, once all is there."""
    content = asdict(texts)
    write_json(folder / INDEX, {"version": 2, "texts": content, "sha256": _digest(content)})


def read_index(folder: Path) -> StoredTexts | None:
    """Read ``index.json``; None if it is missing or damaged."""
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if _digest(content["texts"]) != content["sha256"]:
            return None
        return _texts(content["texts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begin_journal(folder: Path, texts: StoredTexts) -> None:
    """Write ``shards.jsonl`` anew, with what is there already."""
    head = {**asdict(texts), "shards": {}, "ended": []}
    write_rows(folder / JOURNAL, [head, *_rows(texts)])


def add_shard(folder: Path, text: str, shard: ShardRecord) -> None:
    """Append a finished shard of a text to the journal."""
    append_row(folder / JOURNAL, {"text": text, "shard": asdict(shard)})


def open_shards(
    folder: Path, texts: StoredTexts, text: str, first: int = 0, count: int | None = None
) -> Shards:
    """Open the shards of a text from number `first` on, `count` of them or all, as one text."""
    records = texts.shards.get(text, ())
    return Shards(
        folder / text,
        records[first : None if count is None else first + count],
        np.dtype(texts.dtype),
        texts.framing.begins_are_targets,
        first,
    )


def add_end(folder: Path, text: str) -> None:
    """Append to the journal that all of a text is there."""
    append_row(folder / JOURNAL, {"ended": text})


def read_journal(folder: Path) -> StoredTexts | None:
    """Read what ``shards.jsonl`` says is there, also while another process appends to it; None if
    there is nothing yet.

    Raises:
        DataError: If it is damaged.
    """
    try:
        rows = read_rows(folder / JOURNAL)
        if not rows:
            return None
        texts, shards = rows[0], dict[str, list[Any]]()
        for row in rows[1:]:
            shards.setdefault(row.get("ended") or row["text"], []).extend(
                [row["shard"]] if "shard" in row else []
            )
        ended = [row["ended"] for row in rows if isinstance(row.get("ended"), str)]
        return _texts({**texts, "shards": shards, "ended": ended})
    except (CheckpointError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder / JOURNAL} is damaged ({error}); remove {folder}, and the next run reads the"
            " text again"
        ) from error


def _rows(texts: StoredTexts) -> Iterator[dict[str, Any]]:
    for text, shards in texts.shards.items():
        yield from ({"text": text, "shard": asdict(shard)} for shard in shards)
        if text in texts.ended:
            yield {"ended": text}


def _texts(content: Mapping[str, Any]) -> StoredTexts:
    framing = content["framing"]
    around: dict[str, Any] = {name: tuple(framing[name]) for name in ("before", "between", "after")}
    framed: dict[str, Any] = {**framing, **around}
    shards = {
        text: tuple(ShardRecord(**shard) for shard in shards)
        for text, shards in content["shards"].items()
    }
    tuples: dict[str, Any] = {name: tuple(content[name]) for name in ("sources", "ended")}
    fields: dict[str, Any] = {**content, "framing": Framing(**framed), "shards": shards, **tuples}
    return StoredTexts(**fields)


def _take_sound(records: tuple[ShardRecord, ...], damaged: set[str]) -> Iterator[ShardRecord]:
    for record in records:
        if damaged & record.files.keys():
            return
        yield record


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
