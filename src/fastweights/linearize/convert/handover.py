"""What softmax has read, handed over to linear attention, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from fastweights.linearize.convert.attention import branches, use_mode
from fastweights.linearize.convert.attention_layers import CannotLinearize
from fastweights.linearize.convert.branch import LinearBranch
from fastweights.linearize.convert.cache import StateLayer, require_dynamic
from fastweights.linearize.convert.modes import Teacher
from fastweights.linearize.convert.transformers_seams import cache_layer, replace_cache_layer
from fastweights.models.cache_names import cache_argument
from fastweights.models.continuation import Continuation, continuation_of
from fastweights.recurrence.streams import ShapeError
from fastweights.shapes import Mask

PIECE = 2048
"""Tokens that are read, or put into a state, at a time."""


def read_by_softmax(model: Any, input_ids: Tensor, *, piece: int = PIECE) -> DynamicCache:
    """Read prompts by the softmax of a linearized model, and hand them over to its linear layers.

    Keys and values of all tokens are held meanwhile, and given up layer by layer.

    Args:
        model: A linearized model.
        input_ids: The prompts ``[b t]``, without padding; for prompts of several lengths see
            `convert_cache`.
        piece: Tokens that are read at a time.

    Returns:
        The model's cache after these tokens, to go on from with `generate`, `stream` or calls.
    """
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), use_mode(model, Teacher()):
        way, before = Continuation(), 0
        if piece < input_ids.shape[1]:
            way = continuation_of(model)
        for ids in way.split(input_ids, piece):
            told = way.told(ids, before)
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache_argument(cache), **told)
            before += ids.shape[1]
    return convert_cache(model, cache, piece=piece)


@torch.no_grad()
def convert_cache(
    model: Any, cache: Cache, attention_mask: Tensor | None = None, *, piece: int = PIECE
) -> DynamicCache:
    """Turn keys and values that softmax has cached into the states of linear layers, in place.

    A prompt is then read exactly, by ``use_mode(model, Teacher())`` or the model that was
    linearized, and continued in constant memory. Every state is what the layer's own recurrence
    makes of these keys and values: none depends on queries. It equals what the model would have
    read by itself in the first layer; in later ones it is made of what softmax has computed below.
    Layers that stay softmax, or slide, keep what they have.

    Args:
        model: A linearized model.
        cache: The cache; its keys and values are given up layer by layer. Copy it before by
            ``copy.deepcopy`` to keep them.
        attention_mask: ``[b s]`` or more columns, 0 for padding among the s tokens in the cache;
            None if there is none.
        piece: Tokens that are put into a state at a time, which bounds the memory it takes.

    Returns:
        `cache`.

    Raises:
        CannotLinearize: If a linear layer's keys and values are not all in the cache, or are not
            those that attention reads (as in the latent caches of MLA), or a layer convolves
            queries. Nothing has changed then.
        ShapeError: If the mask has fewer columns than the cache has tokens.
    """
    dynamic, converted = require_dynamic(cache), branches(model)
    # checks all layers before any of them is changed
    lengths = [_length(dynamic, index, branch) for index, branch in converted.items()]
    keep = _mask(attention_mask, max(lengths, default=0))
    for index, branch in converted.items():
        layer = cache_layer(dynamic, index)
        state = _state(branch, layer.keys, layer.values, keep, piece)
        replace_cache_layer(dynamic, index, state)
    return dynamic


@torch.no_grad()
def restore_cache(model: Any, cache: Cache, attention_mask: Tensor | None = None) -> DynamicCache:
    """Turn the states of linear layers back into keys and values for softmax, in place.

    That is possible, and exact, as long as all tokens lie within the window: those before it have
    left no keys behind. Padding gets zeros, which its mask hides.

    Args:
        model: A linearized model.
        cache: Its cache, of at most window - 1 tokens besides padding.
        attention_mask: As in `convert_cache`.

    Returns:
        `cache`, as ``use_mode(model, Teacher())`` goes on from it.

    Raises:
        CannotLinearize: If a token has left the window, or a layer has none. Nothing has changed
            then.
        ShapeError: If the mask has fewer columns than the cache has tokens.
    """
    dynamic, restored = require_dynamic(cache), DynamicCache(config=model.config)
    for index, branch in branches(model).items():
        keys, values = _tokens_in_window(branch, cache_layer(dynamic, index), attention_mask)
        cache_layer(restored, index).update(keys, values)
    for index in branches(model):
        replace_cache_layer(dynamic, index, cache_layer(restored, index))
    return dynamic


def _length(cache: DynamicCache, index: int, branch: LinearBranch) -> int:
    """How many tokens a layer has cached, if all keys and values are there and are attention's."""
    layer, attention = cache_layer(cache, index), branch.attention
    if branch.convolution is not None:
        raise _not_convertible(
            index,
            "it goes on from the last queries, which its convolution reads, and softmax caches"
            " keys and values alone",
            "let the linear layers read the text themselves",
        )
    keys, values, tokens = layer.keys, layer.values, layer.get_seq_length()
    if keys is None or tokens == 0:
        kind = "a linear state" if isinstance(layer, StateLayer) else "no token"
        raise _not_convertible(
            index,
            f"it holds {kind}, and not the keys and values of softmax",
            "let softmax read a text into a new cache, by use_mode(model, Teacher())",
        )
    there, wanted = (
        f"{g} heads of {k} and {v} channels"
        for g, k, v in (
            (keys.shape[1], keys.shape[-1], values.shape[-1]),
            (attention.kv_heads, attention.head_dim, attention.value_dim),
        )
    )
    if there != wanted:
        raise _not_convertible(
            index,
            f"it has keys and values in {there}, and attention reads {wanted}: they are latent"
            " (MLA), or of another model",
            "let the linear layers read the text themselves",
        )
    if keys.shape[-2] != tokens:
        raise _not_convertible(
            index,
            f"it slides, and has {keys.shape[-2]} of {tokens} tokens",
            "let the linear layers read the text themselves",
        )
    return tokens


