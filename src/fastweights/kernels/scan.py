"""`Decay` with a small state per head, element by element: S_t = α_t S_{t-1} + x_t with x_t = k_tᵀ
v_t.

A time block is a few chunks of all sequences and heads. Where one token has enough elements to keep
the processor busy, a block is one chunk, whose tokens follow each other. Else the chunks advance
side by side, twice: first from nothing, for what each adds to the state; then, with the states at
their starts known, for good.

Kept for the backward are the streams and the states at block starts. What reaches S_{t-1} is the
same scan in reverse, G_t = ᾱ_t (G_{t+1} + q̄_t do_t); with it dS_t = G_{t+1} + q̄_t do_t and d log
α_t = S̄_{t-1} G_t.

Inside, streams are ``[b t k v h]``, with length 1 where they do not vary; such an axis is never
spelled out, in time neither. Only log α ≤ 0 is exponentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.table import Kernel
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.derivatives import differentiable_by

BUSY = 1 << 13
"""Elements per operation from which on its fixed cost no longer shows."""
CHUNK = 32
MOST_KEYS, MOST_VALUES, MOST_ELEMENTS = 256, 32, 4
"""Up to how many keys with one value, values with one key, and k·v of any, this beats matrix
products over chunks.
"""
MOST_COMPLEX = 1024
"""The same k·v for complex records, which no other blocked kernel takes."""

Shape = tuple[int, ...]


class ScanPlan(NamedTuple):
    """Tokens per chunk, and chunks per block."""

    chunk: int
    chunks: int

    @classmethod
    def of(cls, width: int) -> ScanPlan:
        """The plan for tokens of `width` elements."""
        return cls(CHUNK, -(-BUSY // max(width, 1)))

    def spans(self, length: int) -> list[slice]:
        """The blocks: whole chunks each, and what is left over."""
        block, whole = self.chunk * self.chunks, length - length % self.chunk
        spans = [slice(start, min(start + block, whole)) for start in range(0, whole, block)]
        return spans if whole == length else [*spans, slice(whole, length)]


class _ScanBlock(NamedTuple):
    """q, k, v and α of a block, ``[b t k v h]`` with lengths 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor

    @classmethod
    def of(
        cls,
        span: slice,
        dtype: torch.dtype,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        log_decay: Tensor | None,
    ) -> _ScanBlock:
        rows, columns = (_tokens(s, span).to(dtype).mT for s in (q, v))
        log_alpha = torch.zeros((), dtype=dtype, device=q.device).expand(1, 1, 1, 1)
        if log_decay is not None:
            log_alpha = _tokens(log_decay, span).to(dtype).mT
        key = torch.expm1(log_alpha).neg_() if k is None else _tokens(k, span).to(dtype).mT
        return cls(
            rows[:, :, :, None],
            key[:, :, :, None],
            columns[:, :, None],
            log_alpha.exp()[:, :, :, None],
        )

    def states(self, start: Tensor, length: int, chunk: int) -> Tensor:
        """S after each token ``[b t k v h]``, from the state before the first ``[b k v h]``."""
        states = self.product(self.k, self.v, (start.shape[0], length, *start.shape[1:]))
        _scan(self.alpha, states, start, chunk)
        return states

    def product(self, a: Tensor, b: Tensor, shape: Shape) -> Tensor:
        """a ⊙ b spelled out to `shape`, laid out in memory as α is."""
        return torch.mul(
            a.expand(shape), b, out=torch.empty_like(self.alpha.expand(shape), dtype=a.dtype)
        )


def _by_chunks(*arguments: Any) -> tuple[Tensor, Tensor]:
    _, *streams, state = arguments
    wide: list[Any] = [None if s is None else s.to(state.dtype) for s in streams]
    record = Decay(*wide)
    o, last = chunk_loop(record, state.permute(0, 3, 1, 2))
    assert isinstance(last, Tensor)
    return o.mT, last.permute(0, 2, 3, 1)


