"""Models of other libraries, small, with random weights; and how far ours are from them once
imported.

`reference_models.py`, run with tests/support on the path, prints the table of docs/importing.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.utils import logging

from fastweights import FastWeightsCache, FastWeightsForCausalLM
from fastweights.importers import import_model
from oracles.transcriptions import TRANSCRIPTIONS

VOCABULARY, PROMPT, DECODED = 61, 21, 64
COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of logits, and the largest logit: prefill and decoding."""

    prefill: float
    decode: float
    largest: float
    same_tokens: bool


@dataclass(frozen=True)
class Original:
    """A model of transformers: its type and the settings that make it small.

    Attributes:
        cached: whether it decodes from its cache; that of RWKV in transformers 5.23 is wrong
            for more than one sequence
    """

    kind: str
    settings: dict[str, object]
    cached: bool = True

    def build(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = CONFIG_MAPPING[self.kind](**COMMON, **self.settings)
        config._experts_implementation = "eager"
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
        return stirred(model)


def stirred(model: PreTrainedModel) -> PreTrainedModel:
    """The model with every parameter moved off its start, so that none is idle."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.squeeze().dim() < 2:
                parameter.add_(0.3 * drawn)
            else:
                parameter.copy_(drawn * parameter[0].numel() ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


RIGHT_FROM = {"Mamba-2": "5.23", "RecurrentGemma": "5.20", "Bamba": "5.23"}
"""The first transformers whose own model is known to compute what its paper says: Mamba-2 of 5.20
and Bamba of 5.17 do not, those between were not tried.
"""


def is_right(name: str) -> bool:
    """Whether the installed transformers' own model is the one to agree with."""
    return Version(transformers.__version__) >= Version(RIGHT_FROM.get(name, "0"))


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside, other libraries compute in float64 what they insist on computing in float32."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(torch, "float32", torch.float64),
            mock.patch.object(torch, "float", torch.float64),
            mock.patch.object(Tensor, "float", Tensor.double),
            mock.patch.object(RecurrentGemmaRglru._rnn_scan, "__defaults__", (torch.float64,)),
        ):
            yield
    finally:
        torch.set_default_dtype(default)


@contextmanager
def in_float32() -> Iterator[None]:
    yield


PRECISIONS: dict[torch.dtype, Callable[[], object]] = {
    torch.float32: in_float32,
    torch.float64: in_float64,
}


def prompt(b: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (b, PROMPT), generator=torch.Generator().manual_seed(2))


Continuation = tuple[Tensor, Tensor, Tensor]
"""Logits of the prompt, its greedy continuation, and the logits that led to each of its tokens."""


@torch.no_grad()
def continued(model: PreTrainedModel, *, cached: bool) -> Continuation:
    """By the model's own means."""
    ids = prompt()
    said = model.generate(
        ids,
        do_sample=False,
        max_new_tokens=DECODED,
        output_logits=True,
        return_dict_in_generate=True,
        use_cache=cached,
    )
    return (
        model(ids, use_cache=False).logits,
        said.sequences[:, PROMPT:],
        torch.stack(said.logits, 1),
    )