def _state(
    branch: LinearBranch, keys: Tensor, values: Tensor, keep: Mask | None, piece: int
) -> StateLayer:
    """What the branch keeps of keys and values ``[b g s ·]``."""
    memory, heads = StateLayer(), branch.attention.heads
    memory.update(keys, values)
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    # no state depends on queries
    q = k.new_zeros(1, 1, 1, 1).expand(*k.shape[:2], heads, k.shape[-1])
    for start in range(0, k.shape[1], piece):
        part = slice(start, start + piece)
        kept = None if keep is None else keep[:, part]
        branch(q[:, part], k[:, part], v[:, part], kept, None, memory)
    return memory


def _tokens_in_window(
    branch: LinearBranch, state: Any, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Keys and values ``[b g s ·]`` of all tokens, zeros for padding."""
    index = branch.attention.layer
    if not isinstance(state, StateLayer) or state.state is None:
        raise _not_convertible(
            index, "it holds no linear state", "let the linear layers read a text into a new cache"
        )
    keys, values, there = branch.cached_tokens(state.state)
    keep = _mask(attention_mask, state.tokens)
    if keep is None:
        keep = there.new_ones(len(there), state.tokens)
    if not torch.equal(there.sum(1), keep.sum(1)):
        raise _not_convertible(
            index,
            f"it has read {int(keep.sum(1).max())} tokens and keeps keys and values of"
            f" {int(there.sum(1).max())}; those that have left the window are in its state alone",
            "copy.deepcopy a softmax cache before it is converted, or feed the text again",
        )
    return _spread(keys, there, keep), _spread(values, there, keep)


def _spread(stream: Tensor, there: Mask, keep: Mask) -> Tensor:
    """The tokens of ``[b g s ·]`` that are there, at the places of those that are kept."""
    b, g, _, width = stream.shape
    found = stream.new_zeros(b, keep.shape[1], g, width)
    found[keep] = stream.transpose(1, 2)[there]
    return found.transpose(1, 2)


def _mask(attention_mask: Tensor | None, tokens: int) -> Mask | None:
    """``[b tokens]``, False for padding; None if there is none."""
    if attention_mask is None:
        return None
    if attention_mask.shape[1] < tokens:
        raise ShapeError(
            f"attention_mask has {attention_mask.shape[1]} columns, must be one for each of the"
            f" {tokens} tokens in the cache at least"
        )
    keep = attention_mask[:, :tokens].bool()
    return None if bool(keep.all()) else keep


def _not_convertible(index: int, why: str, fix: str) -> CannotLinearize:
    return CannotLinearize(f"layer {index} of this cache", why, fix)
