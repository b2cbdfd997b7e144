"""`fastweights transformers serve`: our folders and linearized ones in transformers' own server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serving.model_manager import ModelManager

from fastweights.engines.transformers.serve import serve_ours, serve_rounded
from fastweights.models import Int8Linear, quantize
from fastweights.training.data.tokenizers import Bytes
from http_server import ask, ask_stream, http_server
from pretrained import linear_llama, llama
from tiny import tiny

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
NEW = 6
MODELS = ("ours", "linearized", "softmax")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per model, each with a tokenizer of bytes and a chat template."""
    tokenizer, place = Bytes().build([]), tmp_path_factory.mktemp("models")
    tokenizer.chat_template = TEMPLATE
    made = {
        "ours": lambda **fields: tiny("hybrid", torch.float32, **fields),
        "linearized": lambda **fields: linear_llama(dtype=torch.float32, **fields),
        "softmax": lambda **fields: llama(dtype=torch.float32, **fields),
    }
    for name in MODELS:
        ends = ("bos_token_id", "eos_token_id", "pad_token_id")
        special = {end: getattr(tokenizer, end) for end in ends}
        made[name](vocab_size=len(tokenizer), **special).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    return place


def expected(folder: Path, prompt: str) -> str:
    """The greedy continuation."""
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**ids, max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_server_loads_the_class_of_a_folder(folders: Path, name: str) -> None:
    """Without code of the checkpoint, and again after another."""
    serve_ours()
    serve_ours()
    manager = ModelManager(device="cpu")
    model, tokenizer = manager.load_model_and_processor(f"{folders / name}@main")
    manager.loaded_models[f"{folders / name}@main"].delete_model()
    assert type(model).__module__.split(".")[0] in ("fastweights", "transformers")
    assert (
        type(model).__name__
        == json.loads((folders / name / "config.json").read_text())["architectures"][0]
    )
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize("name", MODELS)
def test_the_server_quantizes_what_it_loads(
    folders: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelManager, "_load_model", ModelManager._load_model)
    serve_ours()
    serve_rounded(8)
    serve_rounded(8)
    manager = ModelManager(device="cpu")
    model, _ = manager.load_model_and_processor(f"{folders / name}@main")
    manager.loaded_models[f"{folders / name}@main"].delete_model()
    assert isinstance(model.lm_head, Int8Linear)


@pytest.mark.parametrize("make", [tiny, linear_llama])
def test_continuous_batching_is_refused_in_words(make: Any) -> None:
    model = make()
    with pytest.raises(NotImplementedError, match="keeps states, and the continuous batching"):
        model.init_continuous_batching()
    with pytest.raises(NotImplementedError, match="without --continuous-batching"):
        model.generate_batch([[1, 2]])


def start(folder: Path, *words: str) -> AbstractContextManager[str]:
    """The address of a server."""
    command = ["fastweights.cli", "transformers", "serve", *words, "--device=cpu"]
    return http_server(command, folder / "server.log")


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[str]:
    with start(folders) as address:
        yield address


@pytest.fixture(scope="module")
def batching_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start(tmp_path_factory.mktemp("batching"), "--continuous-batching") as address:
        yield address


def complete(address: str, model: Path, prompt: str) -> str:
    return ask(address, "completions", model=str(model), prompt=prompt, max_tokens=NEW)["text"]


def pieces_of(address: str, way: str, **body: Any) -> list[str]:
    """The texts that are streamed."""
    choices = ask_stream(address, way, max_tokens=NEW, **body)
    found = [c["text"] if "text" in c else c["delta"].get("content") for c in choices]
    return [text for text in found if text]


def settled(text: str) -> str:
    """Without a character that has begun and not ended, which is not streamed."""
    return text.rstrip("\ufffd")


@pytest.mark.serving
@pytest.mark.parametrize("name", MODELS)
class TestServer:
    def test_completions_are_those_of_generate(self, server, folders, name) -> None:
        assert complete(server, folders / name, "Once") == expected(folders / name, "Once")

    def test_completions_are_streamed(self, server, folders, name) -> None:
        pieces = pieces_of(server, "completions", model=str(folders / name), prompt="Once")
        assert len(pieces) > 1
        assert settled("".join(pieces)) == settled(complete(server, folders / name, "Once"))

    def test_a_chat_is_streamed(self, server, folders, name) -> None:
        given = {"model": str(folders / name), "messages": [{"role": "user", "content": "Hi"}]}
        whole = ask(server, "chat/completions", max_tokens=NEW, **given)
        pieces = pieces_of(server, "chat/completions", **given)
        text = whole["message"]["content"]
        assert text == expected(folders / name, "user: Hi\nassistant: ")
        assert len(pieces) > 1
        assert settled("".join(pieces)) == settled(text)

    def test_requests_at_once_do_not_see_each_other(self, server, folders, name) -> None:
        prompts = ["Once", "Upon a time", "a", "There was nothing"]
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: complete(server, folders / name, prompt), prompts))
        assert found == [expected(folders / name, prompt) for prompt in prompts]


@pytest.mark.serving
@pytest.mark.parametrize("name", ["ours", "linearized"])
def test_asking_for_continuous_batching_is_answered(batching_server, folders, name) -> None:
    with pytest.raises(HTTPError) as refused:
        complete(batching_server, folders / name, "Once")
    assert refused.value.code == 400
    assert "without --continuous-batching" in json.loads(refused.value.read())["detail"]


@pytest.mark.serving
def test_one_model_for_all_requests(folders: Path) -> None:
    """A server that is started with a folder loads it at once, and needs no name."""
    with start(folders / "ours", str(folders / "ours")) as address:
        found = ask(address, "completions", model=None, prompt="Once", max_tokens=NEW)
        assert found["text"] == expected(folders / "ours", "Once")


@pytest.mark.serving
def test_a_server_of_weights_of_bytes(folders: Path) -> None:
    with start(folders / "ours", str(folders / "ours"), "--int8") as address:
        found = ask(address, "completions", model=None, prompt="Once", max_tokens=NEW)
        model = AutoModelForCausalLM.from_pretrained(folders / "ours")
        tokenizer = AutoTokenizer.from_pretrained(folders / "ours")
        ids = tokenizer("Once", return_tensors="pt")
        new = quantize(model).generate(**ids, max_new_tokens=NEW, do_sample=False)[0, 4:]
        assert found["text"] == tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.serving
def test_chat_talks_to_the_server(server: str, folders: Path) -> None:
    command = [sys.executable, "-m", "fastweights.cli", "transformers", "chat"]
    model = str(folders / "ours")
    done = subprocess.run(
        [*command, model, f"{server}/v1", "max_new_tokens=3", "do_sample=False"],
        input="Hi\n",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "3 tokens in" in done.stdout
