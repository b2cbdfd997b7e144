"""Where documents begin in a packed row, in the words of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastweights.recurrence import ShapeError

BOUNDS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")
"""The names by which calls tell where documents begin."""


def read_documents(tokens: int, named: dict[str, Any]) -> Tensor | None:
    """The document of every token, ``[b t]``, or None where a call names none.

    Args:
        tokens: t; of a convolution that was given inputs before the row, those count too and
            belong to the row's first document
        named: what the call was given by name: `seq_idx` ``[b t]``, or the bounds
            ``[documents + 1]`` of a row as `cu_seqlens` or `cu_seq_lens_q`
    """
    ids = named.get("seq_idx")
    bounds = named.get("cu_seqlens")
    bounds = named.get("cu_seq_lens_q") if bounds is None else bounds
    if ids is None and bounds is None:
        return None
    if ids is None:
        ids = number_documents(bounds)
    before = tokens - ids.shape[1]
    if before < 0:
        raise ShapeError(
            f"documents are given for {ids.shape[1]} tokens, but there are {tokens}; seq_idx is"
            " [batch, tokens] and cu_seqlens ends with the number of tokens"
        )
    return ids if before == 0 else torch.cat([ids[:, :1].expand(-1, before), ids], dim=1)


def number_documents(bounds: Tensor) -> Tensor:
    """``[1 t]`` of a row's bounds 0 … t."""
    tokens = torch.arange(int(bounds[-1]), device=bounds.device, dtype=bounds.dtype)
    return torch.bucketize(tokens, bounds[1:], right=True)[None]
