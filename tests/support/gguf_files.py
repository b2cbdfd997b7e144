"""Llamas and Qwens as GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

from chat_templates import CHATML

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
WORDS = ["<|end|>", "a", "b", "ab", "cd", *"cdefghijklmnopqrstuvwxyz"]


def write(model: LlamaForCausalLM | Qwen2ForCausalLM, file: Path, kind: str = "F32") -> None:
    """A model and a tokenizer, as llama.cpp has them, with matrices of a type of GGUF's."""
    gguf: Any = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(file, model.config.model_type)
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
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHATML)
    tensors = model.state_dict()
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in WHOLE.items()}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in PARTS.items():
            for end in ("weight", "bias"):
                names[f"blk.{layer}.{theirs}.{end}"] = f"model.layers.{layer}.{ours}.{end}"
    tied = config.tie_word_embeddings
    for theirs, ours in names.items():
        if ours not in tensors or (tied and ours == "lm_head.weight"):
            continue
        weight, paired = tensors[ours], config.model_type == "llama"
        if paired and (
            "attn_q" in theirs or "attn_k" in theirs
        ):  # pairs of channels stand side by side
            halves = weight.unflatten(0, (-1, 2, config.head_dim // 2))
            weight = halves.transpose(1, 2).reshape(weight.shape)
        values, stored = weight.float().numpy(), gguf.GGMLQuantizationType[kind]
        if kind == "F32" or weight.ndim == 1:
            writer.add_tensor(theirs, values)
        else:
            writer.add_tensor(theirs, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