class _Scan(torch.autograd.Function):
    """(o ``[b t v h]``, S_T ``[b k v h]``) of q, k, v, log_decay as the record has them,
    and S_0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        length: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        b, _, values, h = state.shape
        plan, starts = ScanPlan.of(state.numel()), []
        o = state.new_empty(b, length, values, h)
        for span in plan.spans(length):
            starts.append(state)
            block = _ScanBlock.of(span, state.dtype, q, k, v, log_decay)
            states = block.states(state, span.stop - span.start, plan.chunk)
            o[:, span] = _sum_product(
                block.q, states, (b, span.stop - span.start, 1, values, h)
            ).squeeze(2)
            state = states[:, -1].clone()
        ctx.length, ctx.plan = length, plan
        ctx.save_for_backward(q, k, v, log_decay, *starts)
        return o, state

    @staticmethod
    @differentiable_by(lambda ctx: (_by_chunks, (ctx.length, *ctx.saved_tensors[:5])))
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, *starts = ctx.saved_tensors
        streams = (q, k, v, log_decay)
        grads = [None if s is None else _gradient_buffer(s, dstate.dtype) for s in streams]
        for span, start in reversed(list(zip(ctx.plan.spans(ctx.length), starts, strict=True))):
            block = _ScanBlock.of(span, start.dtype, *streams)
            found, dstate = _block_back(
                block, start, do[:, span, None], dstate, ctx.plan.chunk, tied=k is None
            )
            for grad, part in zip(grads, found, strict=True):
                if grad is not None:
                    _store_gradient(grad, span, part)
        return (
            None,
            *(g if g is None else g.to(s.dtype) for g, s in zip(grads, streams, strict=True)),
            dstate,
        )


def _block_back(
    block: _ScanBlock, start: Tensor, do: Tensor, dstate: Tensor, chunk: int, *, tied: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """(dq, dk, dv, d log α, each ``[b t k|v h]`` with the lengths 1 of its stream; dS before the
    block).
    """
    length = do.shape[1]
    states = block.states(start, length, chunk)
    # gradients of complex products are those of the conjugates
    q, k, v, alpha = (s.conj().resolve_conj() for s in block)
    # o_t = q_t S_t gives q̄_t do_t to S_t
    dstates = block.product(q, do, states.shape)
    # G_t = ᾱ_t (G_{t+1} + q̄_t do_t), what reaches S_{t-1}: the scan in reverse, from d S_T
    through = alpha * dstates
    dstart = _scan(alpha, through, dstate, chunk, reverse=True).clone()
    # dS_t = G_{t+1} + q̄_t do_t
    dstates[:, :-1] += through[:, 1:]
    dstates[:, -1] += dstate
    # o_t = Σ_k q_t S_t, and S_t takes up k_t v_t
    dq = _sum_product(states.conj(), do, q.shape)
    dk = _sum_product(dstates, v, k.shape)
    dv = _sum_product(dstates, k, v.shape)
    # S_t holds e^(log α_t) S_{t-1}: d log α_t = S̄_{t-1} ⊙ ᾱ_t dS_t = S̄_{t-1} ⊙ G_t
    through[:, 1:] *= states[:, :-1].conj()
    through[:, 0] *= start.conj()
    dlog_alpha = through.sum_to_size(alpha.shape)
    if tied:
        # k = 1 - α: dk / d log α = -α
        dlog_alpha -= alpha * dk
    return (dq.squeeze(3), dk.squeeze(3), dv.squeeze(2), dlog_alpha.squeeze(3)), dstart


def _scan(alpha: Tensor, x: Tensor, state: Tensor, chunk: int, *, reverse: bool = False) -> Tensor:
    """x_t ← α_t x_{t-1} + x_t along the time axis of ``x [b t …]``, from `state`; returns
    the last.
    """
    alpha = alpha.expand(-1, x.shape[1], *alpha.shape[2:])
    if x.shape[1] <= chunk:
        return _follow(_unbind_time(alpha, 1, reverse), _unbind_time(x, 1, reverse), state)
    # all chunks side by side, each from nothing: what it adds to the state
    alpha, x = alpha.unflatten(1, (-1, chunk)), x.unflatten(1, (-1, chunk))
    decays, tokens = _unbind_time(alpha, 2, reverse), _unbind_time(x, 2, reverse)
    added = tokens[0]
    for decay, token in zip(decays[1:], tokens[1:], strict=True):
        added = torch.addcmul(token, decay, added)
    # from chunk to chunk: the state at its end is its decay of the one at its start, plus that
    starts = torch.empty_like(added)
    for kept, addition, start in zip(
        *(_unbind_time(s, 1, reverse) for s in (alpha.prod(2), added, starts)), strict=True
    ):
        start.copy_(state)
        state = torch.addcmul(addition, kept, state)
    # all chunks once more, from the states at their starts
    _follow(decays, tokens, starts)
    return state


def _follow(decays: Sequence[Tensor], tokens: Sequence[Tensor], state: Tensor) -> Tensor:
    """Each token plus the decayed one before it, in place; returns the last."""
    for decay, token in zip(decays, tokens, strict=True):
        state = token.addcmul_(decay, state)
    return state


def _unbind_time(x: Tensor, dim: int, reverse: bool) -> Sequence[Tensor]:
    return x.unbind(dim)[:: -1 if reverse else 1]


def _tokens(stream: Tensor, span: slice) -> Tensor:
    return stream if stream.shape[1] == 1 else stream[:, span]


def _sum_product(a: Tensor, b: Tensor, shape: Shape) -> Tensor:
    """a ⊙ b, summed to `shape`: a matrix product where heads share one of the three."""
    if 1 not in (a.shape[-1], b.shape[-1], shape[-1]):
        return (a * b).sum_to_size(shape)
    letters = "btkvh"
    kept = "".join(letter for letter, length in zip(letters, shape, strict=True) if length > 1)
    return torch.einsum(f"{letters},{letters}->{kept}", a, b).reshape(shape)


def _gradient_buffer(stream: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for the gradient of `stream`: a sum over the blocks if it is constant in time."""
    if stream.shape[1] > 1:
        return torch.empty_like(stream)
    return torch.zeros_like(stream, dtype=dtype if stream.is_complex() else dtype.to_real())


def _store_gradient(grad: Tensor, span: slice, part: Tensor) -> None:
    part = part.mT if grad.is_complex() else part.mT.real
    if grad.shape[1] == 1:
        grad += part
    else:
        grad[:, span] = part


def blockwise_scan(recurrence: Decay, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state)."""
    streams = (recurrence.q, recurrence.k, recurrence.v, recurrence.log_decay)
    o, state = _Scan.apply(len(recurrence), *streams, state.permute(0, 2, 3, 1))
    return recurrence.add_skip(o.mT), state.permute(0, 3, 1, 2)


def refuses(recurrence: Decay) -> str | None:
    if torch.compiler.is_compiling():
        return "torch.compile does not trace its writes into strided memory"
    keys, values, most = recurrence.q.shape[-1], recurrence.v.shape[-1], _most(recurrence)
    if keys * values > most:
        return f"its states have {keys}·{values} elements per head, more than {most}"
    return None


def _most(recurrence: Decay) -> int:
    if recurrence.accumulator.is_complex:
        return MOST_COMPLEX
    if recurrence.v.shape[-1] == 1:
        return MOST_KEYS
    return MOST_VALUES if recurrence.q.shape[-1] == 1 else MOST_ELEMENTS


BLOCKED_SCAN = Kernel("blocked scan (torch)", Decay, blockwise_scan, refuses, opaque=True)
