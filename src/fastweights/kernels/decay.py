"""`Decay` in time blocks that fit the cache, with a hand-written backward that recomputes inside a block.

A block is a few chunks of all sequences and heads at once. With c_t = Σ_{j≤t} log α_j inside a chunk and
μ = ½ c_last, write Q_t = q_t e^(c_t-μ), K_s = k_s e^(μ-c_s), m = e^μ and R = m ⊙ S for the state S before it. Then

    o = tril(Q Kᵀ) V + Q R          S' = m ⊙ (R + Kᵀ V)

are matrix products, and one exponential per decay is all they need. The exponents reach ± half the chunk's total
log decay: the chunk is shortened until that is harmless, and a record that decays faster still goes the exact way of
`decayed_products`. Kept for the backward are the streams and the states at block starts, nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.decay import Decay

CHUNKS = (64, 32, 16)
TILES = 128
HARMLESS = 80.0
"""Total log decay of a chunk up to which float32 carries e^(± half of it) without loss."""


class _Chunks(NamedTuple):
    """Q, K ``[b h n c k]``, V ``[b h n c v]`` and m ``[b h n k|1 1]`` of n chunks, and e^(c-μ), by which Q is q."""

    q: Tensor
    k: Tensor
    v: Tensor
    m: Tensor | None
    scale: Tensor | None

    def decayed(self, state: Tensor, n: int, out: Tensor) -> Tensor:
        return out.copy_(state) if self.m is None else torch.mul(state, self.m[:, :, n], out=out)

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(R and R + KᵀV ``[b h n k v]`` of every chunk, the state after the last)."""
        after = self.k.mT @ self.v
        before, last = torch.empty_like(after), torch.empty_like(state)
        for n in range(after.shape[2]):
            after[:, :, n] += self.decayed(state, n, out=before[:, :, n])
            state = self.decayed(after[:, :, n], n, out=last)
        return before, after, state

    def scan_back(self, dbefore: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradients of R and R + KᵀV, of the state before the first), from Qᵀ dO (overwritten) and dS'."""
        dafter, first = torch.empty_like(dbefore), torch.empty_like(dstate)
        for n in reversed(range(dbefore.shape[2])):
            dbefore[:, :, n] += self.decayed(dstate, n, out=dafter[:, :, n])
            dstate = self.decayed(dbefore[:, :, n], n, out=first)
        return dbefore, dafter, dstate


