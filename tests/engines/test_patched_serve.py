"""`transformers serve` below our command: completions over HTTP are those of the model.

transformers' server needs fastapi, uvicorn and openai (its extra `serving`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from fastweights.training.data.tokenizers import Bytes
from running import LONGEST
from transformers_families import build_family

pytestmark = pytest.mark.slow
for needed in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(needed)

PROMPT = "hello there"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture(params=["bamba", "mamba", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small model of a family with a tokenizer of bytes."""
    tokenizer = Bytes().build([])
    model = build_family(request.param, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def server(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    words = ["fastweights.cli", "patch", "-m", "transformers.cli.transformers", "serve"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path[1:]), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", *words, str(folder), "--device", "cpu", "--port", str(port)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(LONGEST)


def ask(port: int, path: str, **content: Any) -> Any:
    """What the server answers, once it is there."""
    request = Request(
        f"http://localhost:{port}/{path}",
        data=json.dumps(content).encode() if content else None,
        headers={"Content-Type": "application/json"},
    )
    end = time.monotonic() + LONGEST
    while True:
        try:
            with urlopen(request, timeout=LONGEST) as answer:
                return json.load(answer)
        except URLError as error:
            if time.monotonic() > end or not isinstance(error.reason, ConnectionError):
                raise
            time.sleep(0.2)


def test_completions_are_those_of_the_model(
    folder: Path, server: subprocess.Popen[str], port: int
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ask(port, "health")
    settings = {"model": str(folder), "prompt": PROMPT, "max_tokens": 8, "temperature": 0.0}
    answer = ask(port, "v1/completions", **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    chosen = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    expected = tokenizer.decode(chosen, skip_special_tokens=True)
    assert answer["choices"][0]["text"] == expected
    assert len(chosen) == 8
    server.send_signal(signal.SIGINT)
    _, said = server.communicate(timeout=LONGEST)
    assert "fastweights: computed" in said
    assert "much slower" not in said
