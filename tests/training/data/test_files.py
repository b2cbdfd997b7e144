"""Files of every format, compressed and damaged, however large, in little memory."""

from __future__ import annotations

import csv
import gzip
import json
import secrets
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from fastweights.errors import DataError
from fastweights.training.data import files
from fastweights.training.data.sources import BUNDLED, paths, read_documents, size_of
from fastweights.training.data.tokenizers import pieces
from stored import texts

TEXTS = ['one, "two"\nthree', "vier\tfünf", "\u2028六 7"]


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("\n".join(map(json.dumps, records)))


def write_array(path: Path, records: list[Any]) -> None:
    path.write_text(json.dumps(records, indent=2, ensure_ascii=False))


def write_table(path: Path, records: list[Any]) -> None:
    with path.open("w", newline="") as file:
        dialect = "excel-tab" if path.suffix == ".tsv" else "excel"
        writer = csv.DictWriter(file, records[0], dialect=dialect)
        writer.writeheader()
        writer.writerows(records)


def write_parquet(path: Path, records: list[Any]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(records), path, use_dictionary=False)


WRITERS = {
    "a.jsonl": write_lines,
    "a.json": write_array,
    "a.csv": write_table,
    "a.tsv": write_table,
    "a.parquet": write_parquet,
}


def gzipped(path: Path) -> Path:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return path.with_name(f"{path.name}.gz")


@pytest.mark.parametrize("name", WRITERS)
def test_field_names_the_column(tmp_path: Path, name: str) -> None:
    records = [{"text": "not this", "story": text} for text in TEXTS]
    WRITERS[name](tmp_path / name, records)
    assert texts(tmp_path / name, field="story") == TEXTS
    with pytest.raises(DataError, match=r'"story": str, "text": str}; --field tale asks for'):
        texts(tmp_path / name, field="tale")


def test_messages_in_a_column_of_any_name(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    write_lines(tmp_path / "a.jsonl", [{"conversation": turns}])
    (document,) = read_documents([str(tmp_path / "a.jsonl")], field="conversation")
    assert [(piece.text, piece.response) for piece in document if piece.text] == [
        ("user: hi\n", False),
        ("assistant: ", False),
        ("hello\n", True),
    ]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 1 << 20])
def test_blocks_leave_no_trace(tmp_path: Path, monkeypatch, block: int) -> None:
    """Characters, lines and records are whole wherever a block of the file ends."""
    monkeypatch.setattr(files, "BLOCK", block)
    records = [{"text": text} for text in TEXTS]
    write_lines(tmp_path / "a.jsonl", records)
    write_array(tmp_path / "b.json", records)
    (tmp_path / "c.txt").write_bytes("\ufeffä€😀 text\r\nend".encode())
    assert texts(tmp_path) == [*TEXTS, *TEXTS, "ä€😀 text\r\nend"]


def test_a_text_is_cut_as_a_whole_one_is(tmp_path: Path) -> None:
    text = "some words in a line\n" * 20_000 + "x" * 3_000_000 + " end"
    (tmp_path / "a.txt").write_text(text)
    (document,) = read_documents([str(tmp_path / "a.txt")])
    found = [piece.text for piece in document]
    assert found == list(pieces(text))
    assert "".join(found) == text
    assert max(map(len, found)) <= 1 << 20


def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    """64 MiB of text, of lines, and of an array: never more than some blocks."""
    line = json.dumps({"text": "word " * 2000}) + "\n"
    count = (1 << 26) // len(line)
    (tmp_path / "a.txt").write_text(line * count)
    (tmp_path / "b.jsonl").write_text(line * count)
    (tmp_path / "c.json").write_text("[" + ",".join([line] * count) + "]")
    tracemalloc.start()
    for name in ("a.txt", "b.jsonl", "c.json"):
        for document in read_documents([str(tmp_path / name)]):
            for _ in document:
                pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def test_a_large_group_of_rows_takes_little_memory(tmp_path: Path) -> None:
    """32 MB of text in one group of rows of a Parquet file: a page of it at a time."""
    rows = [{"text": secrets.token_hex(500)} for _ in range(32_000)]
    write_parquet(tmp_path / "a.parquet", rows)
    tracemalloc.start()
    for document in read_documents([str(tmp_path / "a.parquet")]):
        list(document)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 23


