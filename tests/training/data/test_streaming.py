"""Texts that are trained on while they are being tokenized."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest

from fastweights.errors import DataError, Stopped
from fastweights.models.loss import IGNORE_INDEX
from fastweights.train import train
from fastweights.training.data import blocks, writer
from fastweights.training.data.blocks import AHEAD, is_writing
from fastweights.training.data.corpus import Corpus, Text, read_corpus
from fastweights.training.data.documents import DRAWN, Data
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.index import read_journal
from fastweights.training.data.windows import Windows
from fastweights.training.loop.seeds import random_seed_from
from killable_runs import FORKS, Heard, kill_at, stop_after, tiny
from stored import BYTES, ThreadWriter, store

KILLED = -9
LENGTH, BLOCK, SEED = 16, 300, 5


@pytest.fixture
def threads(monkeypatch) -> None:
    monkeypatch.setattr("fastweights.training.data.folder.Writer", ThreadWriter)
    monkeypatch.setattr(writer, "IDLE", 0.005)
    monkeypatch.setattr(blocks, "BETWEEN_LOOKS", 0.005)


def write_records(path: Path, count: int, seed: int) -> str:
    generator = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            words = (str(generator.randrange(10**4)) for _ in range(generator.randrange(1, 25)))
            file.write(json.dumps({"text": f"{number} {' '.join(words)}"}) + "\n")
    return str(path)


@pytest.fixture
def text(tmp_path: Path) -> Text:
    sources = (
        write_records(tmp_path / "web.jsonl", 90, 0),
        write_records(tmp_path / "books.jsonl", 25, 1),
    )
    return Text(sources, weights=(3, 1), held_out=100, stream=BLOCK)


def contents(folder: Path) -> dict[str, bytes]:
    """All that is written of a text; blocks of two texts may be done in any order."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name not in (blocks.WANTED, blocks.LOCK)
    }
    files["shards.jsonl"] = b"\n".join(sorted(files["shards.jsonl"].split(b"\n")))
    return {name: content for name, content in files.items() if name != blocks.LOCK}


def ids(corpus: Corpus, first: int, count: int) -> list:
    return corpus.batches(LENGTH, SEED).batch(first, count)["input_ids"].tolist()


def stored_order(run: Path, number: int, count: int) -> Iterator[list[int]]:
    """The sequences of a text by the stated rule, from the whole text and the ends of its blocks.

    What is held out is a range of the first block.
    """
    tokens = np.concatenate(
        [np.fromfile(path, "<u2") for path in sorted((run / f"train-{number}").glob("*.tokens"))]
    )
    journal = read_journal(run)
    assert journal is not None
    ends = np.cumsum([0, *(shard.tokens for shard in journal.shards[f"train-{number}"])])
    parts = [tokens[first:end] for first, end in pairwise(ends)]
    seed, epoch = random_seed_from(SEED, number), 0
    while True:
        for block, part in enumerate(parts):
            if block == 0:
                part = part[:count]
            if len(part) < LENGTH:
                continue
            windows = Windows(part, LENGTH, random_seed_from(seed, block))
            yield from windows.batch(epoch * windows.epoch, windows.epoch).tolist()
        epoch += 1


def journal_of(run: Path) -> dict[str, int]:
    """How many blocks of each text are written."""
    found = read_journal(run / "data")
    return {} if found is None else {name: len(shards) for name, shards in found.shards.items()}


@pytest.mark.usefixtures("threads")
def test_the_order_is_that_of_the_stated_rule(text, tmp_path):
    """While it is written, and after the fact; over several epochs."""
    corpus, sequences = store(text, tmp_path / "run"), 1500
    while_written = ids(corpus, 0, sequences)
    journal = read_journal(tmp_path / "run" / "data")
    assert journal is not None
    assert set(journal.ended) == {"train-0", "train-1"}
    assert min(map(len, journal.shards.values())) > 3
    again = store(text, tmp_path / "run")
    assert ids(again, sequences - 1, 1) == while_written[-1:]
    assert ids(again, 0, sequences) == while_written
    first = [len(source.text.block(0)) for source in corpus.sources]  # type: ignore[union-attr]
    orders = [stored_order(tmp_path / "run" / "data", n, first[n]) for n in (0, 1)]
    turns = np.random.default_rng([SEED, 0]).choice(2, DRAWN, p=(0.75, 0.25))[:sequences]
    assert while_written == [next(orders[turn]) for turn in turns]


@pytest.mark.usefixtures("threads")
def test_no_more_is_written_than_is_needed(text, tmp_path):
    corpus = store(text, tmp_path / "run")
    ids(corpus, 0, 1)
    for needed in (0, 1, 2):
        corpus.sources[0].text.block(needed)  # type: ignore[union-attr]
        expected = {"train-0": needed + AHEAD + 1, "train-1": AHEAD + 1}
        while journal_of(tmp_path / "run") != expected:
            time.sleep(0.01)
        time.sleep(0.1)
        assert journal_of(tmp_path / "run") == expected


@pytest.mark.usefixtures("threads")
def test_reading_leaves_a_line_that_is_being_written(text, tmp_path):
    """Another process, which asks for the tokenizer, sees half of what this one appends."""
    corpus, run = store(text, tmp_path / "run"), tmp_path / "run"
    ids(corpus, 0, 1500)
    journal = run / "data" / "shards.jsonl"
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    torn = b"".join(lines) + last[:10]
    journal.write_bytes(torn)
    _ = TextFolder(run, text, LENGTH, lambda: BYTES).tokenizer
    assert journal.read_bytes() == torn
    assert ids(store(text, run), 0, 1500) == ids(corpus, 0, 1500)
    assert sorted(journal.read_bytes().splitlines(keepends=True)) == sorted([*lines, last])


@pytest.mark.usefixtures("threads")
def test_what_is_held_out_is_in_the_first_block(text, tmp_path):
    corpus = store(text, tmp_path / "run")
    ids(corpus, 0, 600)
    first = corpus.sources[0].text.block(0)  # type: ignore[union-attr]
    held, whole = corpus.validations["web"], read_corpus(replace(text, stream=None, weights=()))
    assert 0 < len(held) <= 75
    tokens = whole.train[: len(first) + len(held)]
    assert np.array_equal(np.concatenate([first[:], held[:]]), tokens)


@pytest.mark.usefixtures("threads")
def test_sources_to_validate_on_are_read_before(text, tmp_path):
    apart = replace(text, sources=text.sources[:1], validation=text.sources[1:], weights=())
    corpus, whole = store(apart, tmp_path / "run"), read_corpus(replace(apart, stream=None))
    assert len(corpus.validation) > 0.8 * min(100, len(whole.validation))
    assert ids(corpus, 0, 2000) == ids(store(apart, tmp_path / "run"), 0, 2000)


