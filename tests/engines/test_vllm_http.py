"""Our models over HTTP: vLLM's server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fastweights.training.data.tokenizers import Bytes
from fastweights.training.loop.checkpoint import save_model
from http_server import ask, ask_stream, http_server
from tiny import tiny

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("vllm")

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
PROMPTS = ["ROMEO:", "a", "To be, or not to be, that is the question: " * 3]
COUNT = 12


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, Any]]:
    """The address, the model and its tokenizer."""
    folder, words = tmp_path_factory.mktemp("served"), Bytes().build([])
    words.chat_template = TEMPLATE
    model = tiny("hybrid", torch.float32, vocab_size=len(words))
    save_model(model, words, folder / "model")
    command = ["vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    command += ["--served-model-name", "m", "--host", "localhost", "--dtype", "float32"]
    command += ["--max-model-len", "512", "--max-num-batched-tokens", "64"]
    few = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with http_server(command, folder / "server.log", **few) as address:
        yield address, model, words


def _expected(model: Any, words: Any, text: str) -> list[int]:
    ids = words(text, return_tensors="pt", add_special_tokens=False).input_ids
    answer = model.generate(ids, max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    return answer[0, ids.shape[1] :].tolist()


def _completion(address: str, prompt: str, **body: Any) -> dict[str, Any]:
    fields = {"max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True, **body}
    return ask(address, "completions", prompt=prompt, add_special_tokens=False, **fields)


def test_completions_are_those_of_generate(served: tuple[str, Any, Any]) -> None:
    address, model, words = served
    for prompt in PROMPTS:
        assert _completion(address, prompt)["token_ids"] == _expected(model, words, prompt)


def test_a_chat_is_read_by_its_template(served: tuple[str, Any, Any]) -> None:
    address, model, words = served
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": PROMPTS[0]}]
    fields = {"max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
    answer = ask(address, "chat/completions", messages=messages, **fields)
    text = f"<system>Short.\n<user>{PROMPTS[0]}\n<assistant>"
    assert answer["token_ids"] == _expected(model, words, text)
    assert answer["message"]["role"] == "assistant"


def test_a_stream_is_the_answer_in_parts(served: tuple[str, Any, Any]) -> None:
    address, *_ = served
    whole = _completion(address, PROMPTS[0])["text"]
    fields = {"max_tokens": COUNT, "ignore_eos": True, "add_special_tokens": False}
    parts = ask_stream(address, "completions", prompt=PROMPTS[0], **fields)
    assert len(parts) > 1
    assert "".join(part["text"] for part in parts) == whole
    chat = [{"role": "user", "content": PROMPTS[0]}]
    fields = {"max_tokens": COUNT, "ignore_eos": True}
    whole = ask(address, "chat/completions", messages=chat, **fields)["message"]["content"]
    parts = ask_stream(address, "chat/completions", messages=chat, **fields)
    assert "".join(part["delta"].get("content") or "" for part in parts) == whole


def test_clients_that_leave_do_not_change_others(served: tuple[str, Any, Any]) -> None:
    address, model, words = served
    expected = [_expected(model, words, prompt) for prompt in PROMPTS]

    def leave(prompt: str) -> None:
        fields = {"max_tokens": 300, "ignore_eos": True}
        ask_stream(address, "completions", most=2, prompt=prompt[::-1], **fields)

    with ThreadPoolExecutor(24) as clients:
        asked = [clients.submit(_completion, address, prompt) for prompt in PROMPTS * 6]
        gone = [clients.submit(leave, prompt) for prompt in PROMPTS * 2]
        assert [one.result()["token_ids"] for one in asked] == expected * 6
        assert all(one.result() is None for one in gone)