class _Plan(NamedTuple):
    """Chunk length, and chunks per block."""

    chunk: int
    chunks: int

    @classmethod
    def of(cls, chunk: int, sequences: int, length: int) -> _Plan:
        return cls(chunk, min(max(1, TILES // max(sequences, 1)), -(-length // chunk)))

    def spans(self, length: int) -> list[slice]:
        block = self.chunk * self.chunks
        return [slice(start, min(start + block, length)) for start in range(0, length, block)]

    def tiles(self, stream: Tensor, dtype: torch.dtype) -> Tensor:
        """``[b t h ·]`` of one block → ``[b h n c ·]``, zeros behind the end."""
        behind = -stream.shape[1] % self.chunk
        stream = F.pad(stream, (0, 0, 0, 0, 0, behind)) if behind else stream
        return stream.unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2, 4).to(dtype).contiguous()

    def untile(self, tiles: Tensor, span: slice) -> Tensor:
        """The reverse of `tiles`."""
        return tiles.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : span.stop - span.start]


    def block(
        self, span: slice, dtype: torch.dtype, q: Tensor, k: Tensor | None, v: Tensor, log_decay: Tensor | None
    ) -> _Chunks:
        """The chunks of the tokens in `span`."""
        q, v = self.tiles(q[:, span], dtype), self.tiles(v[:, span], dtype)
        k = None if k is None else self.tiles(k[:, span], dtype)
        if log_decay is None:
            assert k is not None
            return _Chunks(q, k, v, None, None)
        log_decay = self.tiles(log_decay[:, span], dtype)
        k = torch.expm1(log_decay).neg_() if k is None else k
        total = log_decay.cumsum(-2)
        middle = total[..., -1:, :] / 2
        scale = total.sub_(middle).exp_()
        return _Chunks(q * scale, k / scale, v, middle.exp().mT, scale)


class _ChunkedDecay(torch.autograd.Function):
    """(o ``[b t h v]``, S_T) of q, k, v, log_decay with all axes but the last spelled out, and S_0."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, q: Tensor, k: Tensor | None, v: Tensor, log_decay: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty(v.shape, dtype=state.dtype, device=v.device)
        starts = []
        for span in plan.spans(q.shape[1]):
            starts.append(state)
            chunks = plan.block(span, state.dtype, q, k, v, log_decay)
            before, _, state = chunks.scan(state)
            inner = (chunks.q @ chunks.k.mT).tril_()
            o[:, span] = plan.untile((inner @ chunks.v).add_(chunks.q @ before), span)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, log_decay, *starts)
        return o, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        q, k, v, log_decay, *starts = ctx.saved_tensors
        grads = [None if s is None else torch.empty_like(s) for s in (q, k, v, log_decay)]
        for span, start in reversed(list(zip(plan.spans(q.shape[1]), starts, strict=True))):
            chunks = plan.block(span, start.dtype, q, k, v, log_decay)
            dchunks, dmiddle, dstate = _chunks_back(chunks, start, plan.tiles(do[:, span], start.dtype), dstate)
            found = (dchunks.q, dchunks.k, dchunks.v, None)
            if log_decay is not None:
                decay = plan.tiles(log_decay[:, span], start.dtype)
                found = _streams_back(chunks, dchunks, dmiddle, decay, tied=k is None)
            for grad, tiles in zip(grads, found, strict=True):
                if grad is not None:
                    grad[:, span] = plan.untile(tiles, span)
        return None, *grads, dstate


def _chunks_back(chunks: _Chunks, start: Tensor, do: Tensor, dstate: Tensor) -> tuple[_Chunks, Tensor, Tensor]:
    """(gradients of Q, K and V; of the state-borne part of μ, ``[b h n 1 k]``; of the state before the block)."""
    before, after, _ = chunks.scan(start)
    dbefore, dafter, dstart = chunks.scan_back(chunks.q.mT @ do, dstate)
    dinner = (do @ chunks.v.mT).tril_()
    inner = (chunks.q @ chunks.k.mT).tril_()
    dq = (dinner @ chunks.k).add_(do @ before.mT)
    dk = (dinner.mT @ chunks.q).add_(chunks.v @ dafter.mT)
    dv = (inner.mT @ do).add_(chunks.k @ dafter)
    dmiddle = ((dbefore * before).sum(-1) + (dafter * after).sum(-1)).unsqueeze(-2)
    return _Chunks(dq, dk, dv, None, None), dmiddle, dstart


def _streams_back(
    chunks: _Chunks, d: _Chunks, dmiddle: Tensor, log_decay: Tensor, *, tied: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, d log_decay) of the streams, from the gradients of Q, K, V and μ.

    Q and 1/K carry e^(c-μ), so that d c = Q ⊙ dQ - K ⊙ dK; every log α up to t is in c_t, and half of all in μ.
    """
    assert chunks.scale is not None
    dtotal = (chunks.q * d.q).sub_(chunks.k * d.k)
    dmiddle = dmiddle - dtotal.sum(-2, keepdim=True)
    if log_decay.shape[-1] == 1:
        dtotal, dmiddle = dtotal.sum(-1, keepdim=True), dmiddle.sum(-1, keepdim=True)
    ddecay = dtotal.sum(-2, keepdim=True) - dtotal.cumsum(-2) + dtotal + dmiddle / 2
    dk = d.k / chunks.scale
    if tied:
        ddecay -= log_decay.exp() * dk
    return d.q * chunks.scale, dk, d.v, ddecay


def _chunk_length(log_decay: Tensor | None) -> int | None:
    """The longest chunk in which ``log_decay [b t h ·]`` stays harmless, or None."""
    if log_decay is None:
        return CHUNKS[0]
    sums, length = log_decay.detach(), 1
    behind = -sums.shape[1] % CHUNKS[0]
    sums = F.pad(sums, (0, 0, 0, 0, 0, behind))
    harmless = None
    for chunk in reversed(CHUNKS):
        sums, length = sums.unflatten(1, (-1, chunk // length)).sum(2), chunk
        if not sums.amin() > -HARMLESS:
            break
        harmless = chunk
    return harmless


def chunked_decay(recurrence: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of a real `Decay`."""
    b, t, h = recurrence.shape
    chunk = _chunk_length(recurrence.log_decay)
    if chunk is None:
        return chunk_loop(recurrence, state)
    plan = _Plan.of(chunk, b * h, t)
    streams = (recurrence.q, recurrence.k, recurrence.v, recurrence.log_decay)
    spelled = [None if s is None else s.expand(b, t, h, -1) for s in streams]
    o, state = _ChunkedDecay.apply(plan, *spelled, state)
    return recurrence.skipped(o), state


def refuses(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, Decay):
        return f"it is a {type(recurrence).__name__}, not a Decay"
    if recurrence.accumulator.is_complex:
        return "its streams are complex"
    return None


CHUNKED_DECAY = Kernel("blocked decay (torch)", refuses, chunked_decay)
