"""Conversations by the templates of well-known models: the text, its answers, and its tokens."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import ByteLevel as ByteLevelPlaces
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from chat_templates import CONVERSATIONS, GEMMA3, LLAMA3, QWEN25, STYLES, Style, turns
from fastweights.errors import DataError
from fastweights.training.data import tokenizers
from fastweights.training.data.formats import TextPiece, document_of
from fastweights.training.data.packing import (
    Framing,
    encode_documents,
    framing_between,
    framing_of_each,
    framing_of_stream,
    gather,
)
from fastweights.training.data.sources import read_documents
from fastweights.training.data.tokenizers import Bytes

MARKS = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>"]
SENTENCES = ["Die Antwort ist vier, überdies. " + " ".join(f"{n} + {n}?" for n in range(9))]
BEGIN_AND_END = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def prefixed_bytes() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def sentencepiece(trained: Tokenizer) -> Tokenizer:
    """As Llama 2's: the whole text is one word, with a blank before it."""
    content = json.loads(trained.to_str())
    tokenizer = Tokenizer.from_str(json.dumps({**content, "pre_tokenizer": None}))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


KINDS = {
    "byte-level": (byte_level, None),
    "byte-level that begins and ends": (byte_level, BEGIN_AND_END),
    "trimmed": (byte_level, ByteLevelPlaces(trim_offsets=True)),
    "byte-level after a blank": (prefixed_bytes, None),
    "metaspace": (metaspace, BEGIN_AND_END),
    "sentencepiece": (metaspace, BEGIN_AND_END),
}


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    make, processor = KINDS[kind]
    tokenizer = make()
    tokenizer.train_from_iterator(
        [*SENTENCES, json.dumps(CONVERSATIONS, ensure_ascii=False)],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "</s>", "<unk>", *MARKS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = sentencepiece(tokenizer) if kind == "sentencepiece" else tokenizer
    if processor is not None:
        tokenizer.post_processor = processor
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def with_template(template: str, kind: str = "byte-level") -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = template
    return tokenizer


def accepted(style: Style) -> dict[str, list[dict[str, Any]]]:
    return {
        name: messages
        for name, messages in CONVERSATIONS.items()
        if not any(message["role"] in style.refuses for message in messages)
    }


def written(tokenizer: PreTrainedTokenizerFast, messages: Any, **given: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))


def learnt(record: Any, tokenizer: Any = None) -> list[str]:
    return [piece.text for piece in document_of(record, "here", tokenizer) if piece.response]


@pytest.mark.parametrize("name", STYLES)
def test_the_text_is_the_templates_and_its_answers_are_learnt(name: str) -> None:
    style = STYLES[name]
    tokenizer = with_template(style.template)
    for what, messages in accepted(style).items():
        document = document_of({"messages": messages}, "here", tokenizer)
        text = "".join(piece.text for piece in document)
        assert text == written(tokenizer, messages), what
        assert [p.text for p in document if p.response] == style.learnt(messages), what


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.refuses])
def test_what_a_template_refuses_is_refused_in_its_words(name: str) -> None:
    record = {"messages": CONVERSATIONS["system"]}
    with pytest.raises(DataError, match=r"here does not fit .* template: (System|roles) "):
        document_of(record, "here", with_template(STYLES[name].template))


def touched(document: list[TextPiece], tokenizer: PreTrainedTokenizerFast) -> list[bool]:
    """Whether each token stands for a character of an answer, one character after the other."""
    text = "".join(piece.text for piece in document)
    inside = [piece.response for piece in document for _ in piece.text]
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [any(inside[a:b]) for a, b in places["offset_mapping"]]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STYLES)
def test_packed_conversations_have_the_templates_tokens(name: str, kind: str) -> None:
    """No token more, before the first, between, and behind the last, whatever frames documents."""
    style, tokenizer = STYLES[name], with_template(STYLES[name].template, kind)
    chats = accepted(style)
    documents = [document_of({"messages": one}, "here", tokenizer) for one in chats.values()]
    expected = [
        tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        for messages in chats.values()
    ]
    untrimmed = tokenizer_of(kind.replace("trimmed", "byte-level"))
    flags = [flag for document in documents for flag in touched(document, untrimmed)]
    for framing in (framing_of_each(tokenizer), framing_between(tokenizer)):
        packed, _ = gather(encode_documents(tokenizer, map(iter, documents), framing), framing)
        begins = [*packed.begins(0, len(packed)), len(packed)]
        parts = [packed.tokens[a:b].tolist() for a, b in pairwise(begins)]
        assert parts == expected
        assert packed.response.tolist() == flags


