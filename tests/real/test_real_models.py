"""The two pretrained models of `make real`, through the command, as a user goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.linearize import LinearAttentionConfig, linearize, place_landmarks
from fastweights.training.data.corpus import tokenize_sources
from fastweights.training.loop.checkpoint import model_source, save_model

MODELS = Path(__file__).parents[2] / "models"
SMOLLM2, GEMMA = (str(MODELS / f"{name}.gguf") for name in ("smollm2", "gemma3"))
BOTH = [SMOLLM2, GEMMA]
GREEDY = ["--temperature", "0", "--tokens", "30"]
pytestmark = pytest.mark.real


def run(*words: object, said: str | None = None) -> subprocess.CompletedProcess[str]:
    """What the command says, which must end well."""
    command = [sys.executable, "-m", "fastweights.cli", *map(str, words)]
    done = subprocess.run(command, input=said, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """SmolLM2 as a model of this library."""
    folder = tmp_path_factory.mktemp("models") / "imported"
    run("import", SMOLLM2, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def linearized(tmp_path_factory) -> Path:
    """SmolLM2 with landmarks that nothing has been trained on."""
    folder = tmp_path_factory.mktemp("models")
    source = model_source(SMOLLM2)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokens, _ = tokenize_sources(["shakespeare"], tokenizer, None, 1024)
    texts = torch.from_numpy(tokens[:1024].astype(np.int64)).view(2, 1, 512)
    linearize(model, LinearAttentionConfig(window=64, features="landmarks", feature_dim=64))
    place_landmarks(model, ({"input_ids": ids} for ids in texts), 0)
    save_model(model, tokenizer, folder)
    return folder


@pytest.mark.parametrize("model", BOTH)
def test_they_continue_a_text(model) -> None:
    done = run("generate", model, "--prompt", "The capital of France is", "--raw", *GREEDY)
    assert len(done.stdout) > 60
    assert "is dequantised" in done.stderr


def test_a_question_is_answered(imported) -> None:
    prompt = ["--prompt", "What is the capital of France?", *GREEDY]
    for model in (SMOLLM2, imported):
        done = run("generate", model, *prompt)
        assert done.stdout.startswith("The capital of France is Paris")
        assert done.stderr.count("chat template") == 1


def test_a_chat_goes_on_where_it_was_saved(linearized, tmp_path) -> None:
    file = tmp_path / "chat.safetensors"
    lines = f"What is the capital of France?\n/save {file}\nAnd of Italy?\n"
    whole = run("chat", linearized, *GREEDY, said=lines)
    assert "Paris" in whole.stdout
    assert "memory grows" not in whole.stderr
    rest = run("chat", linearized, *GREEDY, "--load", file, said="And of Italy?\n")
    assert "with their state" in rest.stderr
    assert whole.stdout.endswith(rest.stdout)


def test_gemma_has_no_template_to_chat_by() -> None:
    command = [sys.executable, "-m", "fastweights.cli", "chat", GEMMA]
    done = subprocess.run(command, input="Hello\n", capture_output=True, text=True)
    assert done.returncode == 2
    assert "has no chat template" in done.stderr


@pytest.mark.parametrize("model", BOTH)
def test_laws_hold_of_them(model, tmp_path) -> None:
    found = tmp_path / "found.json"
    run("check", model, "--only", "causal,cached", "--length", 40, "--json", found)
    assert json.loads(found.read_text())


@pytest.mark.parametrize("model", BOTH)
def test_conversions_of_them_are_planned(model) -> None:
    assert "linear      layers" in run("linearize", "plan", model).stdout


def test_the_imported_one_is_analysed(imported, tmp_path) -> None:
    run("analyze", imported, "--text", "shakespeare", "--tokens", 64, "--out", tmp_path / "page")
    assert any((tmp_path / "page").iterdir())
