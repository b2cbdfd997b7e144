"""A layer of transformers' cache whose size does not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from fastweights.linearize.convert.errors import CannotLinearize
from fastweights.linearize.convert.transformers_seams import cache_layer, replace_cache_layer
from fastweights.models.cache import BatchFirstCache


class StateLayer(BatchFirstCache, CacheLayerMixin):
    """A layer of a cache that holds a linear state in place of keys and values.

    Attributes:
        state: What a branch keeps of all tokens so far, a tuple of batch-first tensors; None before
            the first token.
        tokens: Number of tokens that it has seen.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: tuple[Tensor, ...] | None = None
        self.tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes held for all sequences together."""
        return sum(tensor.nbytes for tensor in self.state or ())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: older ones are in the state."""
        self.is_initialized = True
        self.tokens += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes as if all tokens were kept; they determine the masks of the softmax
        layers."""
        return self.tokens + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def apply(self, f: Callable[[Tensor], Tensor]) -> None:
        self.state = None if self.state is None else tuple(map(f, self.state))

    def reset(self) -> None:
        self.state, self.tokens, self.is_initialized = None, 0, False

    def offload(self) -> None:
        self.apply(lambda x: x.to("cpu", non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                "a linear state cannot forget its last tokens; copy.deepcopy the cache before"
                " feeding them"
            )


def ensure_state_layer(cache: Cache, index: int) -> StateLayer:
    """Return the layer `index` of `cache`, replaced by a `StateLayer` if it is still empty.

    Raises:
        CannotLinearize: If the cache is not a plain ``DynamicCache``, or a softmax layer has used
            it.
    """
    if not isinstance(cache, DynamicCache) or cache.offloading:
        kind = (
            "an offloaded cache" if isinstance(cache, DynamicCache) else f"a {type(cache).__name__}"
        )
        raise CannotLinearize(
            kind,
            "a linearized layer keeps a state of constant size instead of keys and values",
            "pass no cache, or a plain transformers.DynamicCache()",
        )
    found = cache_layer(cache, index)
    if isinstance(found, StateLayer):
        return found
    if found.is_initialized:
        raise CannotLinearize(
            f"layer {index} of this cache",
            "it holds keys and values that a softmax layer has seen, and not a linear state",
            "begin a new cache, and feed the text again",
        )
    state = StateLayer()
    replace_cache_layer(cache, index, state)
    return state


def require_keys_and_values(cache: Cache, index: int) -> None:
    """Check that softmax attention can read the layer `index` of `cache`.

    Raises:
        CannotLinearize: If the layer holds a linear state, which has no keys and values.
    """
    if index < len(cache.layers) and isinstance(cache.layers[index], StateLayer):
        raise CannotLinearize(
            f"layer {index} of this cache",
            "it holds a linear state, and softmax attention needs all keys and values",
            "begin a new cache, and feed the text again",
        )


def cache_bytes(cache: Cache) -> int:
    """Return the memory that a cache takes.

    Args:
        cache: The cache of a linearized model, or of a softmax model.

    Returns:
        Bytes for all sequences together, of linear states and of softmax layers' keys and values.
    """
    return sum(map(_layer_bytes, cache.layers))


def _layer_bytes(layer: Any) -> int:
    if isinstance(layer, StateLayer):
        return layer.nbytes
    return sum(x.nbytes for x in (layer.keys, layer.values) if isinstance(x, torch.Tensor))