@pytest.mark.usefixtures("threads")
def test_documents_and_responses_are_told_apart(tmp_path):
    lines = [json.dumps({"prompt": f"{n} + {n} =", "response": f" {2 * n}"}) for n in range(300)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    source = (str(tmp_path / "sums.jsonl"),)
    data = Data(source, source, LENGTH, responses=True, stream=BLOCK)
    batches = store(data, tmp_path / "run").batches(LENGTH, SEED, responses=True)
    batch = batches.batch(0, 300)
    for row in range(300):
        span = batches.span(row)
        tokens, begins, response = span.text.read(span.start, span.stop)
        begins[0] = True
        place = np.arange(LENGTH)
        since = place - np.maximum.accumulate(np.where(begins, place, 0))
        assert np.array_equal(batch["position_ids"][row], since)
        labels = np.where(response & ~begins, tokens.astype(int), IGNORE_INDEX)
        assert np.array_equal(batch["labels"][row], labels)


def spoil(path: Path, line: int, by: str) -> str:
    """Replace a line, counted from 1; returns what it was."""
    lines = path.read_text().splitlines(keepends=True)
    lines[line - 1], was = by, lines[line - 1]
    path.write_text("".join(lines))
    return was


@pytest.mark.usefixtures("threads")
def test_a_corrupt_line_is_named_and_put_right(text, tmp_path):
    web = Path(text.sources[0])
    was = spoil(web, 70, '{"text": "a\n')
    for _ in range(2):
        corpus = store(text, tmp_path / "run")
        assert len(ids(corpus, 0, 100)) == 100
        with pytest.raises(DataError, match=r"could not be read on: .*web.jsonl, line 70, is neit"):
            ids(corpus, 0, 2000)
    spoil(web, 70, was)
    mended = ids(store(text, tmp_path / "run"), 0, 2000)
    assert mended == ids(store(text, tmp_path / "once"), 0, 2000)
    assert contents(tmp_path / "run" / "data") == contents(tmp_path / "once" / "data")


@pytest.mark.usefixtures("threads")
def test_a_text_that_changes_behind_the_training_is_an_error(text, tmp_path):
    web = Path(text.sources[0])
    spoil(web, 70, "{")
    corpus = store(text, tmp_path / "run")
    with pytest.raises(DataError, match="line 70"):
        ids(corpus, 0, 2000)
    spoil(web, 70, '{"text": "a"}\n')
    spoil(web, 20, '{"text": "another"}\n')
    with pytest.raises(DataError, match=r"has changed since block \d of .*train-0 was read"):
        ids(store(text, tmp_path / "run"), 0, 2000)


@pytest.mark.usefixtures("threads")
def test_a_damaged_block_is_written_again(text, tmp_path):
    before = ids(store(text, tmp_path / "run"), 0, 2000)
    files = contents(tmp_path / "run" / "data")
    block = tmp_path / "run" / "data" / "train-0" / "000002.tokens"
    block.write_bytes(block.read_bytes()[:-1])
    told = Heard()
    assert ids(store(text, tmp_path / "run", reporter=told), 0, 2000) == before
    assert "000002.tokens is missing or damaged" in told.notes[0]
    after = contents(tmp_path / "run" / "data")
    assert {**after, "shards.jsonl": b""} == {**files, "shards.jsonl": b""}


@pytest.mark.usefixtures("threads")
def test_it_stops_while_it_waits(text, tmp_path):
    with pytest.raises(Stopped):
        store(text, tmp_path / "run", stop=lambda: True)
    assert len(ids(store(text, tmp_path / "run"), 0, 50)) == 50


@pytest.mark.usefixtures("threads")
def test_a_stopped_training_goes_on_to_the_same_end(text, tmp_path):
    config = tiny(tmp_path, text=text)
    train(config, tmp_path / "once", cpu=True)
    for steps in (2, 3):  # or fewer, where a run waits for its text
        train(config, tmp_path / "often", cpu=True, stop=stop_after(steps))
        assert not (tmp_path / "often" / "model").exists()
    train(config, tmp_path / "often", cpu=True)
    weights = [
        (tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("once", "often")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("tokens", [0, 255, 1 << 32])
def test_blocks_are_neither_too_small_nor_too_large(text, tokens):
    with pytest.raises(DataError, match=r"tokens of a block; take 256 \(16 sequences of 16\)"):
        replace(text, stream=tokens).require_blocks(LENGTH)


def write_and_be_killed(job: writer.WritingJob, calls: int, begun: Event) -> None:
    kill_at(calls)
    writer.serve(job, begun.set)


class MortalWriter:
    """A process that kills itself at one of its next calls that make something on disk final."""

    def __init__(self, job: writer.WritingJob, calls: int) -> None:
        begun = FORKS.Event()
        process = FORKS.Process(target=write_and_be_killed, args=(job, calls, begun))
        process.start()
        begun.wait()
        self.end = weakref.finalize(self, process.join)


def ids_or_error(text: Text, run: Path) -> list | str:
    try:
        return ids(store(text, run), 0, 2000)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_blocks(text, tmp_path, monkeypatch, seed):
    """The reader says that the writer is gone, and the next one goes on."""
    generator, kills = random.Random(seed), 0
    monkeypatch.setattr(
        "fastweights.training.data.folder.Writer",
        lambda job: MortalWriter(job, generator.randrange(2, 60)),
    )
    while isinstance(found := ids_or_error(text, tmp_path / "often"), str):
        assert "the process that tokenizes the text ended before" in found
        kills += 1
    assert kills > 1
    monkeypatch.setattr("fastweights.training.data.folder.Writer", ThreadWriter)
    assert ids(store(text, tmp_path / "once"), 0, 2000) == found
    assert contents(tmp_path / "often" / "data") == contents(tmp_path / "once" / "data")


def read_and_die(text: Text, run: Path) -> None:
    store(text, run)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_no_process_is_left_behind(text, tmp_path):
    """The one that writes ends with the one that reads, killed or not."""
    reader = FORKS.Process(target=read_and_die, args=(text, tmp_path / "run"))
    reader.start()
    reader.join()
    assert reader.exitcode == KILLED
    corpus = store(text, tmp_path / "run")
    assert is_writing(tmp_path / "run" / "data")
    process = corpus.sources[0].text.journal.writer.process  # type: ignore[union-attr]
    del corpus
    assert process.poll() == 0
    assert not is_writing(tmp_path / "run" / "data")
