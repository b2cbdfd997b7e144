"""A conversion that learns from several sources while they are being tokenized."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversions import conversion, write_source
from fastweights.linearize.distill.pipeline import run_conversion
from fastweights.training.data.documents import Data
from stored import ThreadWriter


@pytest.mark.long
def test_a_conversion_that_stops_goes_on_to_the_same_branches(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("fastweights.training.data.folder.Writer", ThreadWriter)
    source = write_source(tmp_path)
    (source / "more.txt").write_text("a goat is no sheep\n" * 200)
    texts = tuple(str(source / name) for name in ("text.txt", "more.txt"))
    data = Data(texts, length=24, held_out=200, weights=(0.7, 0.3), stream=400)
    mixed = conversion(source, data=data)
    assert run_conversion(mixed, tmp_path / "once", until="transfer")
    asked = iter([False] * 6)
    assert not run_conversion(
        mixed, tmp_path / "twice", until="transfer", stop=lambda: next(asked, True)
    )
    assert run_conversion(mixed, tmp_path / "twice", until="transfer")
    branches = [
        (tmp_path / run / "transfer" / "trained.safetensors").read_bytes()
        for run in ("once", "twice")
    ]
    assert branches[0] == branches[1]
    assert not (tmp_path / "once" / "data" / "index.json").exists()
