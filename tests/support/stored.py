"""Texts that are stored as a run does it."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

from fastweights.training.data import blocks, writer
from fastweights.training.data.corpus import Corpus, Text
from fastweights.training.data.documents import Data
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.sources import read_documents
from fastweights.training.data.tokenizers import Bytes

BYTES = Bytes().build(())


def store(data: Data | Text, run: Path, tokenizer=BYTES, **options) -> Corpus:
    """The text as a conversion (`Data`) or a training (`Text`) stores it in the folder `run`."""
    length = data.length if isinstance(data, Data) else 16
    return TextFolder(run, data, length, lambda: tokenizer).open(**options)


def texts(*sources: Path | str, field: str | None = None) -> list[str]:
    """What is read of some sources, document by document."""
    documents = read_documents(list(map(os.fspath, sources)), field=field)
    return ["".join(piece.text for piece in document) for document in documents]


class ThreadWriter:
    """Writes as `Writer` does, in a thread, which writes what is left when this value has ended.

    Nothing waits for that: values end wherever garbage is collected, also inside of a lock that
    the thread needs.
    """

    def __init__(self, job: writer.WritingJob) -> None:
        begun = threading.Event()
        thread = threading.Thread(target=writer.serve, args=(job, begun.set), daemon=True)
        thread.start()
        begun.wait()
        self.end = weakref.finalize(self, want_all, job)


def want_all(job: writer.WritingJob) -> None:
    for name in job.texts:
        blocks.want(Path(job.folder), name, 10**6)
