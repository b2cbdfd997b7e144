"""What vLLM's settings have to be for our models."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from fastweights.engines.vllm.attentions import ServedAttentions, mark_as_hybrid
from fastweights.engines.vllm.forms import KeptKeys, all_keys, kept_by
from fastweights.linearize import AttentionLayer

WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of heads that vLLM's attention on a CPU knows."""


class ServedSettings(VerifyAndUpdateConfig):
    """Checks of vLLM's settings for a `FastWeightsForCausalLM`, before anything is loaded."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse what our models cannot do, and tell vLLM of their heads."""
        refuse_unsupported(vllm_config)
        model = vllm_config.model_config
        config = model.hf_config
        positions = config.learnt_positions
        if positions is not None and model.max_model_len > positions:
            raise ValueError(
                f"the model has learnt_positions = {positions}, and max_model_len is"
                f" {model.max_model_len}; pass --max-model-len {positions}"
            )
        keys = list(all_keys(kept_by(config, model.dtype)))
        if keys:
            set_heads(model, {(one.heads, one.groups, head_width(one)) for one in keys})


class LinearizedSettings(VerifyAndUpdateConfig):
    """Checks of vLLM's settings for a linearized model, before anything is loaded."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse what linearized models cannot do, and tell vLLM of the heads that stay softmax."""
        refuse_unsupported(vllm_config)
        model = vllm_config.model_config
        if not model.is_hybrid:
            mark_as_hybrid(model.hf_config)
        softmax = ServedAttentions.of(model.hf_config, model.dtype).softmax
        if softmax:
            set_heads(model, {(one.heads, one.kv_heads, head_width(one)) for one in softmax})


def head_width(kept: KeptKeys | AttentionLayer) -> int:
    """The width that vLLM keeps keys and values in: the least one that has room for both.

    Raises:
        ValueError: If a head is wider than any that vLLM knows.
    """
    linearized = isinstance(kept, AttentionLayer)
    widest = max((kept.head_dim, kept.value_dim) if linearized else (kept.keys, kept.values))
    if widest > WIDTHS[-1]:
        raise ValueError(f"heads of {widest} channels; vLLM's attention knows {WIDTHS[-1]} at most")
    return next(width for width in WIDTHS if width >= widest)


def set_heads(model: Any, heads: set[tuple[int, int, int]]) -> None:
    """Tell vLLM of the softmax layers' (heads, groups, width), which are alike in all of them.

    Raises:
        ValueError: If they differ.
    """
    if len(heads) > 1:
        raise ValueError(
            f"the softmax layers without a window have (heads, groups, width) {sorted(heads)}, and"
            " vLLM has pages of one size; make them alike, or give them windows"
        )
    arch = model.model_arch_config
    ((arch.total_num_attention_heads, arch.total_num_kv_heads, arch.head_size),) = heads


def refuse_unsupported(vllm_config: Any) -> None:
    """Refuse settings of vLLM that would not do what they say.

    Raises:
        ValueError: There is one.
    """
    parallel = vllm_config.parallel_config
    for setting, refused in {
        "--tensor-parallel-size": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--speculative-config": vllm_config.speculative_config is not None,
        "--enable-lora": vllm_config.lora_config is not None,
        "--quantization": vllm_config.model_config.quantization is not None,
    }.items():
        if refused:
            raise ValueError(
                f"fastweights' models are served without {setting}; leave it out. More processes"
                " serve by --data-parallel-size; an adapter is merged by merge_and_unload() of PEFT"
            )
