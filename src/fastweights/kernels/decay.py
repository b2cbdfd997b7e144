"""`Decay` in time blocks that fit the cache, with a hand-written backward that recomputes inside a block.

With Q = q e^(c-μ), K = k e^(μ-c) and m = e^μ of `blocks`, and R = m ⊙ S for the state S before a chunk,

    o = tril(Q Kᵀ) V + Q R          S' = m ⊙ (R + Kᵀ V)

Kept for the backward are the streams and the states at block starts, nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fastweights.kernels.blocks import (
    STEEP_CHUNK,
    Factors,
    Plan,
    cut,
    decayed,
    harmless_chunk,
    state_gradient_of_middle,
)
from fastweights.kernels.gemm import routed
from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.products import decayed_products


class _Chunks(NamedTuple):
    """Q, K ``[b h n c k]`` and V ``[b h n c v]`` of n chunks, and the factors that are in Q and K."""

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Factors | None

    @classmethod
    def of(
        cls, plan: Plan, dtype: torch.dtype, q: Tensor, k: Tensor | None, v: Tensor, log_decay: Tensor | None
    ) -> _Chunks:
        q, v = plan.tiles(q, dtype), plan.tiles(v, dtype)
        k = None if k is None else plan.tiles(k, dtype)
        if log_decay is None:
            assert k is not None
            return cls(q, k, v, None)
        log_decay = plan.tiles(log_decay, dtype)
        k = torch.expm1(log_decay).neg_() if k is None else k
        factors = Factors.of(log_decay)
        return cls(q * factors.scale, k / factors.scale, v, factors)

    @property
    def m(self) -> Tensor | None:
        return None if self.factors is None else self.factors.m

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(R and R + KᵀV ``[b h n k v]`` of every chunk, the state after the last)."""
        after = self.k.mT @ self.v
        before, last = torch.empty_like(after), torch.empty_like(state)
        for n in range(after.shape[2]):
            after[:, :, n] += decayed(state, self.m, n, out=before[:, :, n])
            state = decayed(after[:, :, n], self.m, n, out=last)
        return before, after, state

    def scan_back(self, dbefore: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradients of R and R + KᵀV, of the state before the first), from Qᵀ dO (overwritten) and dS'."""
        dafter, first = torch.empty_like(dbefore), torch.empty_like(dstate)
        for n in reversed(range(dbefore.shape[2])):
            dbefore[:, :, n] += decayed(dstate, self.m, n, out=dafter[:, :, n])
            dstate = decayed(dbefore[:, :, n], self.m, n, out=first)
        return dbefore, dafter, dstate


class _ChunkedDecay(torch.autograd.Function):
    """(o ``[b t h v]``, S_T) of q, k, v, log_decay with all axes but the last spelled out, and S_0."""

    @staticmethod
    @routed
    def forward(
        ctx: Any, plan: Plan, q: Tensor, k: Tensor | None, v: Tensor, log_decay: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty(v.shape, dtype=state.dtype, device=v.device)
        starts = []
        for span in plan.spans(q.shape[1]):
            starts.append(state)
            chunks = _Chunks.of(plan, state.dtype, *cut(span, q, k, v, log_decay))
            before, _, state = chunks.scan(state)
            inner = (chunks.q @ chunks.k.mT).tril_()
            o[:, span] = plan.untile((inner @ chunks.v).add_(chunks.q @ before), span.stop - span.start)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, log_decay, *starts)
        return o, state

    @staticmethod
    @once_differentiable
    @routed
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.plan
        q, k, v, log_decay, *starts = ctx.saved_tensors
        grads = [None if s is None else torch.empty_like(s) for s in (q, k, v, log_decay)]
        for span, start in reversed(list(zip(plan.spans(q.shape[1]), starts, strict=True))):
            chunks = _Chunks.of(plan, start.dtype, *cut(span, q, k, v, log_decay))
            d, dmiddle, dstate = _chunks_back(chunks, start, plan.tiles(do[:, span], start.dtype), dstate)
            decay = None if log_decay is None else plan.tiles(log_decay[:, span], start.dtype)
            for grad, tiles in zip(grads, _streams_back(chunks, d, dmiddle, decay, tied=k is None), strict=True):
                if grad is not None and tiles is not None:
                    grad[:, span] = plan.untile(tiles, span.stop - span.start)
        return None, *grads, dstate


def _chunks_back(chunks: _Chunks, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[_Chunks, Tensor, Tensor]:
    """(gradients of Q, K and V; of the state-borne part of μ; of the state before the block)."""
    before, after, _ = chunks.scan(start)
    dbefore, dafter, dstart = chunks.scan_back(chunks.q.mT @ do, dstate)
    dinner = (do @ chunks.v.mT).tril_()
    inner = (chunks.q @ chunks.k.mT).tril_()
    dq = (dinner @ chunks.k).add_(do @ before.mT)
    dk = (dinner.mT @ chunks.q).add_(chunks.v @ dafter.mT)
    dv = (inner.mT @ do).add_(chunks.k @ dafter)
    return _Chunks(dq, dk, dv, None), state_gradient_of_middle(before, dbefore, after, dafter), dstart


def _streams_back(
    chunks: _Chunks, d: _Chunks, dmiddle: Tensor, log_decay: Tensor | None, *, tied: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, d log_decay) of the streams, from the gradients of Q, K, V and μ."""
    if chunks.factors is None or log_decay is None:
        return d.q, d.k, d.v, None
    ddecay = chunks.factors.backward((chunks.q * d.q).sub_(chunks.k * d.k), dmiddle)
    dk = d.k / chunks.factors.scale
    if tied:
        ddecay -= log_decay.exp() * dk
    return d.q * chunks.factors.scale, dk, d.v, ddecay


def chunked_decay(recurrence: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of a real `Decay`."""
    b, t, h = recurrence.shape
    chunk = harmless_chunk(recurrence.log_decay)
    streams = (recurrence.q, recurrence.k, recurrence.v, recurrence.log_decay)
    spelled: list[Any] = [None if s is None else s.expand(b, t, h, -1) for s in streams]
    if chunk is None:
        o, state = _steep(Plan.of(STEEP_CHUNK, b * h, t), state, *spelled)
    else:
        o, state = _ChunkedDecay.apply(Plan.of(chunk, b * h, t), *spelled, state)
    return recurrence.skipped(o), state


def _steep(
    plan: Plan, state: Tensor, q: Tensor, k: Tensor | None, v: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for any decay, by `decayed_products`; autograd recomputes one block at a time."""
    outputs = []
    for span in plan.spans(q.shape[1]):
        streams = cut(span, q, k, v, log_decay)
        o, state = checkpoint(_steep_block, plan, *streams, state, use_reentrant=False, preserve_rng_state=False)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


def _steep_block(
    plan: Plan, q: Tensor, k: Tensor | None, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    length = q.shape[1]
    k = torch.expm1(log_decay).neg() if k is None else k
    q, k, v, log_decay = (plan.tiles(s, state.dtype) for s in (q, k, v, log_decay))
    products = decayed_products(q, k, log_decay)
    assert products.carry is not None
    before = []
    for carry, written in zip(products.carry.unbind(2), (products.key.mT @ v).unbind(2), strict=True):
        before.append(state)
        state = carry * state + written
    o = products.inner @ v + products.query @ torch.stack(before, 2)
    return plan.untile(o, length), state


def refuses(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, Decay):
        return f"it is a {type(recurrence).__name__}, not a Decay"
    if recurrence.accumulator.is_complex:
        return "its streams are complex"
    return None


CHUNKED_DECAY = Kernel("blocked decay (torch)", refuses, chunked_decay)
