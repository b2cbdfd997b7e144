"""`Delta` in time blocks that fit the cache, with a hand-written backward that recomputes inside a
block.

With Q = q e^(c-μ), E = k e^(c-μ), K = k e^(μ-c), m = e^μ of `blocks`, and R = m ⊙ S for the state S
before a chunk, the values that the chunk really writes solve a unit lower triangular system,

    (I + β ⊙ tril(E Kᵀ, -1)) U = β ⊙ (V - E R)      o = tril(Q Kᵀ) U + Q R      S' = m ⊙ (R + Kᵀ U)

whose inverse T is taken once per chunk, so that only U = T βV - (T βE) R waits for the chunk
before. Kept for the backward are the streams and the states at block starts, nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.anchors import Anchors
from fastweights.kernels.blocks import (
    BlockPlan,
    Factors,
    decay_into,
    evaluate_in_blocks,
    state_gradient_of_middle,
)
from fastweights.kernels.table import Kernel, refuse_complex
from fastweights.recurrence.delta import Delta

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class _FactoredChunks(NamedTuple):
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
    ) -> _FactoredChunks:
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
            # R = m ⊙ S;  U = T βV - (T βE) R;  S' = m ⊙ (R + KᵀU)
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
            # with W = R + KᵀU: dW = m ⊙ dS', which reaches U as K dW
            decay_into(dstate, self.m, n, out=dafter[:, :, n])
            dwritten[:, :, n] += self.k[:, :, n] @ dafter[:, :, n]
            # R is in W and, as -(T βE) R, in U;  R = m ⊙ S
            dbefore[:, :, n] += dafter[:, :, n] - erased[:, :, n].mT @ dwritten[:, :, n]
            dstate = decay_into(dbefore[:, :, n], self.m, n, out=first)
        return dwritten, dbefore, dafter, dstate

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        before, _, written, last = self.scan(state)
        return ((self.q @ self.k.mT).tril_() @ written).add_(self.q @ before), last

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[Gradients, Tensor]:
        """Tiles of dq, dk, dv, dβ and d log_decay, and the gradient of the state before the
        block.
        """
        q, e, k, v, beta, inverse, factors = self
        before, after, written, _ = self.scan(start)
        inner = (q @ k.mT).tril_()
        # o = A U + Q R with A = tril(Q Kᵀ): Aᵀ dO is o's part of dU, and Qᵀ dO its part of dR
        dwritten, dbefore, dafter, dstart = self.scan_back(inner.mT @ do, q.mT @ do, dstate)

        # dA = tril(dO Uᵀ), dQ = dA K + dO Rᵀ, and K's parts in A and in W = R + KᵀU
        dinner = (do @ written.mT).tril_()
        dq = (dinner @ k).add_(do @ before.mT)
        dk = (dinner.mT @ q).add_(written @ dafter.mT)
        # (I + M) U = B with M = β ⊙ tril(E Kᵀ, -1) and B = β ⊙ (V - E R): dB = (I + M)⁻ᵀ dU = Tᵀ dU
        solved = inverse.mT @ dwritten
        dv = beta * solved
        # dM = -dB Uᵀ below the diagonal
        dsystem = (solved @ written.mT).tril_(-1).neg_()
        # β multiplies the rows of V - E R in B and those of E Kᵀ in M
        missing, overlap = v - e @ before, e @ k.mT
        dbeta = (solved * missing).sum(-1, keepdim=True) + (dsystem * overlap).sum(-1, keepdim=True)
        # d(E Kᵀ) = β ⊙ dM: E's part there and, through -β ⊙ (E R), in B; K's part there
        dsystem.mul_(beta)
        de = (dsystem @ k).sub_(dv @ before.mT)
        dk.add_(dsystem.mT @ e)
        if factors is None:
            return (dq, dk.add_(de), dv, dbeta, None), dstart
        # Q and E carry e^(c-μ), K carries e^(μ-c), and m = e^μ
        dtotal = (q * dq).add_(e * de).sub_(k * dk)
        ddecay = factors.backward(dtotal, state_gradient_of_middle(before, dbefore, after, dafter))
        # k is in E and in K
        dk = (de * factors.scale).add_(dk / factors.scale)
        return (dq * factors.scale, dk, dv, dbeta, ddecay), dstart


class _AnchoredChunks(NamedTuple):
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
    ) -> _AnchoredChunks:
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
            # U = T βV - (T βE) S with E = k ⊙ read;  S' = carry ⊙ S + (k ⊙ write)ᵀ U
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
            # dU = (what o gives) + (k ⊙ write) dS';  dS = (what o gives) + carry ⊙ dS' - (T βE)ᵀ dU
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

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        before, _, written, last = self.scan(state)
        o = self.anchors.inner(self.q, self.k) @ written
        return o.add_((self.q * self.anchors.read) @ before), last

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[Gradients, Tensor]:
        """As `_FactoredChunks.back`."""
        q, k, v, beta, inverse, anchors = self
        before, after, written, _ = self.scan(start)
        inner = anchors.inner(q, k)
        # o = P U + (q ⊙ read) S with P = inner(q, k)
        dwritten, dafter, dstart = self.scan_back(inner.mT @ do, (q * anchors.read).mT @ do, dstate)

        # dP = dO Uᵀ; then what q reads from S, and what k leaves in S'
        dq, dk = anchors.inner_back(q, k, do @ written.mT)
        dq.addcmul_(do @ before.mT, anchors.read)
        dk.addcmul_(written @ dafter.mT, anchors.write)
        # (I + M) U = B with M = β ⊙ tril(inner(k, k), -1) and B = β ⊙ (V - (k ⊙ read) S): as above,
        # dB = Tᵀ dU and dM = -dB Uᵀ below the diagonal
        solved = inverse.mT @ dwritten
        dv = beta * solved
        dsystem = (solved @ written.mT).tril_(-1).neg_()
        # β multiplies rows of both
        missing, overlap = v - (k * anchors.read) @ before, anchors.inner(k, k)
        dbeta = (solved * missing).sum(-1, keepdim=True) + (dsystem * overlap).sum(-1, keepdim=True)
        # k erases as a query, in inner(k, k) and of S, and is erased as a key
        de, dkey = anchors.inner_back(k, k, dsystem.mul_(beta))
        de.addcmul_(dv @ before.mT, anchors.read, value=-1)
        dk.add_(dkey)
        # queries, erasing keys among them, carry e^(c_t), keys e^(-c_s), and S' carries e^(c_last)
        ddecay = anchors.backward((q * dq).add_(k * de).sub_(k * dk), (dafter * after).sum(-1))
        return (dq, dk.add_(de), dv, dbeta, ddecay), dstart


def _inverse(system: Tensor) -> Tensor:
    """(I + tril(system, -1))⁻¹"""
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
    return torch.linalg.solve_triangular(system.tril_(-1), one, upper=False, unitriangular=True)


def chunkwise_delta(recurrence: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of a real `Delta`."""
    r = recurrence
    streams = (r.q, r.k, r.v, r.beta, r.log_decay)
    kinds = (_FactoredChunks.of, _AnchoredChunks.of)
    o, state = evaluate_in_blocks(recurrence, streams, state, *kinds)
    return o.to(recurrence.output), state


CHUNKED_DELTA = Kernel("blocked delta (torch)", Delta, chunkwise_delta, refuse_complex)
