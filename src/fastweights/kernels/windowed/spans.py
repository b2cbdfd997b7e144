"""The weights and sums of a span: some blocks of queries that are evaluated together."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from fastweights.kernels.blocks import smallest_exponent
from fastweights.kernels.windowed.masks import WindowMasks
from fastweights.kernels.windowed.plan import WindowPlan
from fastweights.recurrence.windowed import LARGEST_LOG_WEIGHT, soft_cap


class SpanStreams(NamedTuple):
    """The streams of n blocks: queries ``[b g n r·c ·]``, strips of keys ``[b g n strip ·]``, φ(K)
    ``[b g n c f]``; the scale of scores has no width where there is none.
    """

    q: Tensor
    fq: Tensor
    mix: Tensor
    scale: Tensor
    k: Tensor
    fk: Tensor
    v: Tensor

    @classmethod
    def of(
        cls,
        plan: WindowPlan,
        span: slice,
        q: Tensor,
        fq: Tensor,
        mix: Tensor,
        scale: Tensor,
        k: Tensor,
        fk: Tensor,
        v: Tensor,
    ) -> Self:
        return cls(
            plan.queries(q, span),
            plan.queries(fq, span),
            plan.queries(mix, span),
            plan.queries(scale, span),
            plan.strips(k, span, plan.strip),
            plan.strips(fk, span, plan.block),
            plan.strips(v, span, plan.strip),
        )

    @property
    def leaving_values(self) -> Tensor:
        """The values of the keys that S takes up."""
        return self.v[..., : self.fk.shape[3], :]

    def weights(self, masks: WindowMasks, plan: WindowPlan) -> tuple[Tensor, Tensor]:
        """near ``[b g n r·c strip]`` and far ``[b g n r·c c]``."""
        c = self.fk.shape[3]
        scores = soft_cap(self.q @ self.k.mT, plan.softcap).unflatten(3, (-1, c))
        if plan.scaled:
            scores.sub_(self.scale.unflatten(3, (-1, c)))
            scores.clamp_(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        else:
            scores.masked_fill_(~masks.near, -torch.inf)
            highest = _own(scores).amax(-1, keepdim=True)
            scores.sub_(highest.masked_fill(highest == -torch.inf, 0))
            # exp is slow below; the masks take away what the clamp leaves where nothing is seen
            scores.clamp_(min=smallest_exponent(scores.dtype))
        near = _own(scores.exp_()).mul_(masks.near).flatten(3, 4)
        far = (self.fq @ self.fk.mT).unflatten(3, (-1, c)).mul_(masks.far).flatten(3, 4)
        return near, far

    def states(self, masks: WindowMasks, memory: Tensor) -> Tensor:
        """S ``[b g n+1 f v+1]`` before every block and after the last."""
        fk = self.fk if masks.absorbed is None else self.fk * masks.absorbed
        # row n of `carry`: what S has at the start of block n, of S before all and of each block
        written = torch.cat([memory.unsqueeze(2), fk.mT @ self.leaving_values], 2)
        return (masks.carry.to(written.dtype) @ written.flatten(3)).unflatten(3, memory.shape[2:])

    def reading_queries(self, masks: WindowMasks) -> Tensor:
        """φ(Q) of those that read S, else 0."""
        return self.fq if masks.reads_memory is None else mask_rows(self.fq, masks.reads_memory)


def _own(scores: Tensor) -> Tensor:
    """A copy where autograd keeps the numbers that are about to be overwritten."""
    return scores.clone() if torch.is_grad_enabled() else scores


def mask_rows(queries: Tensor, mask: Tensor) -> Tensor:
    """``[… r·c ·]`` masked by ``[… c 1]``."""
    return (queries.unflatten(3, (-1, mask.shape[-2])) * mask).flatten(3, 4)


def weighted_sums(
    blocks: SpanStreams, masks: WindowMasks, near: Tensor, far: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """N and F ``[b g n r·c v+1]``."""
    return near @ blocks.v, (far @ blocks.leaving_values).add_(
        blocks.reading_queries(masks) @ states[:, :, :-1]
    )
