"""Arbitrary Unicode through files, tokenizers, packing, windows and what is held out."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow
import pyarrow.parquet
from hypothesis import assume
from hypothesis import strategies as st

from fastweights.errors import DataError
from fastweights.training.data.corpus import tokenize_sources
from fastweights.training.data.holdout import hold_out, thin_out
from fastweights.training.data.sources import read_documents
from fastweights.training.data.tokenizers import BPE, Bytes, TextStream, encode_texts, token_ids
from fastweights.training.data.tokens import Sequences
from fastweights.training.data.windows import Windows, _Bijection, sequential_windows
from laws import law

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SAID = TEXT.filter(str.strip)
DOCUMENTS = st.lists(SAID, min_size=1, max_size=8)
BYTES = Bytes().build(())
PAIRS = BPE(300).build(["the quick brown fox, über naïve Straßen; 日本語 \n\t 12345 " * 40])


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def plain_lines(texts: list[str]) -> bytes:
    """As they are, where JSON allows it."""
    return "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts).encode()


def json_array(texts: list[str]) -> bytes:
    return json.dumps([{"text": text} for text in texts], indent=1).encode()


def table(dialect: str) -> Callable[[list[str]], bytes]:
    def write(texts: list[str]) -> bytes:
        file = io.StringIO(newline="")
        csv.writer(file, dialect).writerows([["number", "text"], *enumerate(texts)])
        return file.getvalue().encode()

    return write


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=3)
    return file.getvalue()


FORMATS = {
    "a.jsonl": json_lines,
    "b.jsonl": plain_lines,
    "a.json": json_array,
    "a.csv": table("excel"),
    "a.tsv": table("excel-tab"),
    "a.parquet": parquet,
}
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda content: pyarrow.Codec("zstd").compress(content, asbytes=True),
}
WRITTEN = [
    *((name, packed) for name in FORMATS for packed in PACKED if name != "a.parquet"),
    ("a.parquet", ""),
]
"""Parquet files compress their columns by themselves."""


@law(
    calls=600,
    few=30,
    texts=DOCUMENTS,
    written=st.sampled_from(WRITTEN),
)
def test_documents_are_read_as_they_were_written(
    texts: list[str], written: tuple[str, str]
) -> None:
    name, packed = written
    with TemporaryDirectory() as folder:
        path = Path(folder) / (name + packed)
        path.write_bytes(PACKED[packed](FORMATS[name](texts)))
        found = ["".join(piece.text for piece in one) for one in read_documents([str(path)])]
    assert found == texts


@law(calls=200, text=SAID, packed=st.sampled_from(list(PACKED)))
def test_a_text_file_is_one_document(text: str, packed: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"a.txt{packed}"
        path.write_bytes(PACKED[packed](text.encode()))
        (found,) = ("".join(piece.text for piece in one) for one in read_documents([str(path)]))
    assert found == text.removeprefix("\N{BYTE ORDER MARK}")


@law(calls=300, few=30, text=TEXT, tokenizer=st.sampled_from([BYTES, PAIRS]))
def test_a_text_is_its_tokens(text: str, tokenizer) -> None:
    tokens = token_ids(tokenizer, text)
    assert tokenizer.decode(tokens) == text
    assert [t.tolist() for t in encode_texts(tokenizer, [text, "", text])] == [
        *(tokens.tolist(), [], tokens.tolist()),
    ]
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, tokens.tolist())) + stream.close() == text


@law(calls=150, texts=DOCUMENTS, tokenizer=st.sampled_from([BYTES, PAIRS]))
def test_packed_documents_are_all_there(texts: list[str], tokenizer) -> None:
    """With the token that ends a text between them, which ends none before the first."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(json_lines(texts))
        tokens, size = tokenize_sources((str(path),), tokenizer)
    end = tokenizer.eos_token_id
    expected = [t for text in texts for t in (*token_ids(tokenizer, text).tolist(), end)][:-1]
    assert np.asarray(tokens[:]).tolist() == expected
    assert size.bytes == sum(len(text.encode()) for text in texts)


@law(
    calls=500,
    few=30,
    tokens=st.integers(2, 3000),
    length=st.integers(2, 70),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 9),
)
def test_a_token_is_a_target_once(tokens: int, length: int, seed: int, epoch: int) -> None:
    """At most once in an epoch, whose windows leave less than two sequences out, and exactly once
    in validation."""
    numbers = np.arange(tokens)
    sequential = [t for b in sequential_windows(numbers, length, 3) for t in b[:, 1:].flatten()]
    assert sorted(map(int, sequential)) == list(range(1, tokens))
    assume(tokens >= length)
    windows = Windows(numbers, length, seed)
    batch = windows.batch(epoch * windows.epoch, windows.epoch)
    targets = Counter(batch[:, 1:].flatten().tolist())
    assert max(targets.values()) == 1
    assert len(targets) > tokens - 2 * length
    assert (batch.diff(dim=1) == 1).all()
    assert windows.batch(epoch * windows.epoch, windows.epoch).equal(batch)


@law(
    calls=300,
    count=st.integers(1, 600),
    keys=st.lists(st.integers(0, 2**63 - 1), min_size=6, max_size=6),
)
def test_an_order_without_memory_is_an_order(count: int, keys: tuple[int, ...]) -> None:
    order = _Bijection(count, keys)
    assert sorted(order[place] for place in range(count)) == list(range(count))


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)


def documents(lengths: list[int]) -> Sequences:
    number = np.repeat(np.arange(len(lengths)), lengths)
    letters = np.resize(np.frombuffer(b"a text of letters, ", np.uint8), len(number))
    everything = np.ones(len(number), bool)
    return Sequences(letters.astype(np.uint16), everything, number, begins_are_targets=True)


@law(calls=400, few=30, lengths=LENGTHS, most=st.integers(2, 500))
def test_what_is_held_out_is_not_trained_on(lengths: list[int], most: int) -> None:
    text = documents(lengths)
    try:
        train, held = hold_out(text, most, BYTES)
    except DataError:
        assume(len(text) >= 30)  # less than what one document of it takes
        raise
    places = sorted([*train.ranges.tolist(), *held.ranges.tolist()])
    assert [place for one in places for place in range(*one)] == list(range(len(text)))
    assert 0 < len(held) <= most + 4
    assert len(train) >= len(held)


@law(calls=200, lengths=LENGTHS, length=st.integers(2, 50), most=st.integers(2, 500))
def test_thinned_text_is_within_its_bounds(lengths: list[int], length: int, most: int) -> None:
    text = documents(lengths)
    ranges = thin_out(text, length, most).ranges.tolist()
    assert all(first < last for first, last in ranges)
    assert all(one[1] <= other[0] for one, other in pairwise(ranges))
    assert ranges[-1][1] <= len(text)
    assert sum(last - first for first, last in ranges) < most + length
