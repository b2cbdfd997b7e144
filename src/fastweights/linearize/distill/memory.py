"""The memory of a conversion beside its softmax, from shapes alone, in the checkpoint's dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from fastweights.linearize.convert.attention_layers import AttentionLayer, find_attention_layers
from fastweights.linearize.convert.cache import cache_bytes
from fastweights.linearize.distill.plan import ConversionPlan, skeleton

LENGTHS = (128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class CacheSize:
    """What the caches of one sequence take after some tokens, in bytes.

    Attributes:
        tokens: Tokens read.
        softmax: Keys and values of all layers.
        linear: The states and windows of linear layers, and what the others keep.
    """

    tokens: int
    softmax: int
    linear: int


@dataclass(frozen=True)
class Memory:
    """The memory of a conversion beside its softmax.

    Attributes:
        sizes: What caches take after ever more tokens, as far as the model has positions.
        break_even: From how many tokens on the linear layers take less than they did.
    """

    sizes: tuple[CacheSize, ...]
    break_even: int


def positions_of(config: PretrainedConfig) -> int | None:
    """Return how many positions a model has; None for no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def cache_memory(source: str, planned: ConversionPlan, window: int) -> Memory:
    """Compute what the caches of a conversion take, without the model's weights.

    Args:
        source: The softmax model: a folder, or a name on the Hugging Face hub.
        planned: The numbers of its conversion, with the layers that are linear in the end.
        window: Tokens of the windows, which are full at all lengths given.
    """
    model = skeleton(source)
    attentions = find_attention_layers(model)
    reach = positions_of(model.config) or LENGTHS[-1]
    sizes = [
        CacheSize(tokens, whole, whole - tokens * planned.cache_per_token + planned.state)
        for tokens in LENGTHS
        if window <= tokens <= reach
        for whole in [_softmax_bytes(model, attentions, tokens)]
    ]
    return Memory(tuple(sizes), planned.break_even)


def _softmax_bytes(
    model: PreTrainedModel, attentions: Iterable[AttentionLayer], tokens: int
) -> int:
    """What transformers' own cache keeps, which is less of layers with sliding windows."""
    cache = DynamicCache(config=model.config)
    empty = partial(torch.empty, dtype=model.dtype, device="meta")
    for attention in attentions:
        sizes = 1, attention.kv_heads, tokens
        keys, values = empty(*sizes, attention.head_dim), empty(*sizes, attention.value_dim)
        cache.update(keys, values, attention.layer)
    return cache_bytes(cache)
