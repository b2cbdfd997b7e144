"""A layer of transformers' cache whose size does not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from fastweights.linearize.convert.attention_layers import CannotLinearize
from fastweights.linearize.convert.past import BranchTokens
from fastweights.linearize.convert.transformers_seams import cache_layer, replace_cache_layer
from fastweights.models.cache import (
    LAST,
    LONGEST_PAST,
    WORTH_READING_APART,
    BatchFirstCache,
)

Kept = tuple[Tensor, ...] | None
"""What the cache keeps of all tokens so far, a tuple of batch-first tensors; None for none."""


class StateHolder(Protocol):
    """What writes a state where it lies, token by token."""

    def state(self) -> tuple[Tensor, ...]:
        """Return a copy of the state as it is now."""
        ...


@dataclass(frozen=True, eq=False)
class RewindPoint:
    """Where a layer's state can go back to.

    Attributes:
        state: The state before some tokens.
        since: The records that the layer has evaluated since.
        after: Function (state, record) → the state after it.
    """

    state: Kept
    since: tuple[BranchTokens, ...]
    after: Callable[[Kept, Any], Kept]

    @property
    def tokens(self) -> int:
        """How many tokens were read since."""
        return sum(map(len, self.since))

    def state_after(self, tokens: int) -> Kept:
        """Compute the state after the first so many of the tokens since."""
        state = self.state
        for record in self.since:
            if tokens > 0:
                state = self.after(state, record[:tokens])
            tokens -= len(record)
        return state


class StateLayer(BatchFirstCache, CacheLayerMixin):
    """A layer of a cache that holds a linear state in place of keys and values.

    Attributes:
        state: What a branch keeps of all tokens so far, a tuple of batch-first tensors; None before
            the first token.
        tokens: Number of tokens that it has seen.
        records: Whether it keeps what `crop` needs.
        past: What `crop` goes back to; None for nothing.
        holder: What has the state, which is a copy then; None for this layer itself.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.records = False
        self.state = None
        self.tokens = 0
        self.past: RewindPoint | None = None

    @property
    def state(self) -> Kept:
        return self._state if self.holder is None else self.holder.state()

    @state.setter
    def state(self, state: Kept) -> None:
        self._state, self.holder = state, None

    def lend(self, holder: StateHolder) -> None:
        """Let `holder` have the state, until another one is set."""
        self._state: Kept = None
        self.holder: StateHolder | None = holder

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the layer has: a state of its own."""
        return {**self.__dict__, "_state": self.state, "holder": None}

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
        self.past = None

    def reset(self) -> None:
        self.state, self.tokens, self.past, self.is_initialized = None, 0, None, False

    def offload(self) -> None:
        self.apply(lambda x: x.to("cpu", non_blocking=True))

    def activate_past_recording(self) -> None:
        """From now on, keep what `crop` needs; the name is transformers'."""
        self.records = True

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take back the last tokens."""
        return self.records

    def record(self, record: BranchTokens, after: Callable[[Kept, Any], Kept]) -> Iterator[Any]:
        """Cut `record` in parts that are to be evaluated one after the other.

        Where there are many tokens that `crop` will not take back, they are the first part.
        """
        settled = len(record) - LAST
        if settled > WORTH_READING_APART:
            yield record[:settled]
            self.past, record = None, record[settled:]
        past = self.past
        if past is None or past.tokens + len(record) > LONGEST_PAST:
            past = RewindPoint(self.state, (), after)
        self.past = RewindPoint(past.state, (*past.since, record), after)
        yield record

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens read since the last call, −n of them; 0 settles them all.

        Raises:
            NotImplementedError: There is no copy of the state before so many tokens.
        """
        past, self.past = self.past, None
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        if tokens_to_remove == 0:
            return
        known = 0 if past is None else past.tokens
        if past is None or not 0 < -tokens_to_remove <= known:
            raise NotImplementedError(
                f"crop({tokens_to_remove}): a linear state cannot forget its last tokens, and this"
                f" cache can go back to before {known} of them at most; call"
                " activate_past_recording before feeding what is to be taken back and give crop"
                " minus how many, or copy.deepcopy the cache"
            )
        self.state = past.state_after(known + tokens_to_remove)
        self.tokens += tokens_to_remove


def ensure_state_layer(cache: Cache, index: int) -> StateLayer:
    """Return the layer `index` of `cache`, replaced by a `StateLayer` if it is still empty.

    Raises:
        CannotLinearize: If the cache is not a plain ``DynamicCache``, or a softmax layer has used
            it.
    """
    cache = require_dynamic(cache)
    found = cache_layer(cache, index)
    if isinstance(found, StateLayer):
        return found
    if found.is_initialized:
        raise CannotLinearize(
            f"layer {index} of this cache",
            "it holds keys and values that a softmax layer has seen, and not a linear state",
            "convert it by fastweights.linearize.convert_cache, or begin a new cache and feed the"
            " text again (PEFT's prefix tuning is impossible: use"
            " prompt tuning, whose tokens the state reads, or LoRA)",
        )
    state = StateLayer()
    replace_cache_layer(cache, index, state)
    return state


def require_dynamic(cache: Cache) -> DynamicCache:
    """Check that linear layers can keep their states in `cache`, and return it.

    Raises:
        CannotLinearize: If the cache is not a plain ``DynamicCache``.
    """
    if isinstance(cache, DynamicCache) and not cache.offloading:
        return cache
    kind = "an offloaded cache" if isinstance(cache, DynamicCache) else f"a {type(cache).__name__}"
    raise CannotLinearize(
        kind,
        "a linearized layer keeps a state of constant size instead of keys and values",
        "pass no cache, or a plain transformers.DynamicCache()",
    )


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
