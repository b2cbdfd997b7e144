"""The states of a linearized model as a flat list of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from fastweights.engines.exported.errors import ExportError
from fastweights.engines.exported.states import StateLayout, StateTensor
from fastweights.linearize import AttentionCall, StateLayer, Student, use_mode
from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.transformers_seams import cache_layer_names
from fastweights.methods import Method, set_method
from fastweights.models.cache_names import CACHE, cache_argument
from fastweights.shapes import Output


def require_graph(config: Any) -> None:
    """Raise for a linearized model whose graph would hold more than states, keys and values.

    Args:
        config: of the model

    Raises:
        ExportError: it names what its layers keep
    """
    linear = {site["layer"] for site in config.linearize["sites"]}
    names = enumerate(cache_layer_names(config))
    kept = {name for layer, name in names if layer not in linear} - {DynamicLayer.__name__}
    if kept:
        raise ExportError(
            f"a {config.model_type} with layers that keep a {' and a '.join(sorted(kept))} is not"
            " exported, as graphs hold linear layers and softmax over all tokens; serve it as it"
            " is, by `fastweights transformers serve` or vLLM"
        )


class LinearizedStates(StateLayout):
    """What the branches of linear layers keep, and keys and values of layers that stay softmax."""

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: in evaluation mode; it reads one token

        Raises:
            ExportError: for layers that keep something else
        """
        require_graph(model.config)
        self.model = model
        kept, cache = _Kept(), DynamicCache()
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        with torch.no_grad(), use_mode(model, kept):
            model(input_ids=token, use_cache=True, **cache_argument(cache))
        self._linear = [layer in kept.before for layer in range(len(cache.layers))]
        by_layer = [
            _of_branch(number, kept.before[number]) if linear else _of_softmax(number, layer)
            for number, (linear, layer) in enumerate(zip(self._linear, cache.layers, strict=True))
        ]
        self._counts = [len(tensors) for tensors in by_layer]
        position = StateTensor("position", torch.zeros_like(token[0]))
        self.tensors = (position, *(tensor for tensors in by_layer for tensor in tensors))

    def arguments(self, tensors: Sequence[Tensor], tokens: int) -> dict[str, Any]:
        cache, rest, cached = DynamicCache(), self.restore(tensors), self._cached(tensors)
        for linear, count in zip(self._linear, self._counts, strict=True):
            own = tuple(next(rest) for _ in range(count))
            cache.layers.append(_state_layer(own, cached) if linear else _softmax_layer(*own))
        position = tensors[0]
        places = position[:, None] + torch.arange(tokens, device=position.device)
        return {"position_ids": places, **cache_argument(cache)}

    def after(
        self, given: Mapping[str, Any], tensors: Sequence[Tensor], tokens: int
    ) -> list[Tensor]:
        layers = zip(self._linear, given[CACHE].layers, strict=True)
        parts = (x.state if linear else (x.keys, x.values) for linear, x in layers)
        return [tensors[0] + tokens, *(part for own in parts for part in own)]

    def use_method(self, method: Method) -> AbstractContextManager[None]:
        return set_method(branches(self.model).values(), method)

    def _cached(self, tensors: Sequence[Tensor]) -> int:
        """The length of what grows; 0 if nothing does, as no mask reads it then."""
        pairs = zip(tensors, self.tensors, strict=True)
        return next((x.shape[s.growing] for x, s in pairs if s.growing is not None), 0)


class _Kept(Student):
    """Notes what every branch keeps before the first token."""

    def __init__(self) -> None:
        self.before: dict[int, tuple[Tensor, ...]] = {}

    def attend(self, call: AttentionCall) -> Output:
        self.before[call.layer] = call.branch.kept_before(call.q, call.k, call.v)
        return super().attend(call)


def _of_branch(layer: int, kept: Sequence[Tensor]) -> list[StateTensor]:
    return [
        StateTensor(f"layer {layer}, memory {i}", part, zero=not bool(part.any()))
        for i, part in enumerate(kept)
    ]


def _of_softmax(layer: int, cached: Any) -> list[StateTensor]:
    named = {"keys": cached.keys, "values": cached.values}
    return [
        StateTensor(f"layer {layer}, {name}", part[:, :, :0], growing=2)
        for name, part in named.items()
    ]


def _state_layer(state: tuple[Tensor, ...], tokens: int) -> StateLayer:
    layer = StateLayer()
    layer.state, layer.tokens = state, tokens
    return layer


def _softmax_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer
