"""Documents of every format, packed; what is learnt of them, and where they end."""

from __future__ import annotations

import gzip
import json
from copy import deepcopy
from functools import partial

import datasets
import numpy as np
import pytest
import torch

from chat_templates import CHATML
from fastweights.linearize import LinearAttentionConfig, Student, use_mode
from fastweights.models.loss import IGNORE_INDEX
from fastweights.train import BPE, Bytes, DataError
from fastweights.training.data.documents import Data, Stream
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.packing import encode_documents, framing_of_each, gather
from fastweights.training.data.sources import TextPiece, document_of
from fastweights.training.data.tokens import Sequences
from fastweights.training.loop.report import Reporter
from pretrained import linear_llama, sequences
from stored import store

TOKENIZER = Bytes().build([])
ENDING = BPE(300).build(["a text to learn a few pairs of bytes from"])
RECORDS = {
    "text": ({"text": "plain"}, ["plain"]),
    "prompt": ({"prompt": "ask ", "response": "say"}, ["say"]),
    "alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, ["3"]),
    "alpaca without input": ({"instruction": "Sing.", "output": "la"}, ["la"]),
    "chat": (
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
            ]
        },
        ["hello\n"],
    ),
}


def learnt(document) -> list[str]:
    return [piece.text for piece in document if piece.response]


@pytest.mark.parametrize(("record", "responses"), RECORDS.values(), ids=RECORDS)
def test_responses_of_every_format(record, responses):
    assert learnt(document_of(record, "here", TOKENIZER)) == responses


def test_alpacas_prompt():
    prompt = document_of(RECORDS["alpaca"][0], "here", TOKENIZER)[0].text
    assert (
        prompt
        == "Below is an instruction that describes a task, paired with an input that provides"
        " further context. Write a response that appropriately completes the request.\n\n###"
        " Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
    )


def test_a_chat_template_is_used_and_only_the_assistant_is_learnt():
    tokenizer = Bytes().build([])
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    turns = [("user", "hi"), ("assistant", "hello"), ("user", "and"), ("assistant", "bye")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    document = document_of(record, "here", tokenizer)
    assert (
        "".join(piece.text for piece in document)
        == "<user>hi</><assistant>hello</><user>and</><assistant>bye</>"
    )
    assert learnt(document) == ["hello</>", "bye</>"]


@pytest.mark.parametrize("record", [{"words": "x"}, 3, {"messages": []}, {"text": 3}])
def test_other_records_name_their_place(record):
    with pytest.raises(DataError, match=r'line 7 has .*a record has "text"'):
        document_of(record, "line 7", TOKENIZER)


def test_documents_end_and_are_numbered():
    framing = framing_of_each(ENDING)
    documents = [[TextPiece("ask ", False), TextPiece("say", True)], [TextPiece("text", True)]]
    found, _ = gather(encode_documents(ENDING, map(iter, documents), framing), framing)
    ends = np.flatnonzero(found.tokens == ENDING.eos_token_id)
    assert len(ends) == 2
    assert found.document.tolist() == [0] * (ends[0] + 1) + [1] * (len(found) - ends[0] - 1)
    assert ENDING.decode(found.tokens[found.response & (found.document == 0)]) == "say<|endoftext|>"


def test_labels_and_positions_of_packed_documents():
    """Three documents of 4 tokens in windows of 12: no document's first token is learnt, positions
    start anew.
    """
    packed = Sequences(np.arange(12), np.arange(12) % 4 >= 2, np.arange(12) // 4)
    batch = Stream(packed, 12, 0).batch(0, 1)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3] * 3]
    assert batch["labels"].tolist() == [
        [IGNORE_INDEX, 1, 2, 3, IGNORE_INDEX, 5, 6, 7, IGNORE_INDEX, 9, 10, 11]
    ]
    answers = Stream(packed, 12, 0, responses=True).batch(0, 1)["labels"]
    assert answers.tolist() == [
        [
            IGNORE_INDEX,
            IGNORE_INDEX,
            2,
            3,
            IGNORE_INDEX,
            IGNORE_INDEX,
            6,
            7,
            IGNORE_INDEX,
            IGNORE_INDEX,
            10,
            11,
        ]
    ]
    assert "position_ids" not in Stream(packed, 12, 0, boundaries=False).batch(0, 1)