def test_who_stops_early_reads_no_more(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * (1 << 20))
    read: list[int] = []
    document = next(read_documents([str(tmp_path / "a.txt")], advance=read.append))
    next(document)
    assert sum(read) <= files.BLOCK


@pytest.mark.parametrize("name", WRITERS)
def test_all_bytes_of_files_are_counted(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, [{"text": text} for text in TEXTS])
    (tmp_path / "b.txt").write_text("more")
    gzipped(tmp_path / "b.txt")
    read: list[int] = []
    for document in read_documents([str(tmp_path)], advance=read.append):
        list(document)
    there = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size_of([str(tmp_path)]) == there
    assert sum(read) == there if name != "a.parquet" else sum(read) > 0
    assert size_of(["shakespeare"]) == paths("shakespeare")[0].stat().st_size
    assert list(BUNDLED) == ["shakespeare"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A data set of two splits, as `datasets` saves it."""
    parts = {
        split: datasets.Dataset.from_dict(
            {"n": range(300), "text": [f"{split} {n}" for n in range(300)]}
        )
        for split in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "set")
    return tmp_path / "set"


def test_saved_data_sets(saved: Path) -> None:
    assert texts(saved) == texts(f"hub:{saved}") == [f"train {n}" for n in range(300)]
    assert texts(f"hub:{saved}:test")[-1] == "test 299"
    assert texts(saved / "test")[0] == "test 0"
    assert size_of([str(saved)]) is None
    with pytest.raises(DataError, match=r"cannot read the data set .*nosuch"):
        texts(f"hub:{saved}:nosuch")
    with pytest.raises(DataError, match=r"record 1 has .*\"n\": int.*--field tale"):
        texts(saved, field="tale")


def test_a_folder_as_a_data_set(tmp_path: Path) -> None:
    """As one of the hub that was downloaded: streamed, without the files that describe it."""
    write_parquet(tmp_path / "train.parquet", [{"text": text} for text in TEXTS])
    (tmp_path / "dataset_infos.json").write_text('{\n "default": {}\n}')
    assert texts(tmp_path) == texts(f"hub:{tmp_path}") == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_record_without_an_end_is_not_read_to_the_end(
    tmp_path: Path, monkeypatch, name: str
) -> None:
    monkeypatch.setattr(files, "RECORD", 1 << 21)
    (tmp_path / name).write_text('["' + "x" * (1 << 24))
    read: list[int] = []
    with pytest.raises(DataError, match=r"more than 2,097,152 characters; cut it, or"):
        list(read_documents([str(tmp_path / name)], advance=read.append))
    assert sum(read) < 1 << 23


def test_a_home_that_does_not_exist() -> None:
    with pytest.raises(DataError, match=r"'~nosuchuser/x': there is no such user"):
        texts("~nosuchuser/x")


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("pyarrow", "a.txt.zst"), ("datasets", "hub:x")]
)
def test_missing_packages_are_named(tmp_path: Path, monkeypatch, package: str, name: str) -> None:
    def missing(found: str, feature: str, alternative: str) -> None:
        raise ValueError(f"{feature} needs {found}: pip install {found}, {alternative}")

    monkeypatch.setattr("fastweights.training.data.files.require_package", missing)
    monkeypatch.setattr("fastweights.training.data.sources.require_package", missing)
    (tmp_path / name.removeprefix("hub:")).write_bytes(b"")
    source = name if name.startswith("hub:") else str(tmp_path / name)
    with pytest.raises(ValueError, match=f"{package}: pip install {package}, or "):
        texts(source)
