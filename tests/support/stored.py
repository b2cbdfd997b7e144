"""Texts that are stored as a run does it."""

from __future__ import annotations

from pathlib import Path

from fastweights.text.corpus import Corpus, Text
from fastweights.text.documents import Data
from fastweights.text.folder import TextFolder
from fastweights.text.tokenizers import Bytes

BYTES = Bytes().build(())


def store(data: Data | Text, run: Path, tokenizer=BYTES, **options) -> Corpus:
    """The text as a conversion (`Data`) or a training (`Text`) stores it in the folder `run`."""
    request = data.request() if isinstance(data, Data) else data.request(16)
    return TextFolder(run, request, lambda: tokenizer).open(**options)
