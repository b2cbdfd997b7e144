"""The text of a run on disk: written once, piece by piece, and read by ranges."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastweights.errors import DataError, Stopped
from fastweights.training.data import shards
from fastweights.training.data.corpus import Text, build_tokenizer, read_corpus
from fastweights.training.data.documents import Data, Stream
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.tokenizers import BPE
from killable_runs import FORKS, Heard, kill_at, stop_after
from stored import store

KILLED = -9
SMALL = 300
"""Tokens of a shard in these tests."""


@pytest.fixture
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(shards.write_shards, "__defaults__", (0, SMALL))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Chats, prompts and texts of many lengths, in a file of lines and one of text."""
    generator = random.Random(0)
    lines = []
    for number in range(60):
        text = " ".join(str(generator.randrange(10**4)) for _ in range(generator.randrange(1, 30)))
        record = {"prompt": f"{number}: ", "response": text} if number % 3 else {"text": text}
        lines.append(json.dumps(record) + "\n")
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "a.txt").write_text("né à Zürich, " * 100)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def everything(text) -> list[list]:
    return [part.tolist() for part in text.read(0, len(text))]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("apart", [False, True], ids=["held out", "validation sources"])
def test_shards_hold_what_is_read_into_memory(records, tmp_path, apart):
    sources = (str(records),)
    text = Text(sources, sources if apart else (), BPE(300))
    stored = store(text, tmp_path / "run", build_tokenizer(text))
    read = read_corpus(text)
    assert len(list((tmp_path / "run" / "data" / "train").glob("*.tokens"))) > 3
    assert stored.sizes == read.sizes
    for part in ("train", "validation"):
        assert everything(getattr(stored, part)) == everything(getattr(read, part))


@pytest.mark.usefixtures("small_shards")
def test_any_range_is_read_across_shards(records, tmp_path):
    train = store(Data((str(records),)), tmp_path / "run").train
    whole = train.read(0, len(train))
    generator = random.Random(1)
    for _ in range(200):
        start, stop = sorted(generator.choices(range(len(train) + 1), k=2))
        for ours, theirs in zip(train.read(start, stop), whole, strict=True):
            assert np.array_equal(ours, theirs[start:stop])


@pytest.mark.usefixtures("small_shards")
def test_windows_on_disk_are_those_in_memory(records, tmp_path):
    text = Text((str(records),))
    stored, read = store(text, tmp_path / "run"), read_corpus(text)
    for first in range(0, 200, 7):
        ours, theirs = (Stream(one.train, 16, 3).batch(first, 4) for one in (stored, read))
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def write_and_be_killed(request, run: Path, calls: int | None) -> None:
    shards.write_shards.__defaults__ = (0, SMALL)
    if calls is not None:
        kill_at(calls)
    store(request, run)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_bytes(records, tmp_path, seed):
    generator, data = random.Random(seed), Text((str(records),), (str(records / "a.txt"),))
    write = FORKS.Process(target=write_and_be_killed, args=(data, tmp_path / "once", None))
    write.start()
    write.join()
    kills = 0
    while not (tmp_path / "often" / "data" / "index.json").exists():
        calls = generator.randrange(1, 30)
        write = FORKS.Process(target=write_and_be_killed, args=(data, tmp_path / "often", calls))
        write.start()
        write.join()
        assert write.exitcode in (0, KILLED)
        kills += write.exitcode == KILLED
    assert kills > 1
    assert contents(tmp_path / "often" / "data") == contents(tmp_path / "once" / "data")