def test_texts_around_conversations_are_framed_as_before() -> None:
    """An end of text stands between a conversation and a text, and between two texts."""
    tokenizer = with_template(STYLES["ChatML"].template)
    chat = {"messages": CONVERSATIONS["one turn"]}
    records = [chat, {"text": "one"}, {"text": "two"}, chat, chat]
    framing = framing_of_stream(tokenizer)
    documents = [iter(document_of(record, "here", tokenizer)) for record in records]
    packed, _ = gather(encode_documents(tokenizer, documents, framing), framing)
    starts = [*packed.begins(0, len(packed)), len(packed)]
    parts = [tokenizer.decode(packed.tokens[a:b]) for a, b in pairwise(starts)]
    text = written(tokenizer, chat["messages"])
    assert parts == [text, "</s>one", "</s>two</s>", text, text]


def test_begin_and_end_tokens_of_a_text_are_not_doubled() -> None:
    tokenizer = tokenizer_of("byte-level that begins and ends")
    framing = framing_of_each(tokenizer)
    for text in ("vier", "<s>vier", "vier</s>", "<s>vier</s>"):
        document = iter(document_of({"text": text}, "here", tokenizer))
        packed, _ = gather(encode_documents(tokenizer, [document], framing), framing)
        assert tokenizer.decode(packed.tokens) == "<s>vier</s>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("names", "prompt", "answer"),
    [
        (("prompt", "response"), "ask", "say 2 + 2 überdies"),
        (("prompt", "completion"), "ask ", "say"),
        (("prompt", "completion"), "ask", "\n\nsay"),
        (("instruction", "output"), "Sing.", "la"),
    ],
)
def test_prompts_and_answers_have_the_tokens_of_their_text(
    names: tuple[str, str], prompt: str, answer: str, kind: str
) -> None:
    tokenizer = deepcopy(tokenizer_of(kind))
    tokenizer.chat_template = None
    framing = framing_of_each(tokenizer)
    document = document_of(dict(zip(names, (prompt, answer), strict=True)), "here", tokenizer)
    packed, _ = gather(encode_documents(tokenizer, [iter(document)], framing), framing)
    text = "".join(piece.text for piece in document)
    whole = tokenizer(text, add_special_tokens=False).input_ids
    assert packed.tokens.tolist() == [*framing.before, *whole, *framing.after]
    responses = packed.response[len(framing.before) : len(packed) - len(framing.after)]
    untrimmed = tokenizer_of(kind.replace("trimmed", "byte-level"))
    assert responses.tolist() == touched(document, untrimmed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_tokens_of_the_whole(kind: str, monkeypatch) -> None:
    """However it is cut, and read on from the middle."""
    monkeypatch.setattr(tokenizers, "_PIECE", 20)
    tokenizer, text = tokenizer_of(kind), "Die Antwort\nist vier, \n überdies. " * 20
    pieces = [TextPiece(piece, True) for piece in tokenizers.pieces(text)]
    parts = [*encode_documents(tokenizer, [iter(pieces)], Framing())]
    assert len(parts) > 10
    found, _ = gather(parts, Framing())
    assert found.tokens.tolist() == tokenizer(text, add_special_tokens=False).input_ids
    (again,) = tokenizers.encode_texts(tokenizer, [text])
    assert again.tolist() == found.tokens.tolist()
    rest = [*encode_documents(tokenizer, [iter(pieces)], Framing(), skip=5)]
    for part, same in zip(rest, parts[5:], strict=True):
        assert [run.tokens.tolist() for run in part.runs] == [
            run.tokens.tolist() for run in same.runs
        ]


ASKED, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
RECORDS = {
    "messages": {"messages": [ASKED, ANSWER]},
    "parts": {"messages": [ASKED, {**ANSWER, "content": [{"type": "text", "text": "hello"}]}]},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    },
    "conversations of roles": {"conversations": [ASKED, ANSWER]},
    "prompt and completion": {"prompt": [ASKED], "completion": [ANSWER]},
    "a table's empty fields": {
        "messages": [{**ASKED, "tool_calls": None}, {**ANSWER, "name": None}],
        "tools": None,
    },
    "tools as JSON": {"messages": [ASKED, ANSWER], "tools": "[]"},
}


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("template", [None, STYLES["ChatML"].template, GEMMA3])
def test_conversations_are_read_in_every_form(name: str, template: str | None) -> None:
    tokenizer = None if template is None else with_template(template)
    plain = document_of(RECORDS["messages"], "here", tokenizer)
    assert document_of(RECORDS[name], "here", tokenizer) == plain
    assert len([piece for piece in plain if piece.response]) == 1


