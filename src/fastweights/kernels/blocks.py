"""Time blocks, chunks, the factorisation of decays, and the autograd function that the blocked
kernels share.

A block is a few chunks of all sequences and heads at once, small enough for the cache. With c_t =
Σ_{j≤t} log α_j inside a chunk and μ = ½ c_last, a query carries e^(c_t-μ) and a key e^(μ-c_s), so
that all products inside the chunk are one matrix product. The exponents reach ± half the chunk's
total log decay: the chunk is shortened until that is harmless, and a record that decays faster
still goes by `anchors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.gemm import route_products
from fastweights.kernels.rehearsal import rehearsed
from fastweights.recurrence.base import State
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.derivatives import differentiable_by
from fastweights.recurrence.dplr import DPLR

CHUNKS = (64, 32, 16)
ANCHORED_CHUNK = 16
TILES = 128
MAX_SAFE_LOG_DECAY = 80.0
"""Total log decay of a chunk up to which float32 carries e^(± half of it) without loss."""


class BlockPlan(NamedTuple):
    """Chunk length, and chunks per block."""

    chunk: int
    chunks: int

    @classmethod
    def of(cls, chunk: int, sequences: int, length: int) -> BlockPlan:
        return cls(chunk, min(max(1, TILES // max(sequences, 1)), -(-length // chunk)))

    def spans(self, length: int) -> list[slice]:
        block = self.chunk * self.chunks
        return [slice(start, min(start + block, length)) for start in range(0, length, block)]

    def tiles(self, stream: Tensor, dtype: torch.dtype) -> Tensor:
        """``[b t h ·]`` of one block → ``[b h n c ·]``, zeros behind the end."""
        behind = -stream.shape[1] % self.chunk
        stream = F.pad(stream, (0, 0, 0, 0, 0, behind)) if behind else stream
        return stream.unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2, 4).to(dtype).contiguous()

    def untile(self, tiles: Tensor, length: int) -> Tensor:
        """The reverse of `tiles`."""
        return tiles.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :length]


class Factors(NamedTuple):
    """e^(c-μ) ``[b h n c k|1]`` and m = e^μ ``[b h n k|1 1]`` of the chunks of a block."""

    scale: Tensor
    m: Tensor

    @classmethod
    def of(cls, log_decay: Tensor) -> Factors:
        # c_t, and μ halfway to the chunk's end
        total = log_decay.cumsum(-2)
        middle = total[..., -1:, :] / 2
        return cls(total.sub_(middle).exp_(), middle.exp().mT)

    def backward(self, dtotal: Tensor, dmiddle: Tensor) -> Tensor:
        """d log α from d c, summed over all that carries e^(c-μ), and what else depends on μ (``[b
        h n 1 k]``).

        c_t holds every log α up to t, and μ half of all of them.
        """
        dmiddle = dmiddle - dtotal.sum(-2, keepdim=True)
        if self.scale.shape[-1] == 1:
            dtotal, dmiddle = dtotal.sum(-1, keepdim=True), dmiddle.sum(-1, keepdim=True)
        return dtotal.sum(-2, keepdim=True) - dtotal.cumsum(-2) + dtotal + dmiddle / 2


def largest_safe_chunk(log_decay: Tensor | None) -> int | None:
    """The longest chunk in which ``log_decay [b t h ·]`` stays harmless, or None.

    Looking at numbers breaks a compiled graph, and makes the host wait for an accelerator: there it
    is None unseen.
    """
    if log_decay is None:
        return CHUNKS[0]
    if torch.compiler.is_compiling() or rehearsed() or log_decay.device.type != "cpu":
        return None
    sums, length = log_decay.detach(), 1
    if sums.shape[1] == 1:  # one decay for all tokens
        sums = sums.expand(-1, CHUNKS[0], -1, -1)
    sums = F.pad(sums, (0, 0, 0, 0, 0, -sums.shape[1] % CHUNKS[0]))
    harmless = None
    for chunk in reversed(CHUNKS):
        # log decays of whole chunks, from those of the shorter ones
        sums, length = sums.unflatten(1, (-1, chunk // length)).sum(2), chunk
        if not sums.amin() > -MAX_SAFE_LOG_DECAY:
            break
        harmless = chunk
    return harmless


def smallest_exponent(dtype: torch.dtype) -> float:
    """Below it exp comes near what is no normal number any more, and takes 20 to 70 times
    as long.
    """
    return math.log(torch.finfo(dtype).tiny) + 1


def slice_streams(span: slice, *streams: Tensor | None) -> list[Any]:
    """The tokens of a block from every stream that is there."""
    return [None if s is None else s[:, span] for s in streams]


def decay_into(state: Tensor, m: Tensor | None, n: int, out: Tensor) -> Tensor:
    """m_n ⊙ state, written to `out`."""
    if m is None:
        return out.copy_(state)
    if torch.compiler.is_compiling():  # which takes contiguous outputs alone
        return out.copy_(state * m[:, :, n])
    return torch.mul(state, m[:, :, n], out=out)


def state_gradient_of_middle(
    before: Tensor, dbefore: Tensor, after: Tensor, dafter: Tensor
) -> Tensor:
    """d μ ``[b h n 1 k]`` through R = m ⊙ S and S' = m ⊙ (R + …), from both and their gradients."""
    return ((dbefore * before).sum(-1) + (dafter * after).sum(-1)).unsqueeze(-2)


