"""How far layers are from their softmax: in their outputs, and in the weights that mix tokens."""

from __future__ import annotations

import torch
from torch import Tensor, ones_like

from fastweights.layers import upcast
from fastweights.linearize.convert.modes import AttentionCall, require_window, set_window
from fastweights.recurrence import Recurrence
from fastweights.shapes import Map, Mask, Output

FLOOR = 1e-12
"""Of the weights whose logarithm is taken: ReLU's may be zero (LoLCATs' code has the same)."""


def output_error(o: Output, target: Output, keep: Mask | None) -> Tensor:
    """Compute the relative squared error Σ‖o - target‖² / Σ‖target‖² of outputs ``[b t h v]``."""
    total = squared_size(o - upcast(target), keep)
    return total / squared_size(target, keep).clamp(min=torch.finfo(total.dtype).tiny)


def squared_size(target: Output, keep: Mask | None) -> Tensor:
    """Compute Σ‖target‖² of outputs ``[b t h v]``."""
    rows = ones_like(target[..., :1]) if keep is None else keep[..., None, None]
    return (upcast(target) * rows).square().sum()


def count_tokens(target: Tensor, keep: Mask | None) -> Tensor:
    """Count the tokens of ``[b t …]`` that are not padding."""
    kept = target.new_ones(target.shape[:2]) if keep is None else keep
    return kept.sum(dtype=upcast(target).dtype)


def cross_entropy(record: Recurrence, keep: Mask | None) -> Tensor:
    """Compute the cross-entropy -Σ_i a_ni log â_ni of attention weights with softmax's, in nats.

    It is the mean over heads and over queries n that are not padding.
    """
    rows = -(teacher_map(record) * record.attention_map().clamp(min=FLOOR).log()).sum(-1)
    return _mean(rows, keep)


def map_distance(record: Recurrence, teacher: Map, keep: Mask | None) -> Tensor:
    """Compute ‖A - Â‖ (Frobenius) of maps ``[b h t t]`` with those of `record`.

    It is the mean over sequences and heads; rows of padding are left out.
    """
    rows = upcast(teacher) - record.attention_map()
    rows = rows if keep is None else rows * keep[:, None, :, None]
    return torch.linalg.vector_norm(rows, dim=(-2, -1)).mean()


@torch.no_grad()
def softmax_map(call: AttentionCall) -> Map:
    """Compute the weights ``[b h t t]`` of the model's own attention, whatever that is.

    Its values are tokens' unit vectors, so that its outputs are the weights.
    """
    size, groups = call.v.shape[1:3]
    unit = torch.eye(size, dtype=call.v.dtype, device=call.v.device)[None, :, None]
    return call.softmax(unit.expand(len(call.v), -1, groups, -1)).transpose(1, 2)


def divergence(record: Recurrence, keep: Mask | None) -> Tensor:
    """Compute KL(a ‖ â) = Σ_i a_ni log(a_ni / â_ni) of attention weights, in nats.

    It is the mean over heads and over queries n that are not padding (Table 1's KLD).
    """
    teacher = teacher_map(record)
    rows = (
        teacher * (teacher.clamp(min=FLOOR).log() - record.attention_map().clamp(min=FLOOR).log())
    ).sum(-1)
    return _mean(rows, keep)


@torch.no_grad()
def teacher_map(record: Recurrence) -> Map:
    """Compute the softmax weights ``[b h t t]`` of the same queries and keys.

    A window over the whole text gives them exactly.
    """
    windowed = require_window(record, "comparing attention weights")
    return set_window(windowed, len(record)).attention_map()


def _mean(rows: Tensor, keep: Mask | None) -> Tensor:
    """Of ``[b h t]``."""
    if keep is None:
        return rows.mean()
    kept = keep[:, None].expand_as(rows)
    return (rows * kept).sum() / kept.sum().clamp(min=1)
