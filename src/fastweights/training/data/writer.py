"""A process that tokenizes texts in the background, block by block, while they are trained on.

``python -m fastweights.training.data.writer`` is that process: the first line of its input
says what to write, and it ends when its input does, as it does when the process that started it is
killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from transformers import AutoTokenizer

from fastweights.errors import DataError, reason_of
from fastweights.training.data.blocks import AHEAD, FAILURE, LOCK, WANTED, last_wanted
from fastweights.training.data.index import (
    TOKENIZER,
    StoredTexts,
    add_end,
    add_shard,
    begin_journal,
    read_journal,
)
from fastweights.training.data.packing import encode_documents
from fastweights.training.data.request import VALIDATION, describe, read_alike
from fastweights.training.data.shards import ShardRecord, write_shards
from fastweights.training.data.sources import read_documents
from fastweights.training.loop.files import remove_folder, write_json

READY = b"ready\n"
IDLE = 0.2
"""Seconds between two looks at what is needed."""
_CHECKED = "checked"


@dataclass(frozen=True)
class WritingJob:
    """What a process is to write in the background.

    Attributes:
        folder: The folder of the texts, whose journal says what is there already.
        texts: The sources of each text, file by file.
        field: The column of the text in records; None for those of every format.
        block: Tokens of a block.
    """

    folder: str
    texts: Mapping[str, list[str]]
    field: str | None
    block: int


class Writer:
    """A process that writes texts in the background, for as long as this value lives.

    Args:
        job: What it writes.

    Attributes:
        process: The process.
        end: Ends it, if it has not ended.
    """

    def __init__(self, job: WritingJob) -> None:
        self.process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fastweights.training.data.writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self.end = weakref.finalize(self, process.communicate)
        process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        process.stdin.flush()
        if process.stdout.readline() != READY:
            raise DataError(
                "the process that tokenizes the text could not be started (its error stands above)"
            )


def write_blocks(job: WritingJob) -> None:
    """Write what of the texts is not there yet, the one first that is least ahead of its readers.

    Raises:
        DataError: If a text cannot be read, or has changed in what is written of it already.
    """
    folder = Path(job.folder)
    begun = read_journal(folder)
    assert begun is not None
    texts = _check_sources(job, begun)
    blocks = {name: len(texts.shards.get(name, ())) for name in job.texts}
    streams = {
        name: _write(job, texts, name, folder / name, blocks[name])
        for name in job.texts
        if name not in texts.ended
    }
    while streams:
        wanted = last_wanted(folder)
        ahead = {name: _ahead(name, blocks[name], wanted) for name in streams}
        name = min(ahead, key=lambda name: ahead[name])
        if ahead[name] > AHEAD:
            time.sleep(IDLE)
            continue
        shard = next(streams[name], None)
        if shard is None:
            del streams[name]
            add_end(folder, name)
        else:
            add_shard(folder, name, shard)
            blocks[name] += 1


def _ahead(text: str, block: int, wanted: Mapping[str, int]) -> int:
    """How many blocks behind those that are needed a block lies; what is validated on is needed as
    a whole, before."""
    return -1 if text == VALIDATION else block - wanted.get(text, 0)


def _write(
    job: WritingJob, texts: StoredTexts, name: str, target: Path, first: int
) -> Iterator[ShardRecord]:
    """The blocks of a text from number `first` on, written to the folder `target`."""
    target.mkdir(exist_ok=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(Path(job.folder) / TOKENIZER)
    documents = read_documents(job.texts[name], tokenizer, job.field)
    skip = sum(shard.pieces for shard in texts.shards.get(name, ())[:first])
    parts = encode_documents(tokenizer, documents, texts.framing, skip)
    return write_shards(target, parts, np.dtype(texts.dtype), first, job.block)


def _check_sources(job: WritingJob, texts: StoredTexts) -> StoredTexts:
    """Where the sources have changed since, compare what is written with what they read now."""
    now = describe(job.texts)
    if read_alike(texts.sources, now):
        return texts
    folder = Path(job.folder)
    for name in job.texts:
        if name not in texts.ended:
            _check_blocks(job, texts, name)
    remove_folder(folder / _CHECKED)
    checked = replace(texts, sources=now)
    begin_journal(folder, checked)
    return checked


def _check_blocks(job: WritingJob, texts: StoredTexts, name: str) -> None:
    """Compare every block that is written of a text with the same one read anew."""
    scratch, written = Path(job.folder) / _CHECKED, texts.shards.get(name, ())
    remove_folder(scratch)
    again = _write(job, texts, name, scratch, 0)
    for block, there in enumerate(written):
        if next(again, None) != there:
            raise DataError(
                f"the text has changed since block {block} of {Path(job.folder) / name} was read"
                " from it; put it back as it was, or choose another folder for a new run"
            )
        for file in scratch.iterdir():
            file.unlink()


def serve(job: WritingJob, begin: Callable[[], None]) -> None:
    """Write texts with their folder locked, and leave a note there if that fails.

    Args:
        job: What is written.
        begin: Called once the folder is locked.
    """
    folder = Path(job.folder)
    with FileLock(folder / LOCK):
        (folder / FAILURE).unlink(missing_ok=True)
        (folder / WANTED).mkdir(exist_ok=True)
        begin()
        try:
            write_blocks(job)
        except Exception as error:
            write_json(folder / FAILURE, {"reason": reason_of(error)})


def _main() -> None:
    """Write what the first line of the input asks for, until the input ends."""
    job = WritingJob(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    serve(job, _say_ready)


def _say_ready() -> None:
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _main()
