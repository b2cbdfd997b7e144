"""`Decay` in time blocks that fit the cache, with a hand-written backward that recomputes inside a
block.

With Q = q e^(c-μ), K = k e^(μ-c) and m = e^μ of `blocks`, and R = m ⊙ S for the state S before a
chunk,

    o = tril(Q Kᵀ) V + Q R          S' = m ⊙ (R + Kᵀ V)

Kept for the backward are the streams and the states at block starts, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.kernels.anchors import Anchors
from fastweights.kernels.blocks import (
    ANCHORED_CHUNK,
    BlockPlan,
    Factors,
    decay_into,
    largest_safe_chunk,
    slice_streams,
    state_gradient_of_middle,
)
from fastweights.kernels.gemm import route_products
from fastweights.kernels.table import Kernel, refuse_complex
from fastweights.recurrence.decay import Decay

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
ChunksOf = Callable[..., Any]


class _DecayChunks(NamedTuple):
    """Q, K ``[b h n c k]`` and V ``[b h n c v]`` of n chunks, and the factors that are in Q
    and K.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Factors | None

    @classmethod
    def of(
        cls,
        plan: BlockPlan,
        dtype: torch.dtype,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        log_decay: Tensor | None,
    ) -> _DecayChunks:
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
            after[:, :, n] += decay_into(state, self.m, n, out=before[:, :, n])
            state = decay_into(after[:, :, n], self.m, n, out=last)
        return before, after, state

    def scan_back(self, dbefore: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradients of R and R + KᵀV, of the state before the first), from Qᵀ dO (overwritten) and
        dS'.
        """
        dafter, first = torch.empty_like(dbefore), torch.empty_like(dstate)
        for n in reversed(range(dbefore.shape[2])):
            dbefore[:, :, n] += decay_into(dstate, self.m, n, out=dafter[:, :, n])
            dstate = decay_into(dbefore[:, :, n], self.m, n, out=first)
        return dbefore, dafter, dstate

    def output(self, before: Tensor) -> Tensor:
        return ((self.q @ self.k.mT).tril_() @ self.v).add_(self.q @ before)

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[Gradients, Tensor]:
        """Gradients of the streams ``[b h n c ·]``, that of k as if it were given, and of the state
        before them.
        """
        before, after, _ = self.scan(start)
        dbefore, dafter, dstart = self.scan_back(self.q.mT @ do, dstate)
        dinner = (do @ self.v.mT).tril_()
        inner = (self.q @ self.k.mT).tril_()
        dq = (dinner @ self.k).add_(do @ before.mT)
        dk = (dinner.mT @ self.q).add_(self.v @ dafter.mT)
        dv = (inner.mT @ do).add_(self.k @ dafter)
        if self.factors is None:
            return (dq, dk, dv, None), dstart
        dmiddle = state_gradient_of_middle(before, dbefore, after, dafter)
        ddecay = self.factors.backward((self.q * dq).sub_(self.k * dk), dmiddle)
        return (dq * self.factors.scale, dk / self.factors.scale, dv, ddecay), dstart


class _AnchoredDecayChunks(NamedTuple):
    """q, k ``[b h n c k]`` and v ``[b h n c v]`` of n chunks that decay at any rate."""

    q: Tensor
    k: Tensor
    v: Tensor
    anchors: Anchors

    @classmethod
    def of(
        cls,
        plan: BlockPlan,
        dtype: torch.dtype,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        log_decay: Tensor | None,
    ) -> _AnchoredDecayChunks:
        assert log_decay is not None
        log_decay = plan.tiles(log_decay, dtype)
        k = torch.expm1(log_decay).neg_() if k is None else plan.tiles(k, dtype)
        return cls(plan.tiles(q, dtype), k, plan.tiles(v, dtype), Anchors.of(log_decay))

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the states ``[b h n k v]`` before and after every chunk, the last of them)."""
        after = (self.k * self.anchors.write).mT @ self.v
        before, carry = torch.empty_like(after), self.anchors.carry
        for n in range(after.shape[2]):
            before[:, :, n] = state
            state = after[:, :, n].addcmul_(carry[:, :, n], state)
        return before, after, state.clone()

    def scan_back(self, dbefore: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """(gradients of the states after every chunk, of the first), from what o gives of those
        before.
        """
        dafter, carry = torch.empty_like(dbefore), self.anchors.carry
        for n in reversed(range(dbefore.shape[2])):
            dafter[:, :, n] = dstate
            dstate = dbefore[:, :, n].addcmul_(carry[:, :, n], dstate)
        return dafter, dstate.clone()

    def output(self, before: Tensor) -> Tensor:
        return (self.anchors.inner(self.q, self.k) @ self.v).add_(
            (self.q * self.anchors.read) @ before
        )

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[Gradients, Tensor]:
        """As `_DecayChunks.back`."""
        q, k, v, anchors = self
        before, after, _ = self.scan(start)
        dafter, dstart = self.scan_back((q * anchors.read).mT @ do, dstate)
        dq, dk = anchors.inner_back(q, k, do @ v.mT)
        dq.addcmul_(do @ before.mT, anchors.read)
        dk.addcmul_(v @ dafter.mT, anchors.write)
        dv = (anchors.inner(q, k).mT @ do).add_((k * anchors.write) @ dafter)
        return (
            dq,
            dk,
            dv,
            anchors.backward((q * dq).sub_(k * dk), (dafter * after).sum(-1)),
        ), dstart


class _ChunkedDecay(torch.autograd.Function):
    """(o ``[b t h v]``, S_T) of q, k, v, log_decay with all axes but the last spelled out,
    and S_0.
    """

    @staticmethod
    @route_products
    def forward(
        ctx: Any,
        chunks_of: ChunksOf,
        plan: BlockPlan,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty(v.shape, dtype=state.dtype, device=v.device)
        starts = []
        for span in plan.spans(q.shape[1]):
            starts.append(state)
            chunks = chunks_of(plan, state.dtype, *slice_streams(span, q, k, v, log_decay))
            before, _, state = chunks.scan(state)
            o[:, span] = plan.untile(chunks.output(before), span.stop - span.start)
        ctx.plan, ctx.chunks_of = plan, chunks_of
        ctx.save_for_backward(q, k, v, log_decay, *starts)
        return o, state

    @staticmethod
    @once_differentiable
    @route_products
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        q, k, v, log_decay, *starts = ctx.saved_tensors
        grads = [None if s is None else torch.empty_like(s) for s in (q, k, v, log_decay)]
        for span, start in reversed(list(zip(plan.spans(q.shape[1]), starts, strict=True))):
            chunks = ctx.chunks_of(plan, start.dtype, *slice_streams(span, q, k, v, log_decay))
            found, dstate = chunks.back(start, plan.tiles(do[:, span], start.dtype), dstate)
            for grad, tiles in zip(
                grads, _untie_key(plan, found, k, slice_streams(span, log_decay)[0]), strict=True
            ):
                if grad is not None and tiles is not None:
                    grad[:, span] = plan.untile(tiles, span.stop - span.start)
        return None, None, *grads, dstate


def _untie_key(
    plan: BlockPlan, found: Gradients, k: Tensor | None, log_decay: Tensor | None
) -> Gradients:
    """The gradients with that of the tied key 1 - α added to that of log α."""
    dq, dk, dv, ddecay = found
    if k is None and log_decay is not None and ddecay is not None:
        ddecay = ddecay - plan.tiles(log_decay, dk.dtype).exp() * dk
    return dq, dk, dv, ddecay


def chunkwise_decay(recurrence: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of a real `Decay`."""
    b, t, h = recurrence.shape
    chunk = largest_safe_chunk(recurrence.log_decay)
    streams = (recurrence.q, recurrence.k, recurrence.v, recurrence.log_decay)
    spelled: list[Any] = [None if s is None else s.expand(b, t, h, -1) for s in streams]
    chunks_of, chunk = (
        (_DecayChunks.of, chunk) if chunk else (_AnchoredDecayChunks.of, ANCHORED_CHUNK)
    )
    o, state = _ChunkedDecay.apply(chunks_of, BlockPlan.of(chunk, b * h, t), *spelled, state)
    return recurrence.add_skip(o), state


CHUNKED_DECAY = Kernel("blocked decay (torch)", Decay, chunkwise_decay, refuse_complex)
