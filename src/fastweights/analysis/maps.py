"""Measures of attention maps: dilution, span, rank, and distance from a softmax teacher's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.analysis.memory import effective_dimension, map_and_input_factor
from fastweights.recurrence import NoFiniteFormError, Recurrence
from fastweights.shapes import Map


def attention(record: Recurrence, heads: list[int]) -> Map:
    """Compute the attention maps ``[b h t s]`` of the chosen heads, from the empty state.

    A skip that differs between values is left out. A linear rule's maps come from its system, for
    these heads alone; softmax forms the maps of all heads.
    """
    try:
        system = record.ltv()
    except NoFiniteFormError:
        return record.attention_map()[:, heads]
    system = system.heads(heads)
    phi = map_and_input_factor(system)[0]
    if system.D is None or system.D.shape[-1] != 1:
        return phi
    return phi + torch.diag_embed(
        system.D.expand(*system.B.shape[:3], 1).squeeze(-1).transpose(1, 2)
    )


def weights(phi: Map) -> Tensor:
    """Divide the rows of |Φ| by their sums: distributions over the past; zeros where a row is
    zero."""
    size = phi.abs()
    total = size.sum(-1, keepdim=True)
    return torch.where(total > 0, size / total, 0)


def entropy(phi: Map) -> Tensor:
    """Compute the entropy ``[b h t]`` of each query's distribution, in nats."""
    return torch.special.entr(weights(phi)).sum(-1)


def dilution(phi: Map) -> Tensor:
    """Compute the entropy over that of the uniform distribution, ``[b h t-1]`` without the first
    query.

    1 is fully diluted.
    """
    length = phi.shape[-1]
    uniform = torch.arange(1, length + 1, dtype=phi.abs().dtype, device=phi.device).log()
    return entropy(phi)[..., 1:] / uniform[1:]


def span(phi: Map) -> Tensor:
    """Compute how many tokens back a query looks on average, ``[b h t]``."""
    position = torch.arange(phi.shape[-1], dtype=phi.abs().dtype, device=phi.device)
    return position - weights(phi) @ position


def negative_share(phi: Map) -> Tensor:
    """Compute the part of Σ |Re Φ| that is negative, ``[b h]``; softmax has none."""
    real = phi.real
    total = real.abs().sum((-2, -1))
    return torch.where(total > 0, real.clamp(max=0).abs().sum((-2, -1)) / total, 0)


def rank(phi: Map) -> Tensor:
    """Compute the effective rank ``[b h]`` of the map: exp of the entropy of its normalised
    singular values."""
    return effective_dimension(torch.linalg.svdvals(phi))


@dataclass(frozen=True, eq=False)
class Distance:
    """The distance of a student's map from its teacher's, ``[b h]`` each, with rows of |Φ| as
    distributions.

    Attributes:
        kl: Mean over queries of KL(teacher ‖ student), in nats; inf where the student cannot look.
        mse: Mean squared difference over the pairs t ≥ s.
        rank: The student's effective rank minus the teacher's.
    """

    kl: Tensor
    mse: Tensor
    rank: Tensor


def distance(student: Map, teacher: Map) -> Distance:
    """Compute how far `student` is from `teacher`; maps have one shape, or axes of length 1."""
    p, q = torch.broadcast_tensors(weights(teacher), weights(student))
    seen = torch.ones_like(p).tril()
    kl = torch.where(p > 0, p * (p / q).log(), 0).sum(-1).mean(-1)
    mse = ((p - q).square() * seen).sum((-2, -1)) / seen.sum((-2, -1))
    return Distance(kl, mse, rank(q) - rank(p))
