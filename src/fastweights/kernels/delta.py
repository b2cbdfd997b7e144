"""`Delta` in time blocks that fit the cache, with a hand-written backward that recomputes inside a
block.

With Q = q e^(c-μ), E = k e^(c-μ), K = k e^(μ-c), m = e^μ of `blocks`, and R = m ⊙ S for the state S
before a chunk, the values that the chunk really writes solve a unit lower triangular system,

    (I + β ⊙ tril(E Kᵀ, -1)) U = β ⊙ (V - E R)      o = tril(Q Kᵀ) U + Q R      S' = m ⊙ (R + Kᵀ U)

whose inverse T is taken once per chunk, so that only U = T βV - (T βE) R waits for the chunk
before. Kept for the backward are the streams and the states at block starts, nothing else.
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
from fastweights.recurrence.delta import Delta

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
ChunksOf = Callable[..., Any]


class _DeltaChunks(NamedTuple):
    """Q, E, K, V, β of n chunks (``[b h n c ·]``), T ``[b h n c c]``, and the factors that are in
    Q, E and K.
    """

    q: Tensor
    e: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    inverse: Tensor
    factors: Factors | None

    @classmethod
    def of(
        cls,
        plan: BlockPlan,
        dtype: torch.dtype,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
    ) -> _DeltaChunks:
        q, k, v, beta = (plan.tiles(s, dtype) for s in (q, k, v, beta))
        e, factors = k, None
        if log_decay is not None:
            factors = Factors.of(plan.tiles(log_decay, dtype))
            q, e, k = q * factors.scale, k * factors.scale, k / factors.scale
        return cls(q, e, k, v, beta, _inverse((e @ k.mT).mul_(beta)), factors)

    @property
    def m(self) -> Tensor | None:
        return None if self.factors is None else self.factors.m

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(R, R + KᵀU, U of every chunk, the state after the last)."""
        erased = self.inverse @ (self.beta * self.e)
        written = self.inverse @ (self.beta * self.v)
        shape = (*written.shape[:3], state.shape[-2], state.shape[-1])
        before, after = written.new_empty(shape), written.new_empty(shape)
        last = torch.empty_like(state)
        for n in range(written.shape[2]):
            decay_into(state, self.m, n, out=before[:, :, n])
            written[:, :, n] -= erased[:, :, n] @ before[:, :, n]
            torch.add(before[:, :, n], self.k[:, :, n].mT @ written[:, :, n], out=after[:, :, n])
            state = decay_into(after[:, :, n], self.m, n, out=last)
        return before, after, written, state

    def scan_back(
        self, dwritten: Tensor, dbefore: Tensor, dstate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(gradients of U, R, R + KᵀU, of the state before the first), from what o gives of the
        first two.
        """
        erased = self.inverse @ (self.beta * self.e)
        dafter, first = torch.empty_like(dbefore), torch.empty_like(dstate)
        for n in reversed(range(dbefore.shape[2])):
            decay_into(dstate, self.m, n, out=dafter[:, :, n])
            dwritten[:, :, n] += self.k[:, :, n] @ dafter[:, :, n]
            dbefore[:, :, n] += dafter[:, :, n] - erased[:, :, n].mT @ dwritten[:, :, n]
            dstate = decay_into(dbefore[:, :, n], self.m, n, out=first)
        return dwritten, dbefore, dafter, dstate

    def output(self, before: Tensor, written: Tensor) -> Tensor:
        return ((self.q @ self.k.mT).tril_() @ written).add_(self.q @ before)

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[Gradients, Tensor]:
        """Tiles of dq, dk, dv, dβ and d log_decay, and the gradient of the state before the
        block.
        """
        q, e, k, v, beta, inverse, factors = self
        before, after, written, _ = self.scan(start)
        inner = (q @ k.mT).tril_()
        dwritten, dbefore, dafter, dstart = self.scan_back(inner.mT @ do, q.mT @ do, dstate)

        dinner = (do @ written.mT).tril_()
        dq = (dinner @ k).add_(do @ before.mT)
        dk = (dinner.mT @ q).add_(written @ dafter.mT)
        solved = inverse.mT @ dwritten
        dv = beta * solved
        dsystem = (solved @ written.mT).tril_(-1).neg_()
        dbeta = (solved * (v - e @ before)).sum(-1, keepdim=True) + (dsystem * (e @ k.mT)).sum(
            -1, keepdim=True
        )
        dsystem.mul_(beta)
        de = (dsystem @ k).sub_(dv @ before.mT)
        dk.add_(dsystem.mT @ e)
        if factors is None:
            return (dq, dk.add_(de), dv, dbeta, None), dstart
        dtotal = (q * dq).add_(e * de).sub_(k * dk)
        ddecay = factors.backward(dtotal, state_gradient_of_middle(before, dbefore, after, dafter))
        return (
            dq * factors.scale,
            (de * factors.scale).add_(dk / factors.scale),
            dv,
            dbeta,
            ddecay,
        ), dstart


class _AnchoredDeltaChunks(NamedTuple):
    """q, k, v, β of n chunks that decay at any rate, and T."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    inverse: Tensor
    anchors: Anchors

    @classmethod
    def of(
        cls,
        plan: BlockPlan,
        dtype: torch.dtype,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor,
    ) -> _AnchoredDeltaChunks:
        q, k, v, beta = (plan.tiles(s, dtype) for s in (q, k, v, beta))
        anchors = Anchors.of(plan.tiles(log_decay, dtype))
        return cls(q, k, v, beta, _inverse(anchors.inner(k, k).mul_(beta)), anchors)

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(S before and after every chunk, U, S after the last)."""
        erased, written = self._erasing_keys(), self.inverse @ (self.beta * self.v)
        keys, carry = (self.k * self.anchors.write).mT, self.anchors.carry
        before = written.new_empty(*written.shape[:3], *state.shape[-2:])
        after = torch.empty_like(before)
        for n in range(written.shape[2]):
            before[:, :, n] = state
            written[:, :, n] -= erased[:, :, n] @ state
            state = torch.addcmul(keys[:, :, n] @ written[:, :, n], carry[:, :, n], state)
            after[:, :, n] = state
        return before, after, written, state

    def scan_back(
        self, dwritten: Tensor, dbefore: Tensor, dstate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(gradients of U, of S after every chunk, of S before the first), from what o gives of U
        and S.
        """
        erased, keys, carry = (
            self._erasing_keys().mT,
            self.k * self.anchors.write,
            self.anchors.carry,
        )
        dafter = torch.empty_like(dbefore)
        for n in reversed(range(dbefore.shape[2])):
            dafter[:, :, n] = dstate
            dwritten[:, :, n] += keys[:, :, n] @ dstate
            dstate = (
                dbefore[:, :, n]
                .addcmul(carry[:, :, n], dstate)
                .sub_(erased[:, :, n] @ dwritten[:, :, n])
            )
        return dwritten, dafter, dstate

    def _erasing_keys(self) -> Tensor:
        return self.inverse @ (self.beta * self.k * self.anchors.read)

    def output(self, before: Tensor, written: Tensor) -> Tensor:
        return (self.anchors.inner(self.q, self.k) @ written).add_(
            (self.q * self.anchors.read) @ before
        )

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[Gradients, Tensor]:
        """As `_DeltaChunks.back`."""
        q, k, v, beta, inverse, anchors = self
        before, after, written, _ = self.scan(start)
        inner = anchors.inner(q, k)
        dwritten, dafter, dstart = self.scan_back(inner.mT @ do, (q * anchors.read).mT @ do, dstate)

        dq, dk = anchors.inner_back(q, k, do @ written.mT)
        dq.addcmul_(do @ before.mT, anchors.read)
        dk.addcmul_(written @ dafter.mT, anchors.write)
        solved = inverse.mT @ dwritten
        dv = beta * solved
        dsystem = (solved @ written.mT).tril_(-1).neg_()
        missing = v - (k * anchors.read) @ before
        dbeta = (solved * missing).sum(-1, keepdim=True) + (dsystem * anchors.inner(k, k)).sum(
            -1, keepdim=True
        )
        de, dkey = anchors.inner_back(k, k, dsystem.mul_(beta))
        de.addcmul_(dv @ before.mT, anchors.read, value=-1)
        dk.add_(dkey)
        ddecay = anchors.backward((q * dq).add_(k * de).sub_(k * dk), (dafter * after).sum(-1))
        return (dq, dk.add_(de), dv, dbeta, ddecay), dstart


def _inverse(system: Tensor) -> Tensor:
    """(I + tril(system, -1))⁻¹"""
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
    return torch.linalg.solve_triangular(system.tril_(-1), one, upper=False, unitriangular=True)


class _ChunkedDelta(torch.autograd.Function):
    """(o ``[b t h v]``, S_T) of q, k, v, beta, log_decay with all axes but the last spelled out,
    and S_0.
    """

    @staticmethod
    @route_products
    def forward(
        ctx: Any,
        chunks_of: ChunksOf,
        plan: BlockPlan,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty(v.shape, dtype=state.dtype, device=v.device)
        starts = []
        for span in plan.spans(q.shape[1]):
            starts.append(state)
            chunks = chunks_of(plan, state.dtype, *slice_streams(span, q, k, v, beta, log_decay))
            before, _, written, state = chunks.scan(state)
            o[:, span] = plan.untile(chunks.output(before, written), span.stop - span.start)
        ctx.plan, ctx.chunks_of = plan, chunks_of
        ctx.save_for_backward(q, k, v, beta, log_decay, *starts)
        return o, state

    @staticmethod
    @once_differentiable
    @route_products
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        plan: BlockPlan = ctx.plan
        q, k, v, beta, log_decay, *starts = ctx.saved_tensors
        streams = (q, k, v, beta)
        grads = [None if s is None else torch.empty_like(s) for s in (*streams, log_decay)]
        for span, start in reversed(
            list(zip(plan.spans(streams[0].shape[1]), starts, strict=True))
        ):
            chunks = ctx.chunks_of(plan, start.dtype, *slice_streams(span, *streams, log_decay))
            found, dstate = chunks.back(start, plan.tiles(do[:, span], start.dtype), dstate)
            for grad, tiles in zip(grads, found, strict=True):
                if grad is not None and tiles is not None:
                    grad[:, span] = plan.untile(tiles, span.stop - span.start)
        return None, None, *grads, dstate


def chunkwise_delta(recurrence: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of a real `Delta`."""
    b, t, h = recurrence.shape
    chunk = largest_safe_chunk(recurrence.log_decay)
    streams = (recurrence.q, recurrence.k, recurrence.v, recurrence.beta, recurrence.log_decay)
    spelled = [None if s is None else s.expand(b, t, h, -1) for s in streams]
    chunks_of, chunk = (
        (_DeltaChunks.of, chunk) if chunk else (_AnchoredDeltaChunks.of, ANCHORED_CHUNK)
    )
    o, state = _ChunkedDelta.apply(chunks_of, BlockPlan.of(chunk, b * h, t), *spelled, state)
    return o.to(recurrence.output), state


CHUNKED_DELTA = Kernel("blocked delta (torch)", Delta, chunkwise_delta, refuse_complex)
