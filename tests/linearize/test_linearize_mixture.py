"""A conversion that learns from several sources while they are being tokenized."""

from __future__ import annotations

import pytest

from conversions import conversion, differing
from fastweights.linearize.distill.pipeline import run_conversion
from fastweights.training.data.documents import Data
from killable_runs import stop_after
from stored import ThreadWriter


@pytest.mark.long
def test_a_conversion_that_stops_goes_on_to_the_same_branches(source, tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.training.data.folder.Writer", ThreadWriter)
    (source / "more.txt").write_text("a goat is no sheep\n" * 200)
    texts = tuple(str(source / name) for name in ("text.txt", "more.txt"))
    data = Data(texts, length=24, held_out=200, weights=(0.7, 0.3), stream=400)
    mixed = conversion(source, data=data)
    assert run_conversion(mixed, tmp_path / "once", until="transfer")
    assert not run_conversion(mixed, tmp_path / "twice", until="transfer", stop=stop_after(6))
    assert run_conversion(mixed, tmp_path / "twice", until="transfer")
    assert differing(tmp_path / "once", tmp_path / "twice", checkpoints=False) == []
    assert not (tmp_path / "once" / "data" / "index.json").exists()
