"""Validation of what models are given, with errors that say what to change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastweights.mixer import differ_for_good
from fastweights.models.cache import FastWeightsCache
from fastweights.models.loss import IGNORE_INDEX
from fastweights.models.tokens import cheap_to_look_at, worth_waiting_for
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
    return None if worth_waiting_for(keep) and keep.all() else keep


def require_cache(cache: object) -> FastWeightsCache:
    """`cache`, or a new one for None."""
    if cache is None:
        return FastWeightsCache()
    if not isinstance(cache, FastWeightsCache):
        raise TypeError(
            f"the cache is a {type(cache).__name__}; pass a fastweights.FastWeightsCache() or"
            " None (keys and values cannot become a state, so that PEFT's prefix tuning is"
            " impossible: use prompt tuning, whose tokens the state reads, or LoRA)"
        )
    return cache


def require_divided(**given: object) -> None:
    """Refuse what belongs to whole sequences, of a model that reads slices of them.

    Raises:
        ValueError: naming what is not None in `given`.
    """
    if found := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"this process reads a slice of its sequences, to which {', '.join(found)} do not"
            " belong: give the model what fastweights.parallel.divide(batch, group) makes of the"
            " whole batch (targets of labels, segments of positions)"
        )


def require_ids(ids: object, vocabulary: int) -> Tensor:
    """`ids`, if they are ``[b t]`` and, where looking is cheap (on the CPU), inside the
    vocabulary.
    """
    ids = require_token_ids(ids)
    if cheap_to_look_at(ids):
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"token ids reach from {low} to {high}, the vocabulary from 0 to {vocabulary - 1};"
                " use the tokenizer that the model was trained with, or resize_token_embeddings"
            )
    return ids


def require_token_ids(ids: object) -> Tensor:
    """`ids`, if they are a tensor ``[b t]`` of integers that can be looked up."""
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"input_ids are a {type(ids).__name__}; pass a tensor [batch, time], such as"
            " tokenizer(text, return_tensors='pt').input_ids or torch.tensor([[1, 2, 3]])"
        )
    if ids.dtype not in (torch.long, torch.int):
        raise TypeError(f"input_ids are {ids.dtype}; token ids are integers: use ids.long()")
    if ids.dim() != 2:
        raise ValueError(
            f"input_ids have shape {list(ids.shape)}, must be [batch, time]"
            + ("; one text is ids[None]" if ids.dim() == 1 else "")
        )
    return ids


def require_embeddings(x: Tensor, embedding: nn.Embedding) -> Tensor:
    """``x [b t d]``, if it can stand for what this `embedding` returns."""
    weights = getattr(embedding, "weight", x)
    if x.dim() != 3 or x.shape[-1] != embedding.embedding_dim:
        raise ValueError(
            f"inputs_embeds have shape {list(x.shape)}, must be [batch, time, hidden_size ="
            f" {embedding.embedding_dim}]"
        )
    if x.dtype is not weights.dtype and differ_for_good(x, weights):
        raise TypeError(
            f"inputs_embeds are {x.dtype}, the model {weights.dtype}; use"
            f" inputs_embeds.to({weights.dtype})"
        )
    return x


def require_labels(name: str, labels: Tensor, vocabulary: int) -> Tensor:
    """`labels` as torch.long, if they are integers and, where looking is cheap, token ids or
    −100.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise TypeError(f"{name} are {labels.dtype}; they are token ids or -100: use labels.long()")
    if cheap_to_look_at(labels):
        wrong = labels[(labels >= vocabulary) | ((labels < 0) & (labels != IGNORE_INDEX))]
        if len(wrong):
            raise ValueError(
                f"{name} contain {int(wrong[0])}, the vocabulary reaches from 0 to"
                f" {vocabulary - 1}, and -100 is for what is not counted; use the tokenizer that"
                " the model was trained with, or resize_token_embeddings"
            )
    return labels.long()


def padding_first(mask: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
    """The ``mask [b t]`` and the streams ``[b t …]`` with all padding before the tokens, where it
    leaves no trace either.
    """
    order = mask.bool().long().argsort(dim=1, stable=True)
    rows = torch.arange(len(mask), device=mask.device)[:, None]
    whole = (stream.expand(len(mask), *stream.shape[1:]) for stream in (mask, *streams))
    return tuple(stream[rows, order] for stream in whole)


def require_positions(positions: Tensor, known: int) -> Tensor:
    """`positions`, if they are, where looking is cheap, among the `known` ones."""
    if cheap_to_look_at(positions) and (last := int(positions.max())) >= known:
        raise ValueError(
            f"a document reaches position {last}, the model has learnt_positions = {known}; shorten"
            " it, or train with more of them"
        )
    return positions
