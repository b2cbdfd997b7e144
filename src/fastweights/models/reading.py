"""What a call gives a language model, as the tokens that it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.models.cache import FastWeightsCache
from fastweights.models.inputs import keep_mask_of
from fastweights.models.packing import Boundaries, require_counted_positions, segments_of
from fastweights.models.tokens import Tokens
from fastweights.shapes import Embedded, Segments


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
