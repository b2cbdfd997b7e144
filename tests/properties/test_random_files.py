"""Files of a run that are cut, or of which a bit is another: a clear error, or what was there."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from hypothesis import strategies as st

from fastweights.errors import CheckpointError
from fastweights.train import train
from fastweights.training.loop.checkpoint import open_checkpoint
from fastweights.training.loop.files import read_json, write_json
from fastweights.training.loop.json_lines import append_row, cut_torn_line, read_rows, write_rows
from killable_runs import stop_after, tiny
from laws import law

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(st.dictionaries(WORDS, NUMBERS | WORDS | st.none(), max_size=4), max_size=6)
PLACES = st.floats(0, 1, exclude_max=True)


def flipped(content: bytes, place: float, bit: int) -> bytes:
    """The content with another bit."""
    changed = bytearray(content)
    if changed:
        changed[int(place * len(changed))] ^= 1 << bit
    return bytes(changed)


@law(calls=500, few=30, rows=ROWS, place=PLACES)
def test_a_torn_file_of_rows_has_those_before(rows: list[dict[str, Any]], place: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, rows)
        content = path.read_bytes()
        path.write_bytes(content[: int(place * len(content))])
        whole = content[: int(place * len(content))].count(b"\n")
        assert read_rows(path) == rows[:whole]
        cut_torn_line(path)
        append_row(path, {"one": "more"})
        assert read_rows(path) == [*rows[:whole], {"one": "more"}]


@law(calls=500, few=30, rows=ROWS, place=PLACES, bit=st.integers(0, 7))
def test_a_flipped_bit_in_rows_is_named_or_within_a_value(
    rows: list[dict[str, Any]], place: float, bit: int
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, rows)
        path.write_bytes(flipped(path.read_bytes(), place, bit))
        try:
            found = read_rows(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
            return
    assert len(rows) - len(found) in (0, 1)
    assert all(isinstance(row, dict) for row in found)


@law(calls=300, content=ROWS, place=PLACES, bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_json_file_is_named(content: Any, place: float, bit: int, cut: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "value.json"
        write_json(path, content)
        assert read_json(path) == content
        written = path.read_bytes()
        path.write_bytes(
            written[: int(place * len(written))] if cut else flipped(written, place, bit)
        )
        try:
            read_json(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017


@cache
def stopped() -> tuple[Path, Path]:
    """A run that was stopped after four of its six steps, and the same without a stop."""
    folder = Path(mkdtemp(prefix="fastweights-properties-"))
    train(tiny(folder), folder / "stopped", cpu=True, stop=stop_after(4))
    train(tiny(folder), folder / "whole", cpu=True)
    return folder / "stopped", folder / "whole"


@pytest.fixture(scope="module", autouse=True)
def _runs() -> Any:
    yield
    shutil.rmtree(stopped()[0].parent)
    stopped.cache_clear()


@pytest.mark.long
@law(calls=400, place=PLACES, file=PLACES, bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_checkpoint_is_noticed(place: float, file: float, bit: int, cut: bool) -> None:
    """Whatever changes in it: all of it has a hash, and the file of the hashes its form."""
    source = stopped()[0] / "checkpoints" / "step-00000004"
    with TemporaryDirectory() as folder:
        copy = shutil.copytree(source, Path(folder) / "step-00000004")
        path = _damage(copy, place, file, bit, cut)
        if path.name != "training.json":
            with pytest.raises(CheckpointError, match="is missing, changed or cut short"):
                open_checkpoint(copy)
            return
        try:
            found = open_checkpoint(copy)
        except CheckpointError as error:
            assert str(copy) in str(error)  # noqa: PT017
        else:
            assert isinstance(found.progress.step, int)


@pytest.mark.long
@law(calls=150, few=3, place=PLACES, file=PLACES, bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_run_says_so_or_ends_as_it_would_have(
    place: float, file: float, bit: int, cut: bool
) -> None:
    source, whole = stopped()
    with TemporaryDirectory() as folder:
        out = shutil.copytree(source, Path(folder) / "out")
        path = _damage(out, place, file, bit, cut)
        try:
            result = train(tiny(source.parent), out, cpu=True)
        except ValueError as error:
            assert len(str(error).split()) > 4, (path, error)  # noqa: PT017
            return
        assert result.complete
        ours, theirs = (one / "model" / "model.safetensors" for one in (out, whole))
        assert ours.read_bytes() == theirs.read_bytes(), path


def _damage(folder: Path, place: float, file: float, bit: int, cut: bool) -> Path:
    """Cut one of the files that are not empty, or change a bit of it."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    path = files[int(file * len(files))]
    content = path.read_bytes()
    changed = content[: int(place * len(content))] if cut else flipped(content, place, bit)
    path.write_bytes(changed)
    return path