class BlockChunks(Protocol):
    """The chunks of one time block under one rule: what `BlockedFunction` asks of it."""

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(o ``[b h n c v]``, the state after the block) from the state before it."""
        ...

    def back(
        self, start: Tensor, do: Tensor, dstate: Tensor
    ) -> tuple[tuple[Tensor | None, ...], Tensor]:
        """(gradients of the streams ``[b h n c ·]``, of the state before the block) from the state
        before it, d o and the gradient of the state after it.
        """
        ...


ChunksOf = Callable[..., BlockChunks]
"""Of a plan, a dtype, and the streams ``[b t h ·]`` of a block in the order of their rule."""

RuleOf = Callable[..., Decay | Delta | DPLR]
"""The record of streams in the order of their rule."""


def _by_chunks(
    chunks_of: ChunksOf, plan: BlockPlan, rule: RuleOf, *streams_and_state: Any
) -> tuple[Tensor, State]:
    del chunks_of, plan
    *streams, state = streams_and_state
    wide = (None if s is None else s.to(state.dtype) for s in streams)
    return chunk_loop(rule(*wide), state)


class BlockedFunction(torch.autograd.Function):
    """(o ``[b t h v]``, S_T) of streams q, k, v, … with all axes but the last spelled out, and S_0.

    Kept for the backward are the streams and the states at block starts: it goes through the blocks
    from the last to the first, recomputes each, and hands the gradient of the state before it on.
    """

    @staticmethod
    @route_products
    def forward(
        ctx: Any,
        chunks_of: ChunksOf,
        plan: BlockPlan,
        rule: RuleOf,
        *streams_and_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        *streams, state = streams_and_state
        q, _, v, *_ = streams
        assert q is not None and v is not None and state is not None  # noqa: PT018
        o = torch.empty(v.shape, dtype=state.dtype, device=v.device)
        starts = []
        for span in plan.spans(q.shape[1]):
            starts.append(state)
            chunks = chunks_of(plan, state.dtype, *slice_streams(span, *streams))
            tiles, state = chunks.forward(state)
            o[:, span] = plan.untile(tiles, span.stop - span.start)
        ctx.chunks_of, ctx.plan, ctx.rule, ctx.streams = chunks_of, plan, rule, len(streams)
        ctx.save_for_backward(*streams, *starts)
        return o, state

    @staticmethod
    @differentiable_by(
        lambda ctx: (
            _by_chunks,
            (ctx.chunks_of, ctx.plan, ctx.rule, *ctx.saved_tensors[: ctx.streams + 1]),
        )
    )
    @route_products
    def backward(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        plan, saved = ctx.plan, ctx.saved_tensors
        streams, starts = saved[: ctx.streams], saved[ctx.streams :]
        grads = [None if s is None else torch.empty_like(s) for s in streams]
        for span, start in reversed(list(zip(plan.spans(do.shape[1]), starts, strict=True))):
            chunks = ctx.chunks_of(plan, start.dtype, *slice_streams(span, *streams))
            found, dstate = chunks.back(start, plan.tiles(do[:, span], start.dtype), dstate)
            for grad, tiles in zip(grads, found, strict=True):
                if grad is not None and tiles is not None:
                    grad[:, span] = plan.untile(tiles, span.stop - span.start)
        return None, None, None, *grads, dstate


def evaluate_in_blocks(
    rule: RuleOf,
    recurrence: Decay | Delta | DPLR,
    streams: tuple[Tensor | None, ...],
    state: Tensor,
    factored: ChunksOf,
    anchored: ChunksOf,
) -> tuple[Tensor, Tensor]:
    """(o, final state) by `factored` chunks, where decays allow, or short `anchored` ones."""
    b, t, h = recurrence.shape
    spelled_out = [None if s is None else s.expand(b, t, h, -1) for s in streams]
    length = largest_safe_chunk(recurrence.log_decay)
    chunks_of, length = (factored, length) if length else (anchored, ANCHORED_CHUNK)
    plan = BlockPlan.of(length, b * h, t)
    return BlockedFunction.apply(chunks_of, plan, rule, *spelled_out, state)  # type: ignore[return-value]
