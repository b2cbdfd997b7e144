"""Where packed documents begin, in each of the words that collators have for it."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from fastweights.layers import TokenContext
from fastweights.models.cache import FastWeightsCache
from fastweights.models.inputs import keep_mask_of
from fastweights.models.tokens import Tokens, cheap_to_look_at, worth_waiting_for
from fastweights.recurrence.streams import find_segment_starts
from fastweights.shapes import Embedded, Mask, Segments


class Boundaries(TypedDict, total=False):
    """What collators for attention kernels give beside ``position_ids``.

    Attributes:
        seq_idx: ``[b t]``, the number of each token's document: another name of `segments`.
        cu_seq_lens_q, cu_seq_lens_k: ``[n+1]``, where each of n documents begins among all tokens,
            row after row, and how many there are; the two are the same.
        max_length_q, max_length_k: Tokens of the longest document; a state has no use for it.
    """

    seq_idx: Tensor | None
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: Tensor | int | None
    max_length_k: Tensor | int | None


def segments_of(
    x: Embedded,
    keep: Mask | None,
    segments: Segments | None,
    position_ids: Tensor | None,
    boundaries: Boundaries,
) -> Segments | None:
    """Number the packed documents of the tokens ``x [b t d]``.

    A document begins where `segments` or ``seq_idx`` change, where ``position_ids`` are 0 (padding
    aside) and where ``cu_seq_lens_q`` says.

    Returns:
        ``[b t]``, how many documents have begun, so that 1 at a row's first token says that it does
        not go on from a cache; None if there are no documents to tell apart.

    Raises:
        TypeError: A name in `boundaries` is none of its own.
        ValueError: One of the arguments has another shape, or they contradict each other.
    """
    if segments is None and position_ids is None and not boundaries:
        return None
    require_known(boundaries)
    starts = [find_segment_starts(ids) for ids in _numbered(x, segments, boundaries)]
    if position_ids is not None:
        begins = require_row_per_sequence("position_ids", position_ids, x) == 0
        starts += [begins if keep is None else begins & keep]
    if (lengths := _cumulative_lengths(x, boundaries)) is not None:
        starts += [_marked(x, lengths[1:-1])]
    if not starts:
        return None
    begun = torch.stack(starts).any(0)
    if position_ids is not None and worth_waiting_for(begun) and not begun.any():
        return None
    return begun.cumsum(1)


def require_known(boundaries: Boundaries) -> None:
    """Refuse keyword arguments that no model here takes, by their names."""
    if unknown := sorted(set(boundaries) - Boundaries.__optional_keys__):
        raise TypeError(
            f"forward takes no argument called {', '.join(unknown)}; documents are told apart by"
            f" position_ids, segments, {', '.join(sorted(Boundaries.__optional_keys__))}"
        )


def require_row_per_sequence(name: str, ids: Tensor, x: Embedded) -> Tensor:
    """``ids [b t]`` (or ``[1 t]``) of the tokens ``x [b t d]``, on their device."""
    b, t, _ = x.shape
    if ids.shape not in ((b, t), (1, t)):
        raise ValueError(
            f"{name} have shape {list(ids.shape)}, must be [batch, time] = [{b}, {t}] or [1, {t}]"
        )
    if ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"{name} are {ids.dtype}; they are integers, such as torch.long")
    return ids.to(x.device).expand(b, t)


def require_counted_positions(
    position_ids: Tensor,
    x: Embedded,
    before: Tensor | None,
    keep: Mask | None,
    ids: Segments | None,
) -> None:
    """Refuse positions that the model would not count itself, where looking is cheap.

    Args:
        position_ids: ``[b t]`` or ``[1 t]``.
        x: ``[b t d]``.
        before: ``[b]``, how many tokens the cache has of each document; None without a cache.
        keep: ``[b t]``, False for padding, whose positions say nothing.
        ids: What `segments_of` returned.

    Raises:
        ValueError: A token's position is not the number of its document's tokens before it.
    """
    if not cheap_to_look_at(position_ids):
        return
    if before is not None and ids is not None:
        before = before.masked_fill(ids[:, 0] > 0, 0)
    counted = TokenContext(x, None, before, keep, ids).positions
    wrong = position_ids.expand_as(counted) != counted
    wrong = wrong if keep is None else wrong & keep
    if wrong.any():
        row, token = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"position_ids[{row}, {token}] = {int(position_ids.expand_as(counted)[row, token])},"
            f" but {int(counted[row, token])} tokens of its document come before this one;"
            " positions count up by one from 0 where a document begins (a state cannot skip or"
            " repeat any); correct position_ids, or leave them out"
        )


def _numbered(x: Embedded, segments: Segments | None, boundaries: Boundaries) -> list[Segments]:
    named = {"segments": segments, "seq_idx": boundaries.get("seq_idx")}
    return [
        require_row_per_sequence(name, ids, x) for name, ids in named.items() if ids is not None
    ]


def _cumulative_lengths(x: Embedded, boundaries: Boundaries) -> Tensor | None:
    ends, others = boundaries.get("cu_seq_lens_q"), boundaries.get("cu_seq_lens_k")
    if ends is None:
        return others
    tokens = x.shape[0] * x.shape[1]
    if others is not None and cheap_to_look_at(ends) and not torch.equal(ends, others):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k differ; queries and keys are of the same documents"
        )
    if cheap_to_look_at(ends) and (int(ends[0]), int(ends[-1])) != (0, tokens):
        raise ValueError(
            f"cu_seq_lens_q reach from {int(ends[0])} to {int(ends[-1])}, must from 0 to the"
            f" {tokens} tokens of the batch"
        )
    return ends


def _marked(x: Embedded, places: Tensor) -> Mask:
    """``[b t]``, True at these places among all tokens, row after row."""
    starts = torch.zeros(x.shape[0] * x.shape[1], dtype=torch.bool, device=x.device)
    starts[places.to(x.device, torch.long)] = True
    return starts.view(x.shape[:2])


def tokens_of_sequences(
    x: Embedded,
    attention_mask: Tensor | None,
    cache: FastWeightsCache,
    segments: Segments | None,
    position_ids: Tensor | None,
    boundaries: Boundaries,
) -> Tokens:
    """Tokens that follow those of `cache`, with what tells their documents apart."""
    keep = keep_mask_of(attention_mask, x, cache.get_seq_length())
    segments = segments_of(x, keep, segments, position_ids, boundaries)
    if position_ids is not None:
        require_counted_positions(position_ids, x, cache.position, keep, segments)
    return Tokens(x, keep, segments, follows=position_ids is None)


def tokens_of_slice(
    x: Embedded, attention_mask: Tensor | None, segments: Segments | None
) -> Tokens:
    """Tokens of sequences whose others are on other processes: `segments` number the documents of
    whole sequences, and a mask stays one, as the others may have padding.
    """
    keep = None if attention_mask is None else attention_mask.to(x.device, torch.bool)
    return Tokens(x, keep, None if segments is None else segments.to(x.device))