@pytest.mark.parametrize(
    "analog",
    [LinearAttentionConfig(window=3), LinearAttentionConfig(window=0)],
    ids=["window", "linear"],
)
def test_documents_do_not_see_each_other(analog):
    """Packed or alone, a document has the same logits."""
    model, packed = linear_llama(analog), Stream(sequences(24, documents=3), 24, 0).batch(0, 1)
    given = {name: packed[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad(), use_mode(model, Student()):
        together = model(**given, use_cache=False).logits
        for first in (0, 8, 16):
            alone = model(packed["input_ids"][:, first : first + 8], use_cache=False).logits
            torch.testing.assert_close(together[:, first : first + 8], alone)


def test_every_token_is_in_an_epoch():
    stream = Stream(sequences(50), 8, 3)
    seen = {int(t) for batch in stream.sequential_batches(2) for t in batch["input_ids"].flatten()}
    assert seen == set(map(int, stream.text[:]))
    assert torch.equal(stream.batch(5, 2)["input_ids"][1], stream.batch(6, 1)["input_ids"][0])


def test_sources_of_every_kind(tmp_path):
    """The same record as JSON array, as lines, packed, and as a data set that `datasets` saved."""
    records = [{"instruction": f"Count {n}.", "output": str(n)} for n in range(40)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "d")
    sources = [str(tmp_path / name) for name in ("a.json", "b.jsonl", "c.json.gz")] + [
        f"hub:{tmp_path / 'd'}"
    ]
    found = [store(Data((one,)), tmp_path / str(n)) for n, one in enumerate(sources)]
    train, validation = (
        [getattr(text, part) for text in found] for part in ("train", "validation")
    )
    for one, other in zip(train + validation, train[:1] * 4 + validation[:1] * 4, strict=True):
        for ours, theirs in zip(one.read(0, len(one)), other.read(0, len(other)), strict=True):
            assert np.array_equal(ours, theirs)
    assert validation[0].read(0, len(validation[0])).begins.sum() >= 3


def test_one_text_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    found = store(Data((str(tmp_path / "a.txt"),)), tmp_path / "run")
    assert TOKENIZER.decode(found.train[:]) == "0123456789" * 9
    assert TOKENIZER.decode(found.validation[:]) == "0123456789<|endoftext|>"


def test_validation_is_from_all_over_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(ord("a") + n // 40) for n in range(1000)))
    data = Data((str(tmp_path / "a.txt"),), (str(tmp_path / "a.txt"),), length=10, held_out=50)
    validation = store(data, tmp_path / "run").validation
    assert bytes(validation[:].tolist()).decode() == "".join(letter * 10 for letter in "afkpu")
    assert np.flatnonzero(validation.read(0, 50).begins).tolist() == [0, 10, 20, 30, 40]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"text": "x"}, {"te', "record 2, is neither a JSON array nor"),
        ("a.jsonl", "not json", "neither a JSON array nor"),
        ("a.json", '[{"text": "x"}, {"words": 1}]', "record 2 has"),
        ("a.jsonl", '{"instruction": "x", "output": "y"}\n', "fewer than 20 records"),
    ],
)
def test_data_that_cannot_be_used_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        store(Data((str(tmp_path / name),)), tmp_path / "run")


def test_instructions_are_written_by_a_template_and_that_is_said(tmp_path, monkeypatch):
    record = {"instruction": "Add.", "input": "1 2", "output": "3"}
    (tmp_path / "alpaca.json").write_text(json.dumps([record] * 40))
    (tmp_path / "plain.txt").write_text("a plain text. " * 40)
    chatml = Bytes().build([])
    chatml.chat_template = CHATML
    asked = "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n"
    assert [tuple(piece) for piece in document_of(record, "here", chatml)] == [
        (asked, False, True),
        ("3<|im_end|>\n", True, True),
    ]
    notes = []
    monkeypatch.setattr(Reporter, "note", lambda _, line: notes.append(line))
    for number, (name, template) in enumerate(
        [("alpaca.json", None), ("alpaca.json", ""), ("plain.txt", None)]
    ):
        data = Data((str(tmp_path / name),), length=8, template=template)
        make_tokenizer = partial(data.set_template, deepcopy(chatml))
        folder = TextFolder(tmp_path / str(number), data, 8, make_tokenizer)
        text = chatml.decode(folder.open().train[:])
        assert text.startswith([asked, "Below is an instruction", "a plain"][number])
    assert [" ".join(note.split()[:2]) for note in notes[:2]] == [
        "template chats",
        "template none:",
    ]
    assert not any(note.startswith("template") for note in notes[2:])
