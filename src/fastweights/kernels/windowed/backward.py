"""The gradients of a span from those of its outputs and of the memory behind it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.windowed.masks import WindowMasks
from fastweights.kernels.windowed.plan import WindowPlan
from fastweights.kernels.windowed.spans import SpanStreams, mask_rows, weighted_sums
from fastweights.recurrence.streams import reciprocal_or_zero
from fastweights.recurrence.windowed import (
    LARGEST_LOG_WEIGHT,
    mix_window_and_memory,
    normalize_by_last,
)

WEIGHTS = math.exp(-LARGEST_LOG_WEIGHT) * (1 + 1e-5), math.exp(LARGEST_LOG_WEIGHT) * (1 - 1e-5)
"""Between these, weights relative to a scale are at neither of its bounds."""


def span_back(
    plan: WindowPlan,
    blocks: SpanStreams,
    masks: WindowMasks,
    memory: Tensor,
    do: Tensor,
    dmemory: Tensor,
) -> tuple[SpanStreams, Tensor]:
    """(gradients of the blocks, of S before them) from those of o and of S after them."""
    q, fq, mix, scale, k, fk, v = blocks
    c, old, readers = fk.shape[3], blocks.leaving_values, blocks.reading_queries(masks)
    states = blocks.states(masks, memory)
    near, far = blocks.weights(masks, plan)
    sums = weighted_sums(blocks, masks, near, far, states)
    dnear, dfar, dmix = _mix_backward(*sums, mix, do, shared=plan.shared)

    # N = near (V ‖ 1) with near = e^(s - c_n):  dV = nearᵀ dN,  ds = (dN Vᵀ) ⊙ near
    dv = near.mT @ dnear
    top = near == 1
    dscores = (dnear @ v.mT).mul_(near)
    dscale = torch.zeros_like(scale)
    if plan.scaled:
        # s - a, held between two bounds:  da = -Σ ds, of those that are not at a bound
        dscores.mul_((near > WEIGHTS[0]) & (near < WEIGHTS[1]))
        dscale = -dscores.sum(-1, keepdim=True)
    elif plan.shared:
        # moving c_n moves the whole near side against the far one: the row's Σ dN ⊙ N is taken
        # from the scores that are the maximum. With a normaliser each, c_n cancels.
        share = (dnear * sums[0]).sum(-1, keepdim=True) / top.sum(-1, keepdim=True).clamp(min=1)
        dscores.sub_(top * share)
    if plan.softcap is not None:
        # s = a tanh(x / a):  dx = ds (1 - tanh²(x / a))
        dscores.mul_(1 - ((q @ k.mT) / plan.softcap).tanh_().square_())

    # F = far (V ‖ 1) + φ(Q) S with far = φ(Q) φ(K)ᵀ before the window:  dfar = dF Vᵀ
    dfar_weights = (dfar @ old.mT).unflatten(3, (-1, c)).mul_(masks.far).flatten(3, 4)
    # dφ(Q) = dfar φ(K) + dF Sᵀ, the latter for the queries that read S
    dread = dfar @ states[:, :, :-1].mT
    dfq = (dfar_weights @ fk).add_(
        dread if masks.reads_memory is None else mask_rows(dread, masks.reads_memory)
    )
    dfk = dfar_weights.mT @ fq
    dv[..., :c, :] += far.mT @ dfar

    # S before every block is carry @ (S_0, φ(K)ᵀ V of each block): dS = φ(Q)ᵀ dF, and that behind
    # the last; carryᵀ sums for each block what all later states make of it
    dstates = torch.cat([readers.mT @ dfar, dmemory.unsqueeze(2)], 2)
    dwritten = masks.carry.to(dstates.dtype).mT @ dstates.flatten(3)
    dwritten = dwritten.unflatten(3, memory.shape[2:])
    # of what S takes up, φ(K)ᵀ V:  dφ(K) = V dSᵀ,  dV = φ(K) dS
    taken, dtaken = fk, old @ dwritten[:, :, 1:].mT
    if masks.absorbed is not None:
        taken, dtaken = taken * masks.absorbed, dtaken * masks.absorbed
    dv[..., :c, :] += taken @ dwritten[:, :, 1:]
    # s = q kᵀ:  dq = ds k,  dk = dsᵀ q
    gradients = SpanStreams(dscores @ k, dfq, dmix, dscale, dscores.mT @ q, dfk.add_(dtaken), dv)
    return gradients, dwritten[:, :, 0]


def _mix_backward(
    near: Tensor, far: Tensor, mix: Tensor, do: Tensor, *, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of both sides' sums and of the mix, from that of o = divided(joined(near, far,
    mix)).
    """
    parts = (near, far) if shared else (normalize_by_last(near), normalize_by_last(far))
    # o is the quotient of `sums`, whose last column no output shows
    sums = mix_window_and_memory(near, far, mix, shared=shared)
    dsums = _normalize_backward(sums, F.pad(do, (0, 1)))
    if shared:
        # sums = γ N + F
        return mix * dsums, dsums, (dsums * near).sum(-1, keepdim=True)
    # sums = γ N / n + (1 - γ) F / f, n and f their last columns
    dmix = (dsums * (parts[0] - parts[1])).sum(-1, keepdim=True)
    return _normalize_backward(near, mix * dsums), _normalize_backward(far, (1 - mix) * dsums), dmix


def _normalize_backward(sums: Tensor, d: Tensor) -> Tensor:
    """The gradient of `sums` from that of ``normalize_by_last(sums)``."""
    # y = x / x_last:  dx = dy / x_last, and dx_last takes -Σ dx ⊙ x / x_last as well
    inverse = reciprocal_or_zero(sums[..., -1:])
    d = d * inverse
    d[..., -1:] -= (d * sums).sum(-1, keepdim=True) * inverse
    return d
