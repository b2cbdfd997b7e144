"""A preview of a conversion, computed without the model's weights: what it changes and what it
costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from fastweights.linearize.convert.attention_layers import AttentionLayer, find_attention_layers
from fastweights.linearize.convert.cache import StateLayer, cache_bytes
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.conversion import choose_layers, require_softmax
from fastweights.linearize.convert.rotary import positions_of
from fastweights.linearize.convert.rules import branch_of
from fastweights.linearize.distill.recipe import (
    AdaptationConfig,
    LinearizationRecipe,
    StageConfig,
)

ADAM = 4 * 4
"""Bytes per trained parameter in float32: itself, its gradient, and AdamW's two averages."""
LENGTHS = (128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class StagePlan:
    """The numbers of one stage of a planned conversion.

    Attributes:
        name: Name of the stage.
        steps: Updates.
        length: Tokens per sequence.
        tokens: Tokens that are trained on.
        trained: Number of parameters that are trained.
        stored: Bytes of the teacher's logits that are stored before it.
    """

    name: str
    steps: int
    length: int
    tokens: int
    trained: int
    stored: int


@dataclass(frozen=True)
class LayerCache:
    """What one attention layer keeps of a sequence, in bytes.

    Attributes:
        layer: The layer's number.
        token: Of one token, the keys and values that softmax reads; a latent cache (MLA) has less.
        window: The tokens of its sliding window; None if it has none.
        state: Of all tokens where the layer is linear, once its own window is full; None where it
            stays softmax.
    """

    layer: int
    token: int
    window: int | None
    state: int | None

    def after(self, length: int) -> int:
        """Return what it keeps after `length` tokens."""
        return self.as_softmax(length) if self.state is None else self.state

    def as_softmax(self, length: int) -> int:
        """Return what it keeps after `length` tokens where it is softmax."""
        return self.token * (length if self.window is None else min(length, self.window - 1))


@dataclass(frozen=True)
class ConversionPlan:
    """The numbers of a planned conversion; bytes are per sequence, unless they are of weights.

    Attributes:
        model_type: Type of the softmax model, such as "llama".
        parameters: Number of the model's parameters, without the branches.
        converted: The attentions that become linear.
        left: The layers that stay softmax, each with the reason.
        branch: Number of the branches' parameters.
        adapter: The most parameters that a stage of the whole model trains; 0 if there is none.
        state: Bytes of the converted layers' states and windows, when full; they stay constant
            then.
        cache_per_token: Bytes of keys and values that the same layers keep per token before
            conversion.
        weights: Bytes of the weights.
        training: Bytes that training needs besides them, without activations.
        stages: The stages, in their order.
        caches: What each attention keeps of a sequence after the conversion.
    """

    model_type: str
    parameters: int
    converted: tuple[AttentionLayer, ...]
    left: tuple[tuple[int, str], ...]
    branch: int
    adapter: int
    state: int
    cache_per_token: int
    weights: int
    training: int
    stages: tuple[StagePlan, ...]
    caches: tuple[LayerCache, ...]

    @property
    def break_even(self) -> int:
        """The number of tokens from which on the state is smaller than the cache was."""
        return -(-self.state // self.cache_per_token)


def plan(
    source: str | PreTrainedModel,
    recipe: LinearizationRecipe = LinearizationRecipe(),
    *,
    layers: Iterable[int] | None = None,
    length: int = 1024,
    dtype: torch.dtype | None = None,
) -> ConversionPlan:
    """Compute what a conversion changes in a model and what it costs, without loading the weights.

    Args:
        source: A model, a folder or a name on the Hugging Face hub; only the configuration is read.
        recipe: What replaces softmax attention, and how it is trained.
        layers: Numbers of the layers to convert; None for all that are converted by default.
        length: Tokens per training sequence, of stages that do not say their own.
        dtype: Dtype of the weights; None for the configuration's, or float32.

    Raises:
        CannotLinearize: If `linearize` would raise it.
    """
    model = source if isinstance(source, PreTrainedModel) else skeleton(source, dtype)
    chosen = choose_layers(model, layers)
    attentions = find_attention_layers(model)
    parameters = sum(p.numel() for p in model.parameters())
    branch = sum(_branch_parameters(attention, recipe) for attention in chosen)
    states = {a.layer: _state_bytes(a, recipe.analog, model.dtype) for a in chosen}
    paths = [attention.path for attention in chosen]
    trained = [stage.trained.count(model, paths, branch) for stage in recipe.stages]
    return ConversionPlan(
        model_type=model.config.model_type,
        parameters=parameters,
        converted=tuple(chosen),
        left=tuple(
            (attention.layer, attention.skip_reason or "not chosen")
            for attention in attentions
            if attention.layer not in states
        ),
        branch=branch,
        adapter=max(
            (n for n, stage in zip(trained, recipe.stages, strict=True) if not stage.by_layer),
            default=0,
        ),
        state=sum(states.values()),
        cache_per_token=sum(_key_value_bytes(attention, model.dtype) for attention in chosen),
        weights=parameters * model.dtype.itemsize + branch * torch.float32.itemsize,
        training=ADAM * max(trained, default=0),
        stages=tuple(
            _plan_stage(stage, count, stage.length or length)
            for stage, count in zip(recipe.stages, trained, strict=True)
        ),
        caches=tuple(
            LayerCache(a.layer, _key_value_bytes(a, model.dtype), a.window, states.get(a.layer))
            for a in attentions
        ),
    )


def _key_value_bytes(attention: AttentionLayer, dtype: torch.dtype) -> int:
    """What a cache of softmax keeps of one token."""
    return attention.kv_heads * (attention.head_dim + attention.value_dim) * dtype.itemsize


def skeleton(source: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Build a softmax model without memory for its weights.

    Args:
        source: A folder, or a name on the Hugging Face hub.
        dtype: Dtype of the weights; None for the configuration's, or float32.

    Raises:
        CannotLinearize: If it is no softmax model that generates text.
    """
    config = AutoConfig.from_pretrained(source)
    require_softmax(config, f"{source} ({config.model_type})")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype or getattr(config, "dtype", None) or torch.float32
        )


def _branch_parameters(attention: AttentionLayer, recipe: LinearizationRecipe) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in branch_of(recipe.analog, attention).parameters())


def _state_bytes(
    attention: AttentionLayer, analog: LinearAttentionConfig, dtype: torch.dtype
) -> int:
    """What the cache holds once the window is full.

    Its keys and values grow by the same bytes per token, which small windows tell.
    """
    window, small = analog.window, 2
    if window <= small or analog.head_windows:
        return _cache_bytes(attention, analog, dtype)
    two, three = (
        _cache_bytes(attention, replace(analog, window=tokens), dtype)
        for tokens in (small, small + 1)
    )
    return two + (window - small) * (three - two)


def _cache_bytes(
    attention: AttentionLayer, analog: LinearAttentionConfig, dtype: torch.dtype
) -> int:
    """What the cache holds after as many tokens as the window and the sinks have."""
    branch, memory = branch_of(analog, attention), StateLayer()
    tokens = max(1, *analog.windows_of(attention)) + analog.sinks
    with torch.no_grad():
        branch(*attention.zeros(tokens, dtype), None, None, memory)
    return memory.nbytes


def _plan_stage(stage: StageConfig, trained: int, length: int) -> StagePlan:
    tokens = stage.fit.steps * stage.fit.batch * length
    stored = 0
    if isinstance(stage, AdaptationConfig) and stage.loss.kl and stage.loss.teacher.top_k:
        # of every token k numbers of tokens, and the log shares of these and of the rest
        stored = tokens * (2 * stage.loss.teacher.top_k + 1) * torch.float32.itemsize
    return StagePlan(stage.name, stage.fit.steps, length, tokens, trained, stored)


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


def cache_memory(source: str, planned: ConversionPlan, window: int) -> list[CacheSize]:
    """Compute what the caches of a conversion take after ever more tokens, as far as the model has
    positions, without its weights.

    Args:
        source: The softmax model: a folder, or a name on the Hugging Face hub.
        planned: The numbers of its conversion, with the layers that are linear in the end.
        window: Tokens of the windows, which are full at all lengths given.
    """
    model = skeleton(source)
    attentions = find_attention_layers(model)
    reach = positions_of(model.config) or LENGTHS[-1]
    return [
        CacheSize(tokens, whole, whole - tokens * planned.cache_per_token + planned.state)
        for tokens in LENGTHS
        if window <= tokens <= reach
        for whole in [_softmax_bytes(model, attentions, tokens)]
    ]


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
