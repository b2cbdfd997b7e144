"""Chats: what a model reads of each turn, what is saved, and what a chat template makes of
prompts."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from chat_templates import CHATML, GEMMA3, QWEN3
from fastweights.cli import main
from fastweights.cli.chat_session import ChatSession, end_tokens
from fastweights.cli.verbs import chat as verb
from fastweights.errors import CheckpointError, DataError
from fastweights.generate import Decoder
from fastweights.training.data.tokenizers import END_OF_TEXT, Bytes
from fastweights.training.loop.checkpoint import save_model
from pretrained import linear_llama, llama
from tiny import tiny

SIZE = {"vocab_size": 258}
MODELS: dict[str, Callable[[], Any]] = {
    "ours": lambda: tiny("metala", torch.float64, **SIZE),
    "hybrid": lambda: tiny("softmax", torch.float64, **SIZE),
    "linearized": lambda: linear_llama(chosen=[0], **SIZE),
    "of transformers": lambda: llama(**SIZE),
}
CPU = ["--device", "cpu", "--temperature", "0"]


def tokenizer_with(template: str = CHATML) -> PreTrainedTokenizerFast:
    tokenizer = Bytes().build(())
    tokenizer.chat_template = template
    return tokenizer


class Answers:
    """Says texts in turn, whatever the logits are, and remembers these."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *texts: str) -> None:
        ids = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        self.tokens, self.logits = chain.from_iterable(ids), list[Tensor]()

    def __call__(self, logits: Tensor) -> Tensor:
        self.logits.append(logits)
        return torch.tensor([next(self.tokens)])


def session_of(model: Any, *texts: str, template: str = CHATML) -> tuple[ChatSession, Answers]:
    tokenizer = tokenizer_with(template)
    answers: Any = Answers(tokenizer, *texts)
    return ChatSession(model, tokenizer, answers, note=_notes.append), answers


_notes: list[str] = []