@torch.no_grad()
def continued_by_ours(model: FastWeightsForCausalLM) -> Continuation:
    """Token by token, in the model's dtype."""
    cache, ids, logits = FastWeightsCache(), prompt(), []
    while len(logits) < DECODED:
        logits.append(model(ids, past_key_values=cache, use_cache=True).logits[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
    steps = torch.stack(logits, 1)
    return model(prompt(), use_cache=False).logits, steps.argmax(-1), steps


def difference(original: Original, dtype: torch.dtype) -> Difference:
    """Between the original model and ours, each decoding by its own means."""
    with PRECISIONS[dtype]():
        model = original.build()
    ours = import_model(model)
    with PRECISIONS[dtype]():
        theirs = continued(model, cached=original.cached)
    return compared(theirs, continued_by_ours(ours))


def difference_of_transcription(name: str, dtype: torch.dtype, folder: Path) -> Difference:
    """Between the transcription, in float64 whatever `dtype` our weights have, and ours."""
    model = TRANSCRIPTIONS[name]
    weights = model.save(folder, dtype)
    ours = continued_by_ours(import_model(folder))
    logits = model.logits(weights, torch.cat([prompt(), ours[1][:, :-1]], 1))
    steps = logits[:, PROMPT - 1 :]
    return compared((logits[:, :PROMPT], steps.argmax(-1), steps), ours)


def compared(theirs: Continuation, ours: Continuation) -> Difference:
    (prefill, tokens, decoded), (our_prefill, our_tokens, our_decoded) = theirs, ours
    return Difference(
        (our_prefill - prefill).abs().max().item(),
        (our_decoded - decoded).abs().max().item(),
        prefill.abs().max().item(),
        torch.equal(tokens, our_tokens),
    )


SMALL = {"hidden_size": 32, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "layer_types": HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
LATENT = {
    **{name: HEADS[name] for name in ("num_attention_heads", "intermediate_size")},
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 5,
    "v_head_dim": 7,
    "layer_types": HYBRID,
    "mlp_layer_types": ["dense"] * 3,
}
GROUPED = {
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 10,
    "routed_scaling_factor": 2.5,
}
MINIMAX = {
    "layer_types": HYBRID,
    "head_dim": 12,
    "block_size": 8,
    **{f"{part}_alpha_factor": 1.7 for part in ("full_attn", "linear_attn", "mlp")},
    "full_attn_beta_factor": 0.8,
    "linear_attn_beta_factor": 1.3,
    "mlp_beta_factor": 0.6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}
GRANITE = {
    **MAMBA2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 24,
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "tie_word_embeddings": True,
}
NEMOTRON_KINDS = {"L": "linear_attention", "F": "full_attention", "M": "mlp", "E": "moe"}
NEMOTRON = {
    "hidden_size": 32,
    **HEADS,
    "head_dim": 12,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "ssm_state_size": 5,
    "n_groups": 2,
    "chunk_size": 8,
    "time_step_min": 1e-30,
}
FALCON_H1 = {
    **SMALL,
    **HEADS,
    **MAMBA2,
    "mamba_d_ssm": 48,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 1.1, 0.9, 1.4, 0.8],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.75,
}
JAMBA = {
    **SMALL,
    **HEADS,
    "num_hidden_layers": 4,
    "mamba_d_state": 5,
    "mamba_dt_rank": 3,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "num_experts": 1,
}
ORIGINALS: dict[str, Original] = {
    "Llama": Original("llama", {**SMALL, **HEADS}),
    "Llama 3.1": Original(
        "llama", {**SMALL, **HEADS, "rope_parameters": LLAMA3, "tie_word_embeddings": True}
    ),
    "Llama, all biases": Original(
        "llama",
        {
            **SMALL,
            **HEADS,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 100.0},
        },
    ),
    "Mistral": Original("mistral", {**SMALL, **HEADS, "sliding_window": 7}),
    "Qwen2": Original(
        "qwen2",
        {**SMALL, **HEADS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "Qwen3": Original("qwen3", {**SMALL, **HEADS, "head_dim": 12}),
    "Gemma 3": Original(
        "gemma3_text",
        {
            **SMALL,
            **HEADS,
            "head_dim": 12,
            "query_pre_attn_scalar": 7,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 20.0,
        },
    ),
    "Qwen3-Next": Original(
        "qwen3_next", {**SMALL, **HEADS, **DELTA, "head_dim": 16, "num_experts": 0}
    ),
    "Qwen3.5": Original("qwen3_5_text", {**SMALL, **HEADS, **DELTA, "head_dim": 16}),
    "Qwen3.5, experts": Original(
        "qwen3_5_moe_text",
        {
            **SMALL,
            **HEADS,
            **DELTA,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 14,
        },
    ),
    "OLMo Hybrid": Original("olmo_hybrid", {**SMALL, **HEADS, **DELTA, "rope_parameters": None}),
    "OLMo Hybrid, with RoPE": Original(
        "olmo_hybrid",
        {
            **SMALL,
            **HEADS,
            **DELTA,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "Kimi Linear": Original(
        "kimi_linear", {**SMALL, **LATENT, "linear_head_dim": 8, "linear_num_heads": 3}
    ),
    "Kimi Linear, queries of low rank": Original(
        "kimi_linear",
        {**SMALL, **LATENT, "linear_head_dim": 8, "linear_num_heads": 3, "q_lora_rank": 9},
    ),
    "Kimi Linear, experts": Original(
        "kimi_linear",
        {**SMALL, **LATENT, **GROUPED, "linear_head_dim": 8, "linear_num_heads": 3},
    ),
    "Ling 3.0": Original("bailing_hybrid", {**SMALL, **LATENT, "head_dim": 12}),
    "Ling 3.0, experts": Original(
        "bailing_hybrid",
        {**SMALL, **LATENT, **GROUPED, "head_dim": 12, "norm_topk_prob": False},
    ),
    "LFM2": Original(
        "lfm2",
        {
            **SMALL,
            **HEADS,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.3,
        },
    ),
    "LFM2, with biases": Original(
        "lfm2",
        {
            **SMALL,
            **HEADS,
            "layer_types": ["conv", "conv", "full_attention"],
            "conv_L_cache": 5,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "LFM2, experts": Original(
        "lfm2_moe",
        {
            "hidden_size": 32,
            **HEADS,
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "routed_scaling_factor": 1.5,
        },
    ),
    "MiniMax": Original(
        "minimax",
        {**SMALL, **HEADS, **MINIMAX, "num_local_experts": 1, "num_experts_per_tok": 1},
    ),
    "MiniMax, experts": Original(
        "minimax",
        {**SMALL, **HEADS, **MINIMAX, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "Qwen3-Next, experts": Original(
        "qwen3_next",
        {
            **SMALL,
            **HEADS,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 10,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 14,
            "mlp_only_layers": [1],
        },
    ),
    "Mamba-2": Original(
        "mamba2",
        {**SMALL, "num_heads": 4, "head_dim": 16, "state_size": 6, "n_groups": 2, "chunk_size": 8},
    ),
    "Bamba": Original("bamba", {**SMALL, **HEADS, **MAMBA2, "attn_layer_indices": [1]}),
    "Granite 4.0": Original(
        "granitemoehybrid",
        {**SMALL, **HEADS, **GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "Granite 4.0, experts": Original(
        "granitemoehybrid",
        {**SMALL, **HEADS, **GRANITE, "num_local_experts": 5, "intermediate_size": 10},
    ),
    "Nemotron-H": Original(
        "nemotron_h", NEMOTRON | {"layers_block_type": [NEMOTRON_KINDS[kind] for kind in "LMLFM"]}
    ),
    "Nemotron 3": Original(
        "nemotron_h",
        NEMOTRON
        | {
            "layers_block_type": [NEMOTRON_KINDS[kind] for kind in "LEFEL"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 10,
            "moe_shared_expert_intermediate_size": 12,
            "moe_latent_size": 14,
            "routed_scaling_factor": 2.5,
        },
    ),
    "Falcon-H1": Original("falcon_h1", FALCON_H1),
    "Falcon-H1, normalised": Original(
        "falcon_h1",
        {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": None},
    ),
    "Falcon-Mamba": Original("falcon_mamba", {**SMALL, "state_size": 5, "time_step_rank": 3}),
    "Jamba": Original("jamba", JAMBA),
    "Jamba, experts": Original("jamba", {**JAMBA, "num_experts": 4}),
    "RecurrentGemma": Original(
        "recurrent_gemma", {**SMALL, **HEADS, "num_key_value_heads": 1, "attention_window_size": 9}
    ),
    "RWKV-4": Original(
        "rwkv", {**SMALL, "intermediate_size": 40, "rescale_every": 0}, cached=False
    ),
    "xLSTM": Original(
        "xlstm",
        {
            **SMALL,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "chunk_size": 8,
            "eps": 0.0,
        },
    ),
    "Mamba": Original("mamba", {**SMALL, "state_size": 5, "time_step_rank": 3}),
    "Mamba, without bias": Original(
        "mamba", {**SMALL, "state_size": 4, "use_conv_bias": False, "tie_word_embeddings": False}
    ),
    "Zamba": Original(
        "zamba",
        {
            "hidden_size": 32,
            **HEADS,
            "num_hidden_layers": 2,
            "layers_block_type": ["hybrid", "hybrid"],
            "mamba_d_state": 5,
            "mamba_dt_rank": 3,
        },
    ),
    "Zamba2": Original(
        "zamba2",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "n_mamba_heads": 4,
            "mamba_d_state": 6,
            "mamba_ngroups": 2,
            "chunk_size": 8,
            "time_step_min": 1e-30,
            "adapter_rank": 3,
            "num_hidden_layers": 4,
            "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
    ),
}


def every_difference(dtype: torch.dtype, name: str) -> Difference:
    if name in ORIGINALS:
        return difference(ORIGINALS[name], dtype)
    with TemporaryDirectory() as folder:
        return difference_of_transcription(name, dtype, Path(folder) / "model")


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(
        "| original | float32: prefill | 64 decoded | float64: prefill | 64 decoded | largest"
        " logit |"
    )
    print("|---|---|---|---|---|---|")
    for name in [*ORIGINALS, *TRANSCRIPTIONS]:
        if not any(wanted in name for wanted in sys.argv[1:] or [""]):
            continue
        single, double = (every_difference(dtype, name) for dtype in PRECISIONS)
        cells = [single.prefill, single.decode, double.prefill, double.decode]
        same = "" if single.same_tokens and double.same_tokens else " (other tokens)"
        print(
            f"| {name}{same} | {' | '.join(f'{c:.1e}' for c in cells)} | {single.largest:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
