"""Losses of the next token without ever holding the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastweights.layers import upcast
from fastweights.models.cache_names import with_both_names
from fastweights.recurrence.derivatives import transform_here
from fastweights.shapes import Embedded

IGNORE_INDEX = -100
"""The label of a token that is not learnt (torch, transformers)."""
LOGITS_AT_ONCE = 1 << 25

Term = Callable[[Tensor, Tensor], Tensor]
"""Sums of losses, of ``logits [n vocab]`` in float32 or wider and ``targets [n]``, of which those
that are −100 do not count.
"""


@with_both_names
@dataclass
class LanguageModelOutput(CausalLMOutputWithPast):
    """What a language model returns.

    Attributes:
        squared_log_z: The mean of log² Z, if it was asked for.
    """

    squared_log_z: Tensor | None = None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum -log p(targets), a scalar; a `Term`."""
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def squared_log_z(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum log² Z, a scalar, where Z = Σ exp(logits) of a token: the z-loss before its weight
    (PaLM, Chowdhery et al., 2022, section 5); a `Term`."""
    return logits.logsumexp(-1).square().where(targets != IGNORE_INDEX, 0.0).sum()


def cross_entropy_and_log_z(logits: Tensor, targets: Tensor) -> Tensor:
    """Both sums ``[2]``; a `Term`."""
    return torch.stack([cross_entropy(logits, targets), squared_log_z(logits, targets)])


def next_token_loss(
    logits: Callable[[Tensor], Tensor],
    x: Embedded,
    labels: Tensor,
    *,
    items: Tensor | int | None = None,
    chunk: int,
    term: Term = cross_entropy,
) -> Tensor:
    """Mean of -log p(labels[t+1] | x[t]), or of another term, over the labels that are not −100; 0
    if all are.

    Args:
        logits: of hidden states ``[n d]``, ``[n vocab]``; called on `chunk` tokens at a time,
            once more in the backward
        labels: ``[b t]``, aligned with x: the shift happens here
        items: what to divide the sum by instead of the number of labels (gradient accumulation)
        term: what is averaged
    """
    _require_same_shape(x, labels)
    x, targets = x[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(x.device)
    return mean_loss(logits, x, targets, items=items, chunk=chunk, term=term)


def mean_loss(
    logits: Callable[[Tensor], Tensor],
    x: Tensor,
    targets: Tensor,
    *,
    items: Tensor | int | None = None,
    chunk: int,
    term: Term = cross_entropy,
) -> Tensor:
    """Mean of -log p(targets | x), or of another term, over the ``targets [n]`` that are not −100,
    of ``x [n d]``; see `next_token_loss`.
    """
    count = (targets != IGNORE_INDEX).sum() if items is None else items
    count = count.to(x.device) if isinstance(count, Tensor) else count
    return _sum(logits, x, targets, chunk, term) / (count + (count == 0))


def select_targets(x: Embedded, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(``[n d]``, ``[n]``): the vectors and labels of the tokens whose label, aligned with x, is
    not −100.
    """
    _require_same_shape(x, labels)
    labels = labels.to(x.device)
    if transform_here():  # under vmap, how many there are may differ
        return x.flatten(0, 1), labels.flatten()
    return x[labels != IGNORE_INDEX], labels[labels != IGNORE_INDEX]


def _require_same_shape(x: Embedded, labels: Tensor) -> None:
    if labels.shape != x.shape[:2]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, must be [batch, time] = {list(x.shape[:2])}"
        )


def _sum(
    logits: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, chunk: int, term: Term
) -> Tensor:
    def piece(x: Tensor, targets: Tensor) -> Tensor:
        return term(upcast(logits(x)), targets)

    if len(x) <= chunk or transform_here():  # torch's transforms see through no checkpoint
        return piece(x, targets)
    pieces = zip(x.split(chunk), targets.split(chunk), strict=True)
    return torch.stack([checkpoint(piece, a, b, use_reentrant=False) for a, b in pieces]).sum(0)
