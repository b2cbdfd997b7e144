"""Validation of what models are given, with errors that say what to change."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.models.cache import FastWeightsCache
from fastweights.shapes import Embedded, Mask


def keep_mask_of(attention_mask: Tensor | None, x: Embedded, seen: int) -> Mask | None:
    """``[b t]``, False for padding among the tokens of ``x [b t d]``; None if there is none.

    Args:
        attention_mask: ``[b t]``, or ``[b seen+t]`` with the tokens that came before
    """
    if attention_mask is None:
        return None
    b, t, _ = x.shape
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {attention_mask.dim()} axes; give [batch, time] with 0 for padding"
            " (models with a state are causal by construction; packed documents go in `segments`)"
        )
    if attention_mask.shape[0] != b or attention_mask.shape[1] not in (t, seen + t):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; the input needs [{b}, {t}]"
            + (f" or, with the {seen} tokens of the cache, [{b}, {seen + t}]" if seen else "")
        )
    keep = attention_mask[:, -t:].to(x.device, torch.bool)
    return keep if torch.compiler.is_compiling() or not keep.all() else None


def require_cache(cache: object) -> FastWeightsCache:
    """`cache`, or a new one for None."""
    if cache is None:
        return FastWeightsCache()
    if not isinstance(cache, FastWeightsCache):
        raise TypeError(
            f"past_key_values is a {type(cache).__name__}; pass a fastweights.FastWeightsCache() or"
            " None"
        )
    return cache


def require_ids(ids: Tensor | None, vocabulary: int) -> Tensor:
    """`ids`, if they are ``[b t]`` and, where looking is cheap (on the CPU), inside the
    vocabulary.
    """
    if ids is None or ids.dim() != 2:
        raise ValueError(
            f"input_ids have shape {None if ids is None else list(ids.shape)}, must be [batch,"
            " time]"
        )
    if cheap_to_look_at(ids):
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"token ids reach from {low} to {high}, the vocabulary from 0 to {vocabulary - 1};"
                " use the tokenizer that the model was trained with, or resize_token_embeddings"
            )
    return ids


def require_positions(positions: Tensor, known: int) -> Tensor:
    """`positions`, if they are, where looking is cheap, among the `known` ones."""
    if cheap_to_look_at(positions) and (last := int(positions.max())) >= known:
        raise ValueError(
            f"a document reaches position {last}, the model has learnt_positions = {known}; shorten"
            " it, or train with more of them"
        )
    return positions


def cheap_to_look_at(x: Tensor) -> bool:
    """Whether values can be read without waiting for an accelerator, and outside of a graph."""
    return x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling()