def test_only_answers_of_the_completion_are_learnt() -> None:
    chat = turns("a", "b", "c", "d")
    record = {"prompt": chat[:3], "completion": chat[3:]}
    assert learnt(record, with_template(STYLES["ChatML"].template)) == ["d<|im_end|>\n"]
    assert learnt(record, with_template(STYLES["marked"].template)) == ["d<|im_end|>"]
    assert learnt(record) == ["d\n"]


def test_answers_of_no_weight_are_not_learnt() -> None:
    chat = turns("a", "b", "c", "d")
    chat[1]["weight"] = 0
    assert learnt({"messages": chat}) == ["d\n"]
    assert learnt({"messages": [{**one, "train": one is chat[3]} for one in chat]}) == ["d\n"]
    with pytest.raises(DataError, match=r'here: a message has "weight": 0.5; it is 0 or 1'):
        learnt({"messages": [{**chat[1], "weight": 0.5}]})


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALLED = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four."},
]


def test_calls_of_tools_are_learnt() -> None:
    record = {"messages": CALLED, "tools": [TOOL]}
    tokenizer = with_template(QWEN25)
    call = json.dumps(CALL["function"])
    expected = [f"\n<tool_call>\n{call}\n</tool_call><|im_end|>\n", "Four.<|im_end|>\n"]
    assert [one.removeprefix("\n") for one in learnt(record, tokenizer)] == [
        one.removeprefix("\n") for one in expected
    ]
    text = "".join(piece.text for piece in document_of(record, "here", tokenizer))
    assert text == written(tokenizer, CALLED, tools=[TOOL])
    as_json = {**record, "tools": json.dumps([TOOL])}
    assert document_of(as_json, "here", tokenizer) == document_of(record, "here", tokenizer)
    llama3 = with_template(LLAMA3)
    assert learnt({"messages": CALLED}, llama3) == [f"{call}<|eom_id|>", "Four.<|eot_id|>"]
    with pytest.raises(DataError, match="here has tools, which only a chat template can write"):
        learnt(record)


def test_tools_that_a_template_does_not_write_are_refused() -> None:
    with pytest.raises(DataError, match=r'here has "tools", which .* does not write'):
        learnt({"messages": CALLED, "tools": [TOOL]}, with_template(LLAMA3))
    with pytest.raises(DataError, match=r'here has "tool_calls" in message 2, which .* not write'):
        learnt({"messages": CALLED}, with_template(REPEATING))


def test_tools_of_a_table_are_read(tmp_path: Path) -> None:
    record = {"messages": turns("hi", "hello"), "tools": json.dumps([TOOL]), "id": 3}
    pa.parquet.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    tokenizer = with_template(QWEN25)
    [document] = [[*one] for one in read_documents([str(tmp_path / "a.parquet")], tokenizer)]
    assert document == document_of(record, "here", tokenizer)
    assert "# Tools" in document[0].text