@pytest.fixture(autouse=True)
def notes() -> list[str]:
    _notes.clear()
    return _notes


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """How many tokens were read at a time."""
    counts, before = list[int](), Decoder.read

    def counted(self: Decoder, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        counts.append(ids.shape[1])
        return before(self, ids, mask)

    monkeypatch.setattr(Decoder, "read", counted)
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_a_turn_reads_what_is_new_and_knows_all_before(name, read, notes) -> None:
    model = MODELS[name]()
    session, answers = session_of(model, f"yes{END_OF_TEXT}", f"no{END_OF_TEXT}")
    assert "".join(session.ask("Is it?", 9)) == "yes"
    read.clear()
    assert "".join(session.ask("And now?", 9)) == "no"
    text = (
        "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert session.text == text + "no"
    assert max(read) < len(text.encode()) - len("<|im_start|>user\nIs it?<|im_end|>\n")
    assert notes == []
    ids = torch.tensor([session.tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, -1]
    torch.testing.assert_close(answers.logits[len("yes") + 1], expected)
    assert [message["content"] for message in session.messages] == [
        *("Is it?", "yes"),
        *("And now?", "no"),
    ]


@pytest.mark.parametrize(
    ("template", "answer"), [(QWEN3, "<think>\nhm\n</think>\n\nyes"), (GEMMA3, "yes \n")]
)
def test_a_template_that_rewrites_turns_has_them_read_again(template, answer, notes) -> None:
    session, _ = session_of(
        MODELS["ours"](), f"{answer}{END_OF_TEXT}", f"no{END_OF_TEXT}", template=template
    )
    assert "".join(session.ask("Is it?", 99)) == answer
    assert "".join(session.ask("And now?", 99)) == "no"
    [said] = notes
    assert said.startswith("reading the whole conversation again")
    assert said.endswith("; its template writes earlier turns otherwise now")


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_conversation_goes_on_as_if_nothing_were(name, tmp_path, read) -> None:
    model, file = MODELS[name](), tmp_path / "chat.safetensors"
    texts = [f"yes{END_OF_TEXT}", f"no{END_OF_TEXT}"]
    session, answers = session_of(model, *texts)
    list(session.ask("Is it?", 9))
    assert session.save(file, "this").startswith("2 messages and ")
    list(session.ask("And now?", 9))
    again, others = session_of(model, texts[1])
    again.load(file, "this")
    read.clear()
    list(again.ask("And now?", 9))
    assert max(read) < len("<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n") + 30
    assert again.messages == session.messages
    assert torch.equal(others.logits[0], answers.logits[len("yes") + 1])


def test_a_conversation_with_another_model_is_read_again(tmp_path, notes) -> None:
    file = tmp_path / "chat.safetensors"
    session, _ = session_of(MODELS["ours"](), f"yes{END_OF_TEXT}")
    list(session.ask("Is it?", 9))
    session.save(file, "this")
    again, _ = session_of(MODELS["linearized"](), f"no{END_OF_TEXT}")
    again.load(file, "another")
    assert "".join(again.ask("And now?", 9)) == "no"
    assert notes[0].startswith("reading the whole conversation again")
    file.write_bytes(b"zz")
    with pytest.raises(CheckpointError, match="holds no conversation"):
        again.load(file, "this")


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(notes) -> None:
    session, _ = session_of(MODELS["ours"](), "yes", f"no{END_OF_TEXT}")
    assert list(session.ask("Is it?", 9, stop=lambda: True)) == []
    assert session.messages == []
    assert "taken back" in notes[0]
    stops = chain([False] * 3, repeat(True))
    assert "".join(session.ask("Is it?", 9, stop=lambda: next(stops))) == "ye"
    assert session.messages[1:] == [{"role": "assistant", "content": "ye"}]
    assert "".join(session.ask("Go on", 9)) == "no"
    assert notes[1:] == []


def test_a_question_that_a_template_refuses_changes_nothing() -> None:
    refuse = "{{- raise_exception('no') }}"
    session, _ = session_of(MODELS["ours"](), template=refuse)
    with pytest.raises(DataError, match="does not fit the tokenizer's chat template: no"):
        list(session.ask("Is it?", 9))
    assert session.messages == []


def test_the_end_of_a_turn_ends_an_answer() -> None:
    tokenizer = tokenizer_with(GEMMA3)
    tokenizer.add_tokens(["<end_of_turn>"])
    ends = end_tokens(MODELS["ours"](), tokenizer)
    assert tokenizer.convert_tokens_to_ids("<end_of_turn>") in ends
    assert tokenizer.eos_token_id in ends


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model that chats."""
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny("metala", torch.float32, **SIZE), tokenizer_with(), folder)
    return folder


def say(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_the_command_chats_saves_and_loads(folder, tmp_path, monkeypatch, capsys) -> None:
    file = str(tmp_path / "one chat.safetensors")
    monkeypatch.chdir(tmp_path)
    say(monkeypatch, "Hello", "", f"/save {file}", "And?", "/load nowhere", "/save", "/exit", "no")
    assert main(["chat", str(folder), "--tokens", "5", *CPU]) == 0
    first = capsys.readouterr()
    assert "2 messages and " in first.err
    assert "nowhere holds no conversation" in first.err
    assert "/save needs a file" in first.err
    say(monkeypatch, "And?")
    assert main(["chat", str(folder), "--tokens", "5", "--load", file, *CPU]) == 0
    second = capsys.readouterr()
    assert "2 messages from" in second.err
    assert first.out.endswith(second.out)
    assert len(second.out) > 1
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_stops_an_answer_and_not_the_chat(folder, monkeypatch, capsys) -> None:
    before, read = Decoder.read_next, []

    def interrupted(self: Decoder, token: Tensor) -> Tensor:
        read.append(token)
        if len(read) == 3:
            signal.raise_signal(signal.SIGINT)
        return before(self, token)

    monkeypatch.setattr(Decoder, "read_next", interrupted)
    say(monkeypatch, "Hello", "/save")
    assert main(["chat", str(folder), "--tokens", str(10**9), *CPU]) == 0
    assert len(read) == 3
    assert "/save needs a file" in capsys.readouterr().err


def test_ctrl_c_between_answers_keeps_the_conversation(folder, tmp_path, monkeypatch, capsys):
    lines = iter(["Hello"])

    def interrupted(_: str) -> str:
        if line := next(lines, None):
            return line
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "input", interrupted, raising=False)
    say(monkeypatch)
    assert main(["chat", str(folder), "--tokens", "5", *CPU]) == 130
    [kept] = (tmp_path / "runs" / "chats").iterdir()
    assert kept.name in capsys.readouterr().err


def test_a_chat_needs_a_template(tmp_path, capsys) -> None:
    save_model(tiny("metala", torch.float32, **SIZE), Bytes().build(()), tmp_path)
    assert main(["chat", str(tmp_path), *CPU]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_memory_that_grows_is_said(tmp_path, monkeypatch, capsys) -> None:
    save_model(llama(dtype=torch.float32, **SIZE), tokenizer_with(), tmp_path)
    say(monkeypatch, "Hello", "Go on")
    assert main(["chat", str(tmp_path), "--tokens", "2", *CPU]) == 0
    assert capsys.readouterr().err.count("memory grows with this conversation") == 1


def test_a_prompt_is_a_question_unless_it_is_raw(folder, tmp_path, capsys) -> None:
    prompt = ["--prompt", "Hello", "--tokens", "5", *CPU]
    assert main(["generate", str(folder), *prompt]) == 0
    answer = capsys.readouterr()
    assert not answer.out.startswith("Hello")
    assert answer.err.count("chat template") == 1
    assert main(["generate", str(folder), *prompt, "--raw"]) == 0
    raw = capsys.readouterr()
    assert raw.out.startswith("Hello")
    assert raw.err == ""
    linear_llama(dtype=torch.float32, **SIZE).save_pretrained(tmp_path)
    tokenizer_with().save_pretrained(tmp_path)
    asked = ["linearize", "generate", str(tmp_path), "Hello", "--tokens", "5", *CPU]
    said = []
    for options in ([], ["--prompt-by", "softmax"], ["--raw"]):
        assert main([*asked, *options]) == 0
        said.append(capsys.readouterr().out)
    assert [text.startswith("Hello") for text in said] == [False, False, True]


def test_an_answer_that_is_only_an_end_is_said(tmp_path, monkeypatch, capsys) -> None:
    model = tiny("metala", torch.float32, **SIZE)
    tokenizer = tokenizer_with()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.generation_config.eos_token_id = 0  # the likeliest of equals
    save_model(model, tokenizer, tmp_path)
    for raw in ([], ["--raw"]):
        assert main(["generate", str(tmp_path), "--prompt", "Hello", *raw, *CPU]) == 0
        assert "the model ended the text at once" in capsys.readouterr().err
    say(monkeypatch, "Hello")
    assert main(["chat", str(tmp_path), *CPU]) == 0
    assert "the model ended its answer at once" in capsys.readouterr().err
