"""`fastweights transformers serve`: our folders and linearized ones in transformers' own server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serving.model_manager import ModelManager

from fastweights.engines.transformers.serve import serve_ours, serve_rounded
from fastweights.models import Int8Linear, quantize
from fastweights.training.data.tokenizers import Bytes
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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def start(*words: str) -> Iterator[str]:
    """The address of a server that runs until the iterator ends."""
    port = free_port()
    command = [sys.executable, "-m", "fastweights.cli", "transformers", "serve", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen([*command, "--device=cpu", f"--port={port}"], env=environment)
    try:
        wait_for(f"http://localhost:{port}/health", server)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait(30)


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            with urlopen(address):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"nothing answers at {address}")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    yield from start()


@pytest.fixture(scope="module")
def batching_server() -> Iterator[str]:
    yield from start("--continuous-batching")


def ask(address: str, way: str, **body: Any) -> str:
    given = {"max_tokens": NEW, "temperature": 0} | body
    words = json.dumps(given).encode()
    request = Request(f"{address}/v1/{way}", words, {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def complete(address: str, model: Path, prompt: str) -> str:
    found = json.loads(ask(address, "completions", model=str(model), prompt=prompt))
    return found["choices"][0]["text"]


def pieces_of(stream: str) -> list[str]:
    """The texts of server-sent events."""
    told = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data:")]
    choices = [json.loads(one)["choices"][0] for one in told if one != "[DONE]"]
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
        given = {"model": str(folders / name), "prompt": "Once", "stream": True}
        pieces = pieces_of(ask(server, "completions", **given))
        assert len(pieces) > 1
        assert settled("".join(pieces)) == settled(complete(server, folders / name, "Once"))

    def test_a_chat_is_streamed(self, server, folders, name) -> None:
        given = {"model": str(folders / name), "messages": [{"role": "user", "content": "Hi"}]}
        whole = json.loads(ask(server, "chat/completions", **given))
        pieces = pieces_of(ask(server, "chat/completions", **given, stream=True))
        text = whole["choices"][0]["message"]["content"]
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
    for address in start(str(folders / "ours")):
        found = json.loads(ask(address, "completions", prompt="Once"))
        assert found["choices"][0]["text"] == expected(folders / "ours", "Once")


@pytest.mark.serving
def test_a_server_of_weights_of_bytes(folders: Path) -> None:
    for address in start(str(folders / "ours"), "--int8"):
        found = json.loads(ask(address, "completions", prompt="Once"))
        model = AutoModelForCausalLM.from_pretrained(folders / "ours")
        tokenizer = AutoTokenizer.from_pretrained(folders / "ours")
        ids = tokenizer("Once", return_tensors="pt")
        new = quantize(model).generate(**ids, max_new_tokens=NEW, do_sample=False)[0, 4:]
        assert found["choices"][0]["text"] == tokenizer.decode(new, skip_special_tokens=True)


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