TURN = "{{ '[' + m.role + ']' + m.content + '</s>' }}"
REPEATING = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.content }}{% endfor %}"
BEHIND = {
    "the order turned around": f"{{% for m in messages | reverse %}}{TURN}{{% endfor %}}",
    "the first message repeated": f"{{% for m in messages %}}{TURN}{{% endfor %}}"
    "{{ '(asked: ' + messages[0].content + ')' }}",
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_others_say_behind_an_answer_is_not_learnt(name: str) -> None:
    with pytest.raises(DataError, match="writes message 2 so that it cannot be told"):
        learnt({"messages": [ASKED, ANSWER]}, with_template(BEHIND[name]))


def test_a_column_says_something_to_the_model() -> None:
    system = {"role": "system", "content": "Be brief."}
    whole = document_of({"messages": [system, ASKED, ANSWER]}, "here", None)
    for messages in ([ASKED, ANSWER], [system, ASKED, ANSWER]):
        assert document_of({"messages": messages, "system": "Be brief."}, "here", None) == whole


def test_missing_fields_of_tables_are_no_null_of_json(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}
    record = {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    pa.parquet.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    written = (learnt_of(tmp_path / name) for name in ("a.jsonl", "a.parquet"))
    assert ['"b": null' in text for text in written] == [True, False]


def learnt_of(path: Path) -> str:
    tokenizer = with_template(QWEN25)
    return "".join(piece.text for one in read_documents([str(path)], tokenizer) for piece in one)


def test_parts_of_a_content_are_joined_where_a_template_writes_none() -> None:
    """Of the user it takes them, of the assistant it would write how Python shows a list."""
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' %}"
        "{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
        "{{ '</s>' }}{% endfor %}"
    )
    chat = [
        {**one, "content": [{"type": "text", "text": text} for text in ("a", "b")]}
        for one in (ASKED, ANSWER)
    ]
    found = document_of({"messages": chat}, "here", with_template(template))
    assert [piece.text for piece in found] == ["[user]ab</s>[assistant]", "ab</s>"]


def test_what_a_template_always_asks_is_not_learnt() -> None:
    asks = f"{{% for m in messages %}}{TURN}{{% endfor %}}{{{{ '[assistant]' }}}}"
    chat = turns("hi", "hello", "bye", "so long")
    assert learnt({"messages": chat}, with_template(asks)) == ["hello</s>", "so long</s>"]
    alike = "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"
    assert learnt({"messages": chat}, with_template(alike)) == ["hello</s>", "so long</s>"]


REFUSED = {
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        r'here: a message has a part of type "image_url"; only .* is read',
    ),
    "chosen": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        r"here has .*answers that are preferred to others",
    ),
    "label": (
        {"prompt": "a", "completion": "b", "label": False},
        r"here has .*answers that are preferred to others",
    ),
    "sender": (
        {"conversations": [{"from": "narrator", "value": "a"}]},
        r'here: a message is "from" \'narrator\'; known are system, human,',
    ),
    "tools": (
        {"messages": [ASKED, ANSWER], "tools": "add"},
        r'here: "tools" is a list of JSON schemas',
    ),
    "no content": ({"messages": [{"role": "user"}]}, "here: every message is an object"),
    "calls": (
        {"messages": [ASKED, {**ANSWER, "tool_calls": "add"}]},
        'here: every message .*"tool_calls" a list',
    ),
    "role": (
        {"messages": [ASKED, {**ANSWER, "role": "Assistant"}]},
        r'here: a message has "role": \'Assistant\'; write \'assistant\'',
    ),
    "role of a sender": (
        {"messages": [{**ASKED, "role": "human"}, ANSWER]},
        r'here: a message has "role": \'human\'; write \'user\'',
    ),
    "option of the library": (
        {
            "messages": [ASKED, ANSWER],
            "chat_template_kwargs": {"add_generation_prompt": True},
        },
        r'here: "chat_template_kwargs" has "add_generation_prompt", which is not for a record',
    ),
    "images beside": (
        {"messages": [ASKED, ANSWER], "images": ["x"]},
        r'here has "images", and only',
    ),
    "two system turns": (
        {"system": "a", "messages": [{"role": "system", "content": "b"}, ASKED, ANSWER]},
        r'here has "system" beside messages that begin with another one',
    ),
    "history": (
        {"instruction": "a", "output": "b", "history": [["c", "d"]]},
        r'here has "history" beside an instruction',
    ),
    "number as a verdict": (
        {"prompt": "a", "completion": "b", "label": 0},
        r"here has .*answers that are preferred to others",
    ),
    "completion of a user": (
        {"prompt": [ASKED], "completion": [ASKED]},
        r'here: no message of its "completion" is an assistant\'s',
    ),
    "twice": (
        {"messages": [ASKED, ANSWER]},
        r"here: .* writes message 2 so that it cannot be told .* {% generation %}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_named(name: str) -> None:
    record, message = REFUSED[name]
    tokenizer = with_template(REPEATING) if name == "twice" else None
    with pytest.raises(DataError, match=message):
        document_of(record, "here", tokenizer)


def test_a_template_that_marks_other_answers_is_refused() -> None:
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match=r"marks 2 answers .* has 1, of which 0 are learnt"):
        learnt({"messages": [ASKED, {**ANSWER, "weight": 0}]}, with_template(marked))


def test_bytes_keep_special_tokens_of_a_template() -> None:
    tokenizer = Bytes().build(())
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    framing = framing_of_each(tokenizer)
    document = document_of({"messages": [ASKED, {**ANSWER, "content": "ü"}]}, "here", tokenizer)
    packed, _ = gather(encode_documents(tokenizer, [iter(document)], framing), framing)
    assert packed.tokens.tolist() == [*b"hi", 256, *"ü".encode(), 256]
    assert packed.response.tolist() == [False] * 3 + [True] * 3
