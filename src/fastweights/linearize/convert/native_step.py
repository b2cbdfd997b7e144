"""A token of one sequence through a linearized model's layers, by calls of C that are packed once.

The branches read the queries, keys and values that the model's own attentions would have given
them. Whether that is all that the model computes is tried out: the step must give the bits of the
modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from fastweights.linearize.convert.attention import attend, take_memory
from fastweights.linearize.convert.attention_layers import softmax_name
from fastweights.linearize.convert.cache import StateLayer
from fastweights.linearize.convert.modes import Student
from fastweights.linearize.convert.transformers_seams import (
    decoder_layers,
    implementation_of,
)
from fastweights.models.native_step import Call, LayerCalls, LayerModules, NativeStep, NoStepError

_TOKENS = 6
"""Tokens that are read to try a step out, the last two by it."""

_tried: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether the steps of models have the bits of their modules."""


class LinearizedStep(NativeStep):
    """The step of a linearized model of Llama's form."""

    def __init__(self, model: Any) -> None:
        self._attentions = [layer.self_attn for layer in _layers_of(model)]
        for attention in self._attentions:
            _require_attention(attention)
        self._softmax = softmax_name(implementation_of(model.config))
        super().__init__(model, hooked=(take_memory,))
        self._modes = [a.__dict__ for a in self._attentions if hasattr(a, "linear_branch")]
        if not self._has_the_modules_bits():
            raise NoStepError("its layers compute more than projections, attention and an MLP")

    def parts(self) -> Iterator[LayerModules]:
        for layer in _layers_of(self.model):
            own, mlp = layer.self_attn, layer.mlp
            yield LayerModules(
                (layer.input_layernorm, layer.post_attention_layernorm),
                (own.q_proj, own.k_proj, own.v_proj, own.o_proj),
                (mlp.gate_proj, mlp.up_proj, mlp.down_proj),
                own.q_proj.out_features // own.head_dim,
                own.k_proj.out_features // own.head_dim,
                mlp.act_fn,
            )

    def prepare_norm(self, norm: Any) -> Call:
        x, normed = self._x, self._normed

        def call() -> None:
            normed.copy_(norm.forward(x))

        return call

    def refuses_cache(self, cache: Any) -> str | None:
        if any(type(own["linear_mode"]) is not Student for own in self._modes):
            return "its layers compute something else than linear attention now"
        if len(getattr(cache, "layers", ())) != len(self._attentions):
            return "its cache is not one of its layers"
        whys = map(_refuses_layer, self._attentions, cache.layers)
        return next((why for why in whys if why is not None), None)

    def __call__(self, token: Tensor, cache: DynamicCache) -> Tensor:
        trunk, x = self.model.model, self._x
        place = torch.tensor([[cache.get_seq_length()]])
        x.copy_(trunk.embed_tokens(token[:, None]))
        turns = trunk.rotary_emb(x, position_ids=place)
        for layer, attention, memory in zip(
            self._layers, self._attentions, cache.layers, strict=True
        ):
            self.project(layer)
            self.finish(layer, self._attend(layer, attention, memory, turns))
        return self.model.lm_head(trunk.norm(x))[:, -1]

    def _attend(self, layer: LayerCalls, attention: Any, memory: Any, turns: Any) -> Tensor:
        turned = _turn_by_halves(layer.turning, *turns)
        q, k = turned[:, :, : layer.heads], turned[:, :, layer.heads :]
        k, value = memory.update(k.transpose(1, 2), layer.value)
        if isinstance(memory, StateLayer):
            return attention.linear_branch(
                q, k.transpose(1, 2), value.transpose(1, 2), None, None, memory
            )
        scaling = {"scaling": attention.scaling, "dropout": 0.0}
        return attend(self._softmax, attention, q.transpose(1, 2), k, value, None, **scaling)[0]

    @torch.inference_mode()
    def _has_the_modules_bits(self) -> bool:
        """Tried once for each model."""
        if self.model not in _tried:
            ids = torch.arange(_TOKENS)[None] % self.model.config.vocab_size
            cache = DynamicCache(config=self.model.config)
            read = {"use_cache": True, "logits_to_keep": 1, "past_key_values": cache}
            self.model(ids[:, : _TOKENS - 2], **read)
            copy = deepcopy(cache)
            last = ids[:, _TOKENS - 2 :].split(1, 1)
            wanted = [self.model(token, **read).logits[:, -1] for token in last]
            try:
                found = [self(token[:, 0], copy) for token in last]
            except (AttributeError, RuntimeError, TypeError):  # modules of other forms or arguments
                found = []
            _tried[self.model] = len(found) == 2 and all(map(torch.equal, found, wanted))
        return _tried[self.model]


def _layers_of(model: Any) -> list[Any]:
    try:
        return decoder_layers(model)
    except LookupError as error:
        raise NoStepError(f"its layers have not Llama's form ({error})") from error


def _require_attention(attention: Any) -> None:
    if not hasattr(attention, "head_dim"):
        raise NoStepError("its attention does not say how wide a head is")
    if hasattr(attention, "q_norm") or hasattr(attention, "k_norm"):
        raise NoStepError("its attention has norms of heads")
    linear = hasattr(attention, "linear_branch")
    if not linear and getattr(attention, "sliding_window", None) is not None:
        raise NoStepError("a layer is softmax in a window")
    if not linear and getattr(attention, "linear_log_scale", 0):
        raise NoStepError("a softmax layer has no positions")


def _refuses_layer(attention: Any, memory: Any) -> str | None:
    if hasattr(attention, "linear_branch"):
        if not isinstance(memory, StateLayer) or memory.state is None or memory.records:
            return "its cache is empty, or can go back"
        kept = memory.state[0]
    else:
        if type(memory) is not DynamicLayer or memory.keys is None:
            return "its cache is empty, or not of plain keys and values"
        kept = memory.keys
    if len(kept) != 1:
        return f"its cache holds {len(kept)} sequences, not one"
    return None if kept.dtype is torch.float32 else "its cache is not float32"


def _turn_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x [… k]`` by cosines and sines ``[b t k]`` of one token, as Llama does: channel i and
    channel i + k/2 are a pair."""
    first, second = x.chunk(2, -1)
    return x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None]
