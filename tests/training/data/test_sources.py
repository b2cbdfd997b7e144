"""One reader of sources, whatever follows: a stream of windows or packed documents."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pytest

from fastweights.errors import DataError
from fastweights.training.data.corpus import Text, read_corpus, tokenize_sources
from fastweights.training.data.documents import Data
from fastweights.training.data.sources import read_documents
from fastweights.training.data.tokenizers import BPE, Bytes, ExistingTokenizer
from stored import store, texts

TOKENIZER = Bytes().build(())
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
RECORDS = [
    {"text": "plain"},
    {"instruction": "Sing.", "output": "la"},
    {"prompt": "ask ", "response": "say"},
    {"messages": CHAT},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same records in every format, and a text."""
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "b.jsonl").write_text(lines)
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps(RECORDS).encode()))
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "notes.md").write_text("not read")
    return tmp_path


def test_records_are_the_same_in_every_format(folder: Path) -> None:
    found = texts(folder / "b.jsonl")
    assert found[0] == "plain"
    assert found[1].endswith("### Response:\nla")
    assert found[2:] == ["ask say", "user: hi\nassistant: hello\n"]
    assert texts(folder / "c.json.gz") == found
    assert texts(folder) == texts(f"{folder}/*.*") == ["a text", *found, *found]


def test_a_data_set_is_a_source_of_training(folder: Path) -> None:
    rows = [{"text": f"number {n}"} for n in range(30)]
    datasets.Dataset.from_list(rows).save_to_disk(folder / "set")
    source = f"hub:{folder / 'set'}"
    corpus = read_corpus(Text((source,), (source,)))
    read = corpus.tokenizer.decode(corpus.train[:])
    assert read == "<|endoftext|>".join(r["text"] for r in rows)


def test_training_and_linearizing_read_the_same_text(folder: Path) -> None:
    sources = (str(folder),)
    tokens, size = tokenize_sources(sources, TOKENIZER)
    packed = store(Data(sources, validation=sources), folder.with_name("run")).train[:]
    assert tokens[tokens < 256].tolist() == packed[packed < 256].tolist()
    assert size.bytes == sum(len(text.encode()) for text in texts(folder))


def test_training_writes_turns_by_the_tokenizers_template(folder: Path) -> None:
    tokenizer = Bytes().build(())
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "tokenizer")
    source = str(folder / "b.jsonl")
    text = Text((source,), (source,), ExistingTokenizer(str(folder / "tokenizer")))
    corpus = read_corpus(text)
    assert "<user>hi<assistant>hello" in corpus.tokenizer.decode(corpus.train[:])
    learnt = read_corpus(Text((source,), (source,), BPE(300)))
    assert "user: hi\nassistant: hello" in learnt.tokenizer.decode(learnt.train[:])


@pytest.mark.parametrize("source", ["", "  "])
def test_an_empty_source_is_refused(source: str) -> None:
    with pytest.raises(DataError, match="a source of text is empty"):
        list(read_documents([source]))
