"""GGUF files wherever a model is named: dequantised once, by transformers' reader."""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from fastweights import environment
from fastweights.cli import main
from fastweights.importers import gguf as reader
from fastweights.importers import import_model
from fastweights.models import Int4Linear, Int8Embedding, Int8Linear, quantize
from fastweights.training.loop.checkpoint import model_source
from gguf_files import WORDS, write
from pretrained import llama


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(reader, "HF_HOME", str(tmp_path / "hub"))
    reader.dequantize.cache_clear()
    reader.keep_codes.cache_clear()
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


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Weights as floats, by the paths of their layers."""
    return {
        path: part.stored.rows(slice(None), torch.float32)
        if isinstance(part, Int4Linear | Int8Linear | Int8Embedding)
        else part.weight
        for path, part in model.named_modules()
        if getattr(part, "weight", None) is not None or hasattr(part, "stored")
    }


@pytest.mark.parametrize("read_by", ["us", "transformers"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "bits", "kept"),
    [
        ("Q4_0", 4, "proj"),
        ("Q4_1", 4, "proj"),
        ("Q8_0", 8, ""),
        ("Q8_0", 4, "embed"),
        ("F32", 4, "norm"),
    ],
)
def test_codes_of_a_file_stay(
    kind: str, bits: int, kept: str, *, tied: bool, read_by: str, tmp_path, monkeypatch
) -> None:
    """What the file holds, to the bit, where it has so many bits; the rest is rounded."""
    if read_by == "transformers":
        monkeypatch.setattr(reader, "ARCHITECTURES", {})
    sizes = {
        "vocab_size": len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "tie_word_embeddings": tied,
    }
    file = tmp_path / "tiny.gguf"
    write(llama(dtype=torch.float32, **sizes), file, kind)
    floats = LlamaForCausalLM.from_pretrained(reader.dequantize(file))
    found = LlamaForCausalLM.from_pretrained(reader.keep_codes(file, bits))
    wanted, held = weights_of(floats), weights_of(found)
    assert wanted.keys() == held.keys()
    exact = read_by == "us" or kind == "Q8_0"  # what is least of a group may be no float16
    for path, weight in held.items():
        stays = kept in path or "norm" in path
        if exact and stays:
            assert torch.equal(weight, wanted[path]), path
        torch.testing.assert_close(weight, wanted[path], rtol=0, atol=1e-3 if stays else 0.1)


@pytest.mark.parametrize("bits", [4, 8])
def test_biases_are_read_too(bits: int, tmp_path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), **sizes, **heads)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.bias.normal_()
    write(model, tmp_path / "qwen.gguf")
    found = Qwen2ForCausalLM.from_pretrained(reader.keep_codes(tmp_path / "qwen.gguf", bits))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        wanted = quantize(model, bits)(input_ids=ids).logits
        torch.testing.assert_close(found(input_ids=ids).logits, wanted, rtol=1e-3, atol=1e-3)


def test_a_file_is_rounded_wherever_bits_are_named(tmp_path, hub, capsys) -> None:
    file = tmp_path / "tiny.gguf"
    sizes = {"vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 96}
    write(llama(dtype=torch.float32, **sizes), file, "Q4_0")
    options = ["--tokens", "3", "--device", "cpu", "--int4"]
    assert main(["generate", str(file), "--prompt", "ab", "--raw", *options]) == 0
    assert main(["quantize", str(file), str(tmp_path / "few"), "--int4"]) == 0
    assert "of weights in" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "few"), "--prompt", "ab", "--raw", *options]) == 0
    [folder] = (hub / "fastweights").iterdir()
    assert folder.name.endswith("-4")  # nothing was dequantised


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
