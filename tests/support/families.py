"""Tiny random models of many families, to be linearized."""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fastweights.linearize import LinearAttentionConfig, branches, linearize
from kinds import slow_but
from tolerances import SAME, error
from turned import turned

VOCABULARY = 61
LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 128,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}

_GROUPS: dict[str, dict[str, Any]] = {
    "llama qwen2 qwen3 gemma phi phi3 olmo olmo2 granite smollm3 glm glm4": {},
    "starcoder2 stablelm ernie4_5 seed_oss": {},
    "hunyuan_v1_dense gpt2 opt gpt_neox cohere helium nemotron": {},
    "persimmon biogpt arcee apertus bitnet nanochat": {},
    "gemma2 gemma3_text olmo3 cohere2 exaone4 cwm": SLIDING,
    "mixtral qwen2_moe qwen3_moe olmoe phimoe granitemoe ernie4_5_moe minimax_m2": EXPERTS,
    "deepseek_v2 deepseek_v3 glm4_moe": {**EXPERTS, **LATENT},
}
FAMILIES = {family: fields for families, fields in _GROUPS.items() for family in families.split()}
"""Types of models, and what their configurations need besides `SIZES`."""
_EACH_TIME = ("gpt2", *(families.split()[0] for families in _GROUPS))
SOME_FAMILIES = slow_but(FAMILIES, _EACH_TIME)
"""One of each group every time, and the others with the slow tests."""
CONVOLVED = {
    f"{rule}, convolved": LinearAttentionConfig(rule=rule, window=0, convolution=size)
    for rule, size in (("windowed", 2), ("gla", 4), ("gated_deltanet", 4), ("mesa", 3))
}
"""Convolutions of q and k in front of rules."""


@cache
def _made(family: str) -> Any:
    standard = AutoConfig.for_model(family)
    sizes = {
        name: size
        for name, size in {**SIZES, **FAMILIES.get(family, {})}.items()
        if hasattr(standard, name)
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()


def teacher(family: str = "llama", **fields: Any) -> Any:
    """A softmax model in eval mode, the same for the same arguments; with a softcap eager, for SDPA
    leaves it out (transformers 5.16; later ones refuse).
    """
    config = type(_made(family).config).from_dict({**_made(family).config.to_dict(), **fields})
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if capped else None
    ).eval()
    model.load_state_dict(_made(family).state_dict())
    return model


def student(
    family: str = "llama",
    analog: LinearAttentionConfig = LinearAttentionConfig(window=4),
    layers: Any = None,
    **fields: Any,
) -> Any:
    """The linearized teacher, its branches no longer as they start."""
    return shaken(linearize(teacher(family, **fields), analog, layers))


def shaken(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for branch in branches(model).values():
            for weight in branch.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
    return turned(model)


def assert_same(got: Tensor, want: Tensor, what: str = "") -> None:
    assert error(got, want) <= SAME, f"{what}: {error(got, want):.1e}"


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """What transformers returns of six tokens."""
    lengths = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    wanted = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **{**lengths, **wanted, **options})


def generated(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits they were chosen by."""
    out = generate(model, inputs, **options)
    return out.sequences, torch.stack(out.logits, 1)


def reread(model: Any, inputs: dict[str, Tensor], sequences: Tensor) -> Tensor:
    """The logits of one forward that predict what was generated."""
    before, mask = inputs["input_ids"].shape[1], inputs["attention_mask"]
    mask = torch.cat([mask, mask.new_ones(len(mask), sequences.shape[1] - before)], 1)
    full = logits(model, {"input_ids": sequences, "attention_mask": mask}, use_cache=False)
    return full[:, before - 1 : -1]


def assert_generates_as_it_reads(model: Any, inputs: dict[str, Tensor]) -> None:
    sequences, found = generated(model, inputs)
    assert_same(found, reread(model, inputs, sequences))


def held_bytes(cache: Any) -> int:
    """What a cache of states really holds on to: views keep all of their tensor."""
    tensors = [tensor for layer in cache.layers for tensor in layer.state]
    held = {x.data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}
    return sum(held.values())


def padded(pad: int = 5, t: int = 15) -> dict[str, Tensor]:
    """Two sequences of `t` tokens, the first with `pad` of padding on its left."""
    ids = torch.randint(3, VOCABULARY, (2, t), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def positions(mask: Tensor) -> Tensor:
    """As generate() counts them."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def logits(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Of all tokens ``[b t vocab]``, with the positions that generate() uses; zeros for padding."""
    mask = inputs["attention_mask"]
    with torch.no_grad():
        found = model(
            **inputs, **_placed(model, mask, inputs["input_ids"].shape[1]), **options
        ).logits
    return found * mask[..., None].to(found.dtype)


def read_anew(model: Any) -> Tensor:
    """Logits by weights in memory of their own: those of a file lie as it has them, on which the
    last digit of a sum depends.
    """
    for p in model.parameters():
        p.data = p.data.clone()
    return logits(model, padded())


def _placed(model: Any, mask: Tensor, t: int) -> dict[str, Tensor]:
    model = model.get_base_model() if isinstance(model, PeftModel) else model
    takes = "position_ids" in signature(model.forward).parameters
    return {"position_ids": positions(mask)[:, -t:]} if takes else {}
