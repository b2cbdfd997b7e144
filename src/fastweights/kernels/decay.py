"""`Decay` in time blocks that fit the cache, with a hand-written backward that recomputes inside a
block.

With Q = q e^(c-μ), K = k e^(μ-c) and m = e^μ of `blocks`, and R = m ⊙ S for the state S before a
chunk,

    o = tril(Q Kᵀ) V + Q R          S' = m ⊙ (R + Kᵀ V)

Kept for the backward are the streams and the states at block starts, nothing else.
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
from fastweights.recurrence.decay import Decay

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class _FactoredChunks(NamedTuple):
    """Q, K ``[b h n c k]`` and V ``[b h n c v]`` of n chunks, the factors that are in Q and K, and
    log α where the key is 1 - α.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Factors | None
    tied: Tensor | None

    @classmethod
    def of(
        cls,
        plan: BlockPlan,
        dtype: torch.dtype,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        log_decay: Tensor | None,
    ) -> _FactoredChunks:
        q, v = plan.tiles(q, dtype), plan.tiles(v, dtype)
        key = None if k is None else plan.tiles(k, dtype)
        if log_decay is None:
            assert key is not None
            return cls(q, key, v, None, None)
        log_decay = plan.tiles(log_decay, dtype)
        tied = log_decay if key is None else None
        key = torch.expm1(log_decay).neg_() if key is None else key
        factors = Factors.of(log_decay)
        return cls(q * factors.scale, key / factors.scale, v, factors, tied)

    @property
    def m(self) -> Tensor | None:
        return None if self.factors is None else self.factors.m

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(R and R + KᵀV ``[b h n k v]`` of every chunk, the state after the last)."""
        after = self.k.mT @ self.v
        before, last = torch.empty_like(after), torch.empty_like(state)
        for n in range(after.shape[2]):
            # R = m ⊙ S, then R + KᵀV, then S' = m ⊙ (R + KᵀV)
            after[:, :, n] += decay_into(state, self.m, n, out=before[:, :, n])
            state = decay_into(after[:, :, n], self.m, n, out=last)
        return before, after, state

    def scan_back(self, dbefore: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradients of R and R + KᵀV, of the state before the first), from Qᵀ dO (overwritten) and
        dS'.
        """
        dafter, first = torch.empty_like(dbefore), torch.empty_like(dstate)
        for n in reversed(range(dbefore.shape[2])):
            # S' = m ⊙ W gives dW = m ⊙ dS'; W = R + KᵀV adds dW to dR; S is read as R = m ⊙ S
            dbefore[:, :, n] += decay_into(dstate, self.m, n, out=dafter[:, :, n])
            dstate = decay_into(dbefore[:, :, n], self.m, n, out=first)
        return dbefore, dafter, dstate

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        before, _, last = self.scan(state)
        return ((self.q @ self.k.mT).tril_() @ self.v).add_(self.q @ before), last

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[Gradients, Tensor]:
        """Gradients of the streams ``[b h n c ·]``, that of k as if it were given, and of the state
        before them.
        """
        before, after, _ = self.scan(start)
        dbefore, dafter, dstart = self.scan_back(self.q.mT @ do, dstate)
        # o = A V + Q R with A = tril(Q Kᵀ), so dA = tril(dO Vᵀ)
        dinner = (do @ self.v.mT).tril_()
        inner = (self.q @ self.k.mT).tril_()
        # dQ = dA K + dO Rᵀ;  K is in A and in W = R + KᵀV: dK = dAᵀ Q + V dWᵀ;  V likewise
        dq = (dinner @ self.k).add_(do @ before.mT)
        dk = (dinner.mT @ self.q).add_(self.v @ dafter.mT)
        dv = (inner.mT @ do).add_(self.k @ dafter)
        if self.factors is None:
            return (dq, dk, dv, None), dstart
        # Q = q e^(c-μ) and K = k e^(μ-c): d(c-μ) = Q ⊙ dQ - K ⊙ dK, and μ is in m = e^μ as well
        dmiddle = state_gradient_of_middle(before, dbefore, after, dafter)
        ddecay = self.factors.backward((self.q * dq).sub_(self.k * dk), dmiddle)
        dq, dk = dq * self.factors.scale, dk / self.factors.scale
        return (dq, dk, dv, _add_tied_key(ddecay, dk, self.tied)), dstart


