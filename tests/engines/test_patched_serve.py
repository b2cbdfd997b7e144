"""`transformers serve` below our command: completions over HTTP are those of the model.

transformers' server needs fastapi, uvicorn and openai (its extra `serving`).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.training.data.tokenizers import Bytes
from http_server import ask, http_server
from transformers_families import build_family

pytestmark = pytest.mark.slow
for needed in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(needed)

PROMPT = "hello there"


@pytest.fixture(params=["bamba", "mamba", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small model of a family with a tokenizer of bytes."""
    tokenizer = Bytes().build([])
    model = build_family(request.param, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_completions_are_those_of_the_model(folder: Path, tmp_path: Path) -> None:
    command = ["fastweights.cli", "patch", "-m", "transformers.cli.transformers", "serve"]
    log = tmp_path / "log"
    with http_server([*command, str(folder), "--device", "cpu"], log, signal.SIGINT) as address:
        answer = ask(address, "completions", model=str(folder), prompt=PROMPT, max_tokens=8)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    chosen = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    assert answer["text"] == tokenizer.decode(chosen, skip_special_tokens=True)
    assert len(chosen) == 8
    said = log.read_text()
    assert "fastweights: computed" in said
    assert "much slower" not in said