@pytest.mark.usefixtures("small_shards")
def test_reading_stops_when_it_is_asked_to_and_goes_on(records, tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.training.data.folder._OFTEN", 500)
    with pytest.raises(Stopped):
        store(Text((str(records),)), tmp_path / "run", stop=stop_after(3))
    written = contents(tmp_path / "run" / "data")
    assert "index.json" not in written
    assert "train/000000.tokens" in written
    with pytest.raises(Stopped):
        store(Text((str(records),)), tmp_path / "run", is_first=False)
    watch = Heard()
    store(Text((str(records),)), tmp_path / "run", reporter=watch)
    assert watch.readings
    store(Text((str(records),)), tmp_path / "once")
    assert contents(tmp_path / "run" / "data") == contents(tmp_path / "once" / "data")
    assert (
        written["train/000000.tokens"]
        == contents(tmp_path / "once" / "data")["train/000000.tokens"]
    )


@pytest.mark.sampled
@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    "name",
    [
        "train/000002.tokens",
        "train/000001.begins",
        "train/000000.turns",
        "tokenizer/tokenizer.json",
        "index.json",
    ],
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_what_is_damaged_is_read_again(records, tmp_path, name, damage):
    text = Text((str(records),))
    store(text, tmp_path / "run")
    before, path = contents(tmp_path / "run" / "data"), tmp_path / "run" / "data" / name
    whole = path.read_bytes()
    middle = len(whole) // 2
    {
        "cut": lambda: path.write_bytes(whole[:-1]),
        "flip": lambda: path.write_bytes(
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        ),
        "remove": path.unlink,
    }[damage]()
    watch = Heard()
    store(text, tmp_path / "run", reporter=watch)
    after = contents(tmp_path / "run" / "data")
    journals = [files.pop("shards.jsonl") for files in (before, after)]
    assert after == before
    assert all(journals)
    assert name == "index.json" or str(path) in watch.notes[0]
    reopened = store(text, tmp_path / "run", is_first=False)
    assert store(text, tmp_path / "run").sizes == reopened.sizes


@pytest.mark.usefixtures("small_shards")
def test_damage_after_the_text_has_changed_is_an_error(records, tmp_path):
    text = Text((str(records),))
    store(text, tmp_path / "run")
    with (records / "a.txt").open("a") as file:
        file.write("more")
    tokens = tmp_path / "run" / "data" / "train" / "000001.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"000001.tokens is missing or damaged.*has changed; put"):
        store(text, tmp_path / "run")


def test_a_changed_text_is_noticed_and_what_was_read_stays(records, tmp_path):
    text = Text((str(records),))
    before = store(text, tmp_path / "run")
    with (records / "a.txt").open("a") as file:
        file.write("more")
    watch = Heard()
    after = store(text, tmp_path / "run", reporter=watch)
    assert everything(after.train) == everything(before.train)
    assert len(watch.notes) == 1
    assert "has changed since this run read it" in watch.notes[0]
    assert "choose another folder" in watch.notes[0]
    for path in records.iterdir():
        path.unlink()
    records.rmdir()
    watch = Heard()
    store(text, tmp_path / "run", reporter=watch)
    assert watch.notes == []


@pytest.mark.usefixtures("small_shards")
def test_a_text_that_changes_while_it_is_read_is_read_anew(records, tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.training.data.folder._OFTEN", 500)
    text = Text((str(records),), tokenization=BPE(300))
    make = lambda: build_tokenizer(text)  # noqa: E731
    with pytest.raises(Stopped):
        TextFolder(tmp_path / "run", text, 16, make).open(stop=stop_after(3))
    (records / "a.txt").write_text("another beginning, " * 300)
    watch = Heard()
    TextFolder(tmp_path / "run", text, 16, make).open(reporter=watch)
    assert "beginning again" in watch.notes[0]
    TextFolder(tmp_path / "once", text, 16, make).open()
    assert contents(tmp_path / "run" / "data") == contents(tmp_path / "once" / "data")


def test_a_run_does_not_read_its_own_files(records, tmp_path):
    outside, run = store(Text((str(records),)), tmp_path / "run"), records / "run"
    run.mkdir()
    (run / "run.json").write_text('{"type": "no text"}')
    assert everything(store(Text((str(records),)), run).train) == everything(outside.train)
    assert everything(store(Text((str(records),)), run).train) == everything(outside.train)


def test_a_damaged_journal_says_what_to_do(records, tmp_path):
    text = Text((str(records),))
    store(text, tmp_path / "run")
    data = tmp_path / "run" / "data"
    (data / "index.json").unlink()
    (data / "shards.jsonl").write_text("{]\n")
    with pytest.raises(
        DataError, match=r"shards.jsonl is damaged.*remove .*data, and the next run"
    ):
        store(text, tmp_path / "run")


MEMORY = """
import resource, sys
from pathlib import Path
from fastweights.training.data.corpus import Text
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.tokenizers import Bytes
text = Text((sys.argv[1],))
folder = TextFolder(Path(sys.argv[2]), text, 256, lambda: Bytes().build(()))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = folder.open()
print(len(corpus.train) + len(corpus.validation))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt", pytest.param("a.jsonl", marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_text(tmp_path, name):
    size = 60 << 20
    line = "what a sheep says to a goat " * 37
    line = json.dumps({"text": line}) + "\n" if name == "a.jsonl" else line + "\n"
    with (tmp_path / name).open("w") as file:
        for _ in range(size // len(line)):
            file.write(line)
    found = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / name), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    tokens, kilobytes = map(int, found.stdout.split())
    assert tokens > 0.9 * size
    assert kilobytes < 50_000


def test_held_out_tokens_may_be_changed(records, tmp_path):
    data = Data((str(records / "a.txt"),), held_out=40)
    found = store(data, tmp_path / "run")
    assert 35 < len(found.validation) <= 40
    assert len(store(replace(data, held_out=1 << 16), tmp_path / "other").validation) > 100