class _AnchoredChunks(NamedTuple):
    """q, k ``[b h n c k]`` and v ``[b h n c v]`` of n chunks that decay at any rate, and log α
    where the key is 1 - α.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    anchors: Anchors
    tied: Tensor | None

    @classmethod
    def of(
        cls,
        plan: BlockPlan,
        dtype: torch.dtype,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        log_decay: Tensor | None,
    ) -> _AnchoredChunks:
        assert log_decay is not None
        log_decay = plan.tiles(log_decay, dtype)
        key = torch.expm1(log_decay).neg_() if k is None else plan.tiles(k, dtype)
        tied = log_decay if k is None else None
        return cls(plan.tiles(q, dtype), key, plan.tiles(v, dtype), Anchors.of(log_decay), tied)

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(the states ``[b h n k v]`` before and after every chunk, the last of them)."""
        after = (self.k * self.anchors.write).mT @ self.v
        before, carry = torch.empty_like(after), self.anchors.carry
        for n in range(after.shape[2]):
            # S' = carry ⊙ S + Σ_s (k_s decayed to the chunk's end)ᵀ v_s
            before[:, :, n] = state
            state = after[:, :, n].addcmul_(carry[:, :, n], state)
        return before, after, state.clone()

    def scan_back(self, dbefore: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """(gradients of the states after every chunk, of the first), from what o gives of those
        before.
        """
        dafter, carry = torch.empty_like(dbefore), self.anchors.carry
        for n in reversed(range(dbefore.shape[2])):
            # S reaches o, and S' as carry ⊙ S: dS = (what o gives) + carry ⊙ dS'
            dafter[:, :, n] = dstate
            dstate = dbefore[:, :, n].addcmul_(carry[:, :, n], dstate)
        return dafter, dstate.clone()

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        before, _, last = self.scan(state)
        o = self.anchors.inner(self.q, self.k) @ self.v
        return o.add_((self.q * self.anchors.read) @ before), last

    def back(self, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[Gradients, Tensor]:
        """As `_FactoredChunks.back`."""
        q, k, v, anchors, tied = self
        before, after, _ = self.scan(start)
        dafter, dstart = self.scan_back((q * anchors.read).mT @ do, dstate)
        # o = P V + (q ⊙ read) S with P = inner(q, k), so dP = dO Vᵀ, which inner_back hands on
        dq, dk = anchors.inner_back(q, k, do @ v.mT)
        # what q reads from S, and what k leaves in S' = carry ⊙ S + (k ⊙ write)ᵀ V
        dq.addcmul_(do @ before.mT, anchors.read)
        dk.addcmul_(v @ dafter.mT, anchors.write)
        dv = (anchors.inner(q, k).mT @ do).add_((k * anchors.write) @ dafter)
        # a query carries e^(c_t), a key e^(-c_s): d c = q ⊙ dq - k ⊙ dk; S' carries e^(c_last)
        ddecay = anchors.backward((q * dq).sub_(k * dk), (dafter * after).sum(-1))
        return (dq, dk, dv, _add_tied_key(ddecay, dk, tied)), dstart


def _add_tied_key(ddecay: Tensor, dk: Tensor, tied: Tensor | None) -> Tensor:
    """d log α with the share of the tied key k = 1 - α: dk/d log α = -α."""
    return ddecay if tied is None else ddecay - tied.exp() * dk


def chunkwise_decay(recurrence: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of a real `Decay`."""
    streams = (recurrence.q, recurrence.k, recurrence.v, recurrence.log_decay)
    kinds = (_FactoredChunks.of, _AnchoredChunks.of)
    o, state = evaluate_in_blocks(Decay, recurrence, streams, state, *kinds)
    return recurrence.add_skip(o), state


CHUNKED_DECAY = Kernel("blocked decay (torch)", Decay, chunkwise_decay, refuse_complex, opaque=True)
