"""GGUF files wherever a model is named: dequantised once, by transformers' reader."""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from fastweights import environment
from fastweights.cli import main
from fastweights.importers import gguf as reader
from fastweights.importers import import_model
from fastweights.training.loop.checkpoint import model_source
from gguf_files import WORDS, write
from pretrained import llama


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(reader, "HF_HOME", str(tmp_path / "hub"))
    reader.dequantize.cache_clear()
    return tmp_path / "hub"


def test_a_gguf_file_is_a_model_wherever_one_is_named(tmp_path, hub, capsys) -> None:
    heard = MemoryHandler(100)
    logging.getLogger("fastweights").addHandler(heard)
    file, model = tmp_path / "tiny.gguf", llama(dtype=torch.float32, vocab_size=len(WORDS))
    write(model, file)
    folder = Path(model_source(file))
    assert folder.parent == hub / "fastweights"
    logging.getLogger("fastweights").removeHandler(heard)
    [said] = [record.getMessage() for record in heard.buffer]
    assert said.startswith(f"{file} is dequantised: ")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for read in (LlamaForCausalLM.from_pretrained(folder), import_model(file)):
            torch.testing.assert_close(read(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    reader.dequantize.cache_clear()
    options = ["--tokens", "3", "--device", "cpu", "--temperature", "0"]
    assert main(["generate", str(file), "--prompt", "ab", "--raw", *options]) == 0
    assert capsys.readouterr().out.startswith("ab")
    assert main(["linearize", "plan", str(file)]) == 0
    assert "linear      layers 0, 1" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert main(["check", str(file), "--only", "causal", "--length", "2"]) == 0


def test_without_its_package_a_gguf_file_is_refused_at_once(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["linearize", str(file), "--out", "out", "--data", "nowhere"])
    assert "a GGUF file, needs gguf: pip install gguf" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no file"):
        import_model(tmp_path / "none.gguf")


def test_what_is_no_gguf_file_is_said(tmp_path, hub) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "some.gguf"
    file.write_bytes(b"no model")
    with pytest.raises(ValueError, match="cannot be read as a causal language model"):
        model_source(file)
    assert not any((hub / "fastweights").iterdir())
