"""Training on several sources, each with a share of the sequences."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastweights.errors import DataError, TrainingError
from fastweights.train import train
from fastweights.training.data.corpus import Text, read_corpus
from fastweights.training.data.documents import DRAWN, Data
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.request import name_sources
from fastweights.training.data.tokenizers import BPE, Bytes
from fastweights.training.loop.loop import Loop
from fastweights.training.loop.processes import Alone
from fastweights.training.loop.stage import Optimization, Stage
from killable_runs import launch_two, stop_after, tiny
from stored import store

LENGTH = 16
WEIGHTS = (0.5, 0.3, 0.2)
NAMES = ("web", "books", "code")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> tuple[str, ...]:
    """Three of very different sizes and kinds."""
    folder, generator = tmp_path_factory.mktemp("sources"), random.Random(0)

    def words() -> str:
        return " ".join(str(generator.randrange(10**4)) for _ in range(generator.randrange(1, 30)))

    for name, count in (("web", 200), ("books", 40)):
        lines = [json.dumps({"text": f"{name} {words()}"}) + "\n" for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "code.txt").write_text("def né(x): return x\n" * 120)
    return tuple(str(folder / name) for name in ("web.jsonl", "books.jsonl", "code.txt"))


@pytest.fixture(scope="module")
def corpus(sources, tmp_path_factory):
    run = tmp_path_factory.mktemp("stored") / "run"
    return store(Text(sources, weights=WEIGHTS, held_out=400), run)


def source_of(corpus, span) -> int:
    return [source.text for source in corpus.sources].index(span.text)


def spans_of(batches, count: int) -> list:
    return [batches.span(number) for number in range(count)]


def test_sources_are_drawn_by_their_weights(corpus):
    """To four standard deviations, in any stretch."""
    spans = spans_of(corpus.batches(LENGTH, 3), 2 * DRAWN)
    for part in (spans[:700], spans[DRAWN - 350 : DRAWN + 350], spans):
        counts = Counter(source_of(corpus, span) for span in part)
        for i, weight in enumerate(WEIGHTS):
            deviation = (len(part) * weight * (1 - weight)) ** 0.5
            assert abs(counts[i] - weight * len(part)) < 4 * deviation


def test_every_source_goes_through_its_own_epochs(corpus):
    """At most 2 (length - 1) tokens at the ends of a source are no targets in an epoch."""
    stride, spans = LENGTH - 1, spans_of(corpus.batches(LENGTH, 3), 6000)
    for number, source in enumerate(corpus.sources):
        own = [span.start for span in spans if source_of(corpus, span) == number]
        epoch = (len(source.text) - stride) // stride
        assert len(own) > 2 * epoch
        for first in (0, epoch):
            targets = [
                start + place for start in own[first : first + epoch] for place in range(1, LENGTH)
            ]
            assert len(set(targets)) == len(targets) > len(source.text) - 2 * LENGTH
        assert own[:epoch] != own[epoch : 2 * epoch]


def test_a_sequence_is_a_function_of_seed_and_number(corpus):
    first = 3 * DRAWN - 15
    whole = corpus.batches(LENGTH, 3).batch(first, 30)
    again = corpus.batches(LENGTH, 3)
    for number in (29, 0, 15):
        one = again.batch(first + number, 1)
        assert one["input_ids"].equal(whole["input_ids"][number][None])
    assert not corpus.batches(LENGTH, 4).batch(first, 30)["input_ids"].equal(whole["input_ids"])


def test_on_disk_it_is_what_it_is_in_memory(sources, tmp_path):
    text = Text(sources, tokenization=BPE(300), weights=WEIGHTS)
    read = read_corpus(text)
    stored = store(text, tmp_path / "run", read.tokenizer)
    for ours, theirs in ((stored, read), (store(text, tmp_path / "run", read.tokenizer), read)):
        assert ours.sizes == theirs.sizes
        assert ours.tokens_per_byte == theirs.tokens_per_byte
        one, other = (corpus.batches(LENGTH, 1).batch(0, 200) for corpus in (ours, theirs))
        assert all(one[name].equal(other[name]) for name in one)
        for name, part in ours.validations.items():
            assert np.array_equal(part[:], theirs.validations[name][:])


def test_a_part_of_each_source_is_held_out_by_its_share(corpus):
    assert tuple(corpus.validations) == NAMES
    for name, part, weight in zip(NAMES, corpus.held_out, WEIGHTS, strict=True):
        assert part.name == name
        assert 0.5 * weight * 400 < len(part.text) <= weight * 400
    held = sum(len(part.text) for part in corpus.held_out)
    assert corpus.sizes["validation"].tokens == held == len(corpus.validation)
    joined = np.concatenate([part[:] for part in corpus.validations.values()])
    assert np.array_equal(corpus.validation[:], joined)
    begins = corpus.validation.read(0, held).begins
    assert begins[0]
    assert begins[len(corpus.held_out[0].text)]


def test_documents_stay_apart_where_sources_meet(corpus):
    batches = corpus.batches(LENGTH, 3)
    batch, spans = batches.batch(0, 300), spans_of(batches, 300)
    for row, span in enumerate(spans):
        begins = span.text.read(span.start, span.stop).begins
        since = 0
        for place in range(LENGTH):
            since = 0 if place == 0 or begins[place] else since + 1
            assert batch["position_ids"][row, place] == since
    assert (batch["position_ids"][:, 0] == 0).all()


class Rows(Stage):
    """Remembers which sequences it is given."""

    def __init__(self) -> None:
        self.model, self.rows = nn.Linear(1, 1), list[tuple[int, int]]()

    def backward(self, first, count, share, step):
        self.rows += [(step, number) for number in range(first, first + count)]
        loss = self.model(torch.ones(1)).sum()
        loss.backward()
        return {"loss": loss.detach()}

    def validate(self, processes=Alone()):
        return {}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_processes_sees_the_same_sequences_in_a_step(count, accumulate):
    config, seen = Optimization(steps=3, batch=8, accumulate=accumulate), Counter()
    for index in range(count):
        process, stage = Alone(), Rows()
        process.index, process.count = index, count
        loop = Loop(stage, config, process, step=1)
        loop.update()
        loop.update()
        seen.update(stage.rows)
    assert seen == Counter({(step, 8 * step + row): 1 for step in (1, 2) for row in range(8)})


def rows_of(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if "loss" in name} for row in rows]


def test_validation_is_of_each_source_and_weighted(sources, tmp_path):
    text = Text(sources, weights=WEIGHTS, held_out=400)
    train(tiny(tmp_path, text=text), tmp_path / "run", cpu=True)
    row = rows_of(tmp_path / "run")[-1]
    own = [row[f"val_loss/{name}"] for name in NAMES]
    assert len(set(own)) == 3
    assert row["val_loss"] == pytest.approx(np.average(own, weights=WEIGHTS), rel=1e-12)


def train_some(config, out: Path) -> None:
    train(config, out, cpu=True, stop=stop_after(3))


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_begin_and_one_ends(sources, tmp_path):
    """Streaming, too: the first writes in the background, the other waits for the same blocks."""
    text = Text(sources, weights=WEIGHTS, held_out=400, stream=256)
    config = tiny(tmp_path, text=text, accumulate=2)
    train(config, tmp_path / "alone", cpu=True)
    launch_two(train_some, config, tmp_path / "both")
    assert 0 < len(rows_of(tmp_path / "both")) < 6
    train(replace(config), tmp_path / "both", cpu=True)
    for ours, theirs in zip(rows_of(tmp_path / "both"), rows_of(tmp_path / "alone"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_sources_apart_validate_as_one(sources, tmp_path):
    text = Text(sources[:2], (sources[2],), weights=(1, 3))
    corpus = store(text, tmp_path / "run")
    assert list(corpus.validations) == [""]
    assert corpus.loss_metrics({"": 2.0}) == {"val_loss": 2.0}
    whole = read_corpus(Text((sources[2],), (sources[2],)))
    assert np.array_equal(corpus.validation[:], whole.validation[:])


def test_a_bad_source_is_named(sources, tmp_path):
    (tmp_path / "tiny.txt").write_text("too short")
    text = Text((*sources, str(tmp_path / "tiny.txt")), weights=(1, 1, 1, 1))
    with pytest.raises(DataError, match="tiny: "):
        store(text, tmp_path / "run")


@pytest.mark.parametrize("make", [Data, Text])
def test_there_is_a_weight_for_each_source(make):
    with pytest.raises(DataError, match="2 weights for 3 sources; give one for each"):
        make(("a", "b", "c"), weights=(0.5, 0.5))


@pytest.mark.parametrize("weight", [0, -0.5, float("nan"), float("inf")])
def test_weights_are_positive_and_finite(weight):
    with pytest.raises(TrainingError, match=r"weights\[1\]"):
        Text(("a", "b"), weights=(1.0, weight))


def test_sources_are_named_after_files_and_folders():
    sources = ("web/*.jsonl.zst", "books/", "a/code.parquet", "hub:allenai/c4", "old/books", "*")
    assert name_sources(sources) == ("web", "books", "code", "c4", "books-2", "text")


def test_a_folder_that_is_not_shared_is_an_error(sources, tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.training.data.folder.VISIBLE", 0.0)
    folder = TextFolder(tmp_path / "run", Text(sources), 16, lambda: Bytes().build(()))
    with pytest.raises(DataError, match="of a file system that they share"):
        folder.open(is_first=False)
