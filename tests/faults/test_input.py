"""Input that cannot be trained on: refused in one line that says where, and nothing is left."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from here import copy_run, run_here, train_words

LINES = [json.dumps({"text": f"{n} sheep, {n * n % 97} goats"}) + "\n" for n in range(3000)]


def _flip_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    return (
        content[:middle]
        + bytes(b ^ 0x55 for b in content[middle : middle + 64])
        + (content[middle + 64 :])
    )


def _jsonl(folder: Path) -> Path:
    lines = [*LINES[:1000], '{"text": "and then\n', *LINES[1000:]]
    return _written(folder / "torn.jsonl", "".join(lines).encode())


def _jsonl_gz(folder: Path) -> Path:
    content = gzip.compress("".join(LINES).encode(), mtime=0)
    return _written(folder / "flipped.jsonl.gz", _flip_middle(content))


def _zst(folder: Path) -> Path:
    content = pyarrow.compress("".join(LINES).encode(), "zstd", asbytes=True)
    return _written(folder / "flipped.jsonl.zst", _flip_middle(content))


def _parquet(folder: Path) -> Path:
    path = folder / "flipped.parquet"
    texts = [json.loads(line)["text"] for line in LINES]
    table = pyarrow.table({"text": texts})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    return _written(path, _flip_middle(path.read_bytes()))


def _parquet_cut(folder: Path) -> Path:
    path = folder / "cut.parquet"
    parquet.write_table(pyarrow.table({"text": ["a sheep"] * 100}), path)
    return _written(path, path.read_bytes()[:-20])


def _latin(folder: Path) -> Path:
    return _written(folder / "latin.txt", b"sheep\n" * 999 + "né à Zürich".encode("latin-1"))


def _utf16(folder: Path) -> Path:
    return _written(folder / "wide.txt", ("né à Zürich\n" * 99).encode("utf-16"))


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


DATA: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a corrupt line in a JSONL": (_jsonl, "torn.jsonl, line 1001"),
    "a flipped byte in a .jsonl.gz": (_jsonl_gz, "flipped.jsonl.gz"),
    "flipped bytes in a .jsonl.zst": (_zst, "flipped.jsonl.zst"),
    "flipped bytes in a Parquet": (_parquet, "flipped.parquet"),
    "a Parquet cut short": (_parquet_cut, "cut.parquet"),
    "Latin-1 in the middle": (_latin, "latin.txt is not UTF-8 at byte 5995"),
    "UTF-16": (_utf16, "wide.txt is not UTF-8 at byte 0"),
}


@pytest.mark.parametrize("fault", DATA)
def test_damaged_text(tmp_path, told, fault):
    make, words = DATA[fault]
    said = run_here(train_words(make(tmp_path), tmp_path / "out"))
    assert said.status == 2
    assert said.error.count("\n") == 1
    assert words in said.error
    assert not (tmp_path / "out").exists()
    told(fault, said.status, said.error.replace(str(tmp_path), ""))


def test_weights_that_are_no_numbers(undisturbed, tmp_path, told):
    """In the model that a training goes on from."""
    model = copy_run(undisturbed.out / "model", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][0, 0] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    said = run_here(_going_on(undisturbed.text, model, tmp_path / "out"))
    assert said.status == 2
    assert "nan" in said.error
    assert not list((tmp_path / "out" / "checkpoints").glob("step-*"))
    told("NaN in the weights of --from", said.status, said.error.replace(str(tmp_path), ""))


def test_a_learning_rate_far_too_high(undisturbed, tmp_path, told):
    said = undisturbed.run(tmp_path / "out", "--lr", "1e30", "--warmup", "0")
    assert said.status == 2
    assert "lower learning rate" in said.error
    told("a learning rate far too high", said.status, said.error.replace(str(tmp_path), ""))


def test_a_tokenizer_of_another_model(undisturbed, tmp_path, told):
    words = _going_on(undisturbed.text, undisturbed.out / "model", tmp_path / "out")
    said = run_here([*words, "--tokenizer", "bpe:400"])
    assert said.status == 2
    assert said.error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    told("a tokenizer that does not match", said.status, said.error.replace(str(tmp_path), ""))


def _going_on(text: Path, model: Path, out: Path) -> list[str]:
    words = train_words(text, out, "--from", str(model))
    for name in ("--layers", "--width"):
        place = words.index(name)
        del words[place : place + 2]
    return words
