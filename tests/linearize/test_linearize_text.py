"""Documents of every format, packed; what is learnt of them, and where they end."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch

from chat_templates import CHATML
from fastweights.models.loss import IGNORE_INDEX
from fastweights.train import BPE, Bytes, DataError
from fastweights.training.data.documents import Data, Stream
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.packing import encode_documents, framing_of_each, gather
from fastweights.training.data.sources import TextPiece, document_of
from fastweights.training.data.tokens import Sequences
from fastweights.training.loop.report import Reporter
from pretrained import sequences
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
    no = IGNORE_INDEX
    assert batch["labels"].tolist() == [[no, 1, 2, 3, no, 5, 6, 7, no, 9, 10, 11]]
    answers = Stream(packed, 12, 0, responses=True).batch(0, 1)["labels"]
    assert answers.tolist() == [[no, no, 2, 3, no, no, 6, 7, no, no, 10, 11]]
    assert "position_ids" not in Stream(packed, 12, 0, boundaries=False).batch(0, 1)


def test_every_token_is_in_an_epoch():
    stream = Stream(sequences(50), 8, 3)
    seen = {int(t) for batch in stream.sequential_batches(2) for t in batch["input_ids"].flatten()}
    assert seen == set(map(int, stream.text[:]))
    assert torch.equal(stream.batch(5, 2)["input_ids"][1], stream.batch(6, 1)["input_ids"][0])


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
