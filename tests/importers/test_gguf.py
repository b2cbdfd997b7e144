"""GGUF files wherever a model is named: dequantised once, by transformers' reader."""

from __future__ import annotations

import logging
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from chat_templates import CHATML
from fastweights import environment
from fastweights.cli import main
from fastweights.importers import gguf as reader
from fastweights.importers import import_model
from fastweights.training.loop.checkpoint import model_source
from pretrained import llama

PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
WORDS = ["<|end|>", "a", "b", "ab", *"cdefghijklmnopqrstuvwxyz"]


def write(model: LlamaForCausalLM, file: Path) -> None:
    """A Llama in float32, and a tokenizer, as llama.cpp has them."""
    gguf: Any = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, *[1] * (len(WORDS) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHATML)
    tensors = model.state_dict()
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in WHOLE.items()}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in PARTS.items():
            names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
    for theirs, ours in names.items():
        weight = tensors[ours]
        if "attn_q" in theirs or "attn_k" in theirs:  # pairs of channels stand side by side
            halves = weight.unflatten(0, (-1, 2, config.head_dim // 2))
            weight = halves.transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(theirs, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
