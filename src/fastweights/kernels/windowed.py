"""`WindowedLinear` in blocks of queries, time and memory linear in T, with a hand-written backward
that recomputes.

A block of c queries sees a strip of w + c keys, its own and the w before them, and S, which holds
all older ones:

    near = e^(s - c)        where the key is in the window        N = near (V ‖ 1)
    far  = φ(Q) φ(K)ᵀ       where it is before it                 F = far (V ‖ 1) + φ(Q) S

and o is what `WindowedLinear.mix_window_and_memory` makes of N and F. Within a row the window
begins at the column after the query's own number, so that one pattern serves all blocks, and the
keys of a block's first c columns are those that S takes up after it. Padding is moved behind the
tokens first. Kept for the backward are the streams and S at time blocks' starts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fastweights.kernels.blocks import smallest_exponent
from fastweights.kernels.gemm import route_products
from fastweights.kernels.table import Kernel
from fastweights.recurrence.streams import reciprocal_or_zero
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.windowed import (
    WindowedLinear,
    WindowState,
    mix_window_and_memory,
    normalize_by_last,
    soft_cap,
    with_ones,
)

FEWEST, MOST = 64, 256
"""Queries per block: fewer are too few for a matrix product, and more than the window has keys
bring nothing.
"""
SCORES = 1 << 19
"""Queries × keys at once, over all heads."""


class _WindowPlan(NamedTuple):
    """Queries per block, window, blocks in all, blocks at once; of the record whether both sides
    share one normaliser, and what bounds the scores.
    """

    block: int
    window: int
    blocks: int
    blocks_at_once: int
    shared: bool
    softcap: float | None

    @classmethod
    def of(cls, recurrence: WindowedLinear, past: int) -> Self:
        """`past` tokens are cached; a window that reaches beyond the first of them need not be as
        wide.
        """
        b, t, h = recurrence.shape
        window = min(recurrence.window, past + t + 1)
        block = min(max(window, FEWEST), MOST)
        at_once = SCORES // (b * h * block * (block + window))
        return cls(
            block, window, -(-t // block), max(1, at_once), recurrence.shared, recurrence.softcap
        )

    @property
    def strip(self) -> int:
        return self.window + self.block

    @property
    def length(self) -> int:
        return self.blocks * self.block

    def spans(self) -> list[slice]:
        """The blocks that are evaluated together."""
        return [
            slice(n, min(n + self.blocks_at_once, self.blocks))
            for n in range(0, self.blocks, self.blocks_at_once)
        ]

    def queries(self, stream: Tensor, span: slice) -> Tensor:
        """``[b g r T ·]`` → ``[b g n r·c ·]``, the blocks of the span."""
        tokens = stream[..., span.start * self.block : span.stop * self.block, :]
        return tokens.unflatten(-2, (-1, self.block)).transpose(2, 3).flatten(3, 4)

    def merge_queries(self, blocks: Tensor) -> Tensor:
        """The reverse of `queries`."""
        return blocks.unflatten(3, (-1, self.block)).transpose(2, 3).flatten(3, 4)

    def strips(self, stream: Tensor, span: slice, width: int) -> Tensor:
        """``[b g w+T ·]`` → ``[b g n width ·]``, the first `width` tokens of every strip of the
        span.
        """
        tokens = stream[:, :, span.start * self.block : (span.stop - 1) * self.block + width]
        return tokens.unfold(2, width, self.block).mT.contiguous()

    def add_strips(self, strips: Tensor, span: slice, out: Tensor) -> None:
        """Adds ``[b g n width ·]`` to the tokens it was taken from."""
        for n in range(strips.shape[2]):
            start = (span.start + n) * self.block
            out[:, :, start : start + strips.shape[3]] += strips[:, :, n]


class _Documents(NamedTuple):
    """``[b w+T]``: the segment that each token is in, and the same or -1 if it is absent (padding,
    no such past).
    """

    running: Tensor
    present: Tensor


class _WindowMasks(NamedTuple):
    """What the queries of a span see: keys in the window ``[… c strip]`` and before it ``[… c c]``,
    S ``[… c 1]``; what S keeps from one block's start to another's ``[… n+1 n+1]`` and what it
    takes up ``[… c 1]`` (None: all).
    """

    near: Tensor
    far: Tensor
    carry: Tensor
    reads_memory: Tensor | None = None
    absorbed: Tensor | None = None

    @classmethod
    def of(
        cls, plan: _WindowPlan, span: slice, documents: _Documents | None, device: torch.device
    ) -> Self:
        n, row, column = (
            torch.arange(x, device=device)
            for x in (span.stop - span.start + 1, plan.block, plan.strip)
        )
        behind = row[:, None] + plan.window - column
        near, far = (behind >= 0) & (behind < plan.window), (behind >= plan.window)[:, : plan.block]
        carry = n[:, None] >= n
        if documents is None:
            return cls(near, far, carry)
        present = documents.present[:, None, :, None]
        keys = plan.strips(present, span, plan.strip)[:, :, :, None, None, :, 0]
        queries = plan.strips(present[:, :, plan.window :], span, plan.block)[:, :, :, None]
        ends = F.pad(documents.running, (1, 0))[:, : plan.length + 1 : plan.block][
            :, span.start : span.stop + 1
        ]
        same = (queries == keys) & (keys >= 0)
        return cls(
            near & same,
            far & same[..., : plan.block],
            carry & (ends[:, None, :, None] == ends[:, None, None, :]),
            queries == ends[:, None, :-1, None, None, None],
            (keys[..., 0, 0, : plan.block] == ends[:, None, 1:, None])[..., None],
        )


class _SpanStreams(NamedTuple):
    """The streams of n blocks: queries ``[b g n r·c ·]``, strips of keys ``[b g n strip ·]``, φ(K)
    ``[b g n c f]``.
    """

    q: Tensor
    fq: Tensor
    mix: Tensor
    k: Tensor
    fk: Tensor
    v: Tensor

    @classmethod
    def of(
        cls,
        plan: _WindowPlan,
        span: slice,
        q: Tensor,
        fq: Tensor,
        mix: Tensor,
        k: Tensor,
        fk: Tensor,
        v: Tensor,
    ) -> Self:
        return cls(
            plan.queries(q, span),
            plan.queries(fq, span),
            plan.queries(mix, span),
            plan.strips(k, span, plan.strip),
            plan.strips(fk, span, plan.block),
            plan.strips(v, span, plan.strip),
        )

    @property
    def leaving_values(self) -> Tensor:
        """The values of the keys that S takes up."""
        return self.v[..., : self.fk.shape[3], :]

    def weights(self, masks: _WindowMasks, softcap: float | None) -> tuple[Tensor, Tensor]:
        """near ``[b g n r·c strip]`` and far ``[b g n r·c c]``."""
        c = self.fk.shape[3]
        scores = (
            soft_cap(self.q @ self.k.mT, softcap)
            .unflatten(3, (-1, c))
            .masked_fill_(~masks.near, -torch.inf)
        )
        highest = scores.amax(-1, keepdim=True)
        scores.sub_(highest.masked_fill_(highest == -torch.inf, 0)).clamp_(
            min=smallest_exponent(scores.dtype)
        )
        near = scores.exp_().mul_(masks.near).flatten(3, 4)
        far = (self.fq @ self.fk.mT).unflatten(3, (-1, c)).mul_(masks.far).flatten(3, 4)
        return near, far

    def states(self, masks: _WindowMasks, memory: Tensor) -> Tensor:
        """S ``[b g n+1 f v+1]`` before every block and after the last."""
        fk = self.fk if masks.absorbed is None else self.fk * masks.absorbed
        written = torch.cat([memory.unsqueeze(2), fk.mT @ self.leaving_values], 2)
        return (masks.carry.to(written.dtype) @ written.flatten(3)).unflatten(3, memory.shape[2:])

    def reading_queries(self, masks: _WindowMasks) -> Tensor:
        """φ(Q) of those that read S, else 0."""
        return self.fq if masks.reads_memory is None else _rows(self.fq, masks.reads_memory)


def _rows(queries: Tensor, mask: Tensor) -> Tensor:
    """``[… r·c ·]`` masked by ``[… c 1]``."""
    return (queries.unflatten(3, (-1, mask.shape[-2])) * mask).flatten(3, 4)


class _BlockwiseWindows(torch.autograd.Function):
    """(o ``[b g r T v]``, S after the last block) of queries ``[b g r T ·]``, keys ``[b g w+T ·]``
    and S_0.
    """

    @staticmethod
    @route_products
    def forward(
        ctx: Any,
        plan: _WindowPlan,
        plain: bool,
        documents: _Documents,
        memory: Tensor,
        *streams: Tensor,
    ) -> tuple[Tensor, Tensor]:
        o = streams[0].new_empty(*streams[0].shape[:-1], streams[-1].shape[-1] - 1)
        starts = []
        for span in plan.spans():
            starts.append(memory)
            blocks, masks = (
                _SpanStreams.of(plan, span, *streams),
                _masks(plan, span, plain, documents),
            )
            states = blocks.states(masks, memory)
            near, far = blocks.weights(masks, plan.softcap)
            sums = mix_window_and_memory(
                *_sums(blocks, masks, near, far, states), blocks.mix, shared=plan.shared
            )
            o[..., span.start * plan.block : span.stop * plan.block, :] = plan.merge_queries(
                normalize_by_last(sums)[..., :-1]
            )
            memory = states[:, :, -1]
        ctx.plan, ctx.plain = plan, plain
        ctx.save_for_backward(*documents, *streams, *starts)
        return o, memory.clone()

    @staticmethod
    @once_differentiable
    @route_products
    def backward(ctx: Any, do: Tensor, dmemory: Tensor) -> tuple[Tensor | None, ...]:
        plan: _WindowPlan = ctx.plan
        running, present, *saved = ctx.saved_tensors
        streams, starts = saved[:6], saved[6:]
        *queries, k, fk, v = (torch.zeros_like(s) for s in streams)
        for span, memory in reversed(list(zip(plan.spans(), starts, strict=True))):
            blocks = _SpanStreams.of(plan, span, *streams)
            masks = _masks(plan, span, ctx.plain, _Documents(running, present))
            d, dmemory = _span_back(plan, blocks, masks, memory, plan.queries(do, span), dmemory)
            tokens = slice(span.start * plan.block, span.stop * plan.block)
            for out, tiles in zip(queries, d[:3], strict=True):
                out[..., tokens, :] = plan.merge_queries(tiles)
            for out, tiles in zip((k, fk, v), d[3:], strict=True):
                plan.add_strips(tiles, span, out)
        return None, None, None, dmemory, *queries, k, fk, v


def _masks(plan: _WindowPlan, span: slice, plain: bool, documents: _Documents) -> _WindowMasks:
    """Only the first blocks of plain sequences reach tokens that may be absent."""
    unseen = None if plain and span.start * plan.block >= plan.window else documents
    return _WindowMasks.of(plan, span, unseen, documents.present.device)


def _sums(
    blocks: _SpanStreams, masks: _WindowMasks, near: Tensor, far: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """N and F ``[b g n r·c v+1]``."""
    return near @ blocks.v, (far @ blocks.leaving_values).add_(
        blocks.reading_queries(masks) @ states[:, :, :-1]
    )


def _span_back(
    plan: _WindowPlan,
    blocks: _SpanStreams,
    masks: _WindowMasks,
    memory: Tensor,
    do: Tensor,
    dmemory: Tensor,
) -> tuple[_SpanStreams, Tensor]:
    """(gradients of the blocks, of S before them) from those of o and of S after them."""
    q, fq, mix, k, fk, v = blocks
    c, old, readers = fk.shape[3], blocks.leaving_values, blocks.reading_queries(masks)
    states = blocks.states(masks, memory)
    near, far = blocks.weights(masks, plan.softcap)
    sums = _sums(blocks, masks, near, far, states)
    dnear, dfar, dmix = _mix_backward(*sums, mix, do, shared=plan.shared)

    dv = near.mT @ dnear
    top = near == 1
    dscores = (dnear @ v.mT).mul_(near)
    if plan.shared:  # moving c_n moves the whole near side against the far one
        share = (dnear * sums[0]).sum(-1, keepdim=True) / top.sum(-1, keepdim=True).clamp(min=1)
        dscores.sub_(top * share)
    if plan.softcap is not None:
        dscores.mul_(1 - ((q @ k.mT) / plan.softcap).tanh_().square_())
    dfar_weights = (dfar @ old.mT).unflatten(3, (-1, c)).mul_(masks.far).flatten(3, 4)
    dread = dfar @ states[:, :, :-1].mT
    dfq = (dfar_weights @ fk).add_(
        dread if masks.reads_memory is None else _rows(dread, masks.reads_memory)
    )
    dfk = dfar_weights.mT @ fq
    dv[..., :c, :] += far.mT @ dfar

    dstates = torch.cat([readers.mT @ dfar, dmemory.unsqueeze(2)], 2)
    dwritten = (masks.carry.to(dstates.dtype).mT @ dstates.flatten(3)).unflatten(
        3, memory.shape[2:]
    )
    taken, dtaken = fk, old @ dwritten[:, :, 1:].mT
    if masks.absorbed is not None:
        taken, dtaken = taken * masks.absorbed, dtaken * masks.absorbed
    dv[..., :c, :] += taken @ dwritten[:, :, 1:]
    return _SpanStreams(dscores @ k, dfq, dmix, dscores.mT @ q, dfk.add_(dtaken), dv), dwritten[
        :, :, 0
    ]


def _mix_backward(
    near: Tensor, far: Tensor, mix: Tensor, do: Tensor, *, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of both sides' sums and of the mix, from that of o = divided(joined(near, far,
    mix)).
    """
    parts = (near, far) if shared else (normalize_by_last(near), normalize_by_last(far))
    sums = mix_window_and_memory(near, far, mix, shared=shared)
    dsums = _normalize_backward(sums, F.pad(do, (0, 1)))
    if shared:
        return mix * dsums, dsums, (dsums * near).sum(-1, keepdim=True)
    dmix = (dsums * (parts[0] - parts[1])).sum(-1, keepdim=True)
    return _normalize_backward(near, mix * dsums), _normalize_backward(far, (1 - mix) * dsums), dmix


def _normalize_backward(sums: Tensor, d: Tensor) -> Tensor:
    """The gradient of `sums` from that of ``normalize_by_last(sums)``."""
    inverse = reciprocal_or_zero(sums[..., -1:])
    d = d * inverse
    d[..., -1:] -= (d * sums).sum(-1, keepdim=True) * inverse
    return d


class _PaddingLast(NamedTuple):
    """The kept tokens in front of the padding: ``order [b t]`` of a record with padding, how many
    there are ``[b 1]``, and where they belong.
    """

    order: Tensor | None
    length: Tensor
    documents: _Documents

    @classmethod
    def of(cls, recurrence: WindowedLinear, plan: _WindowPlan, age: Tensor) -> Self:
        (b, t, _), kept, order = recurrence.shape, recurrence.keep_mask, None
        own, length = age.new_zeros(b, t), age.new_full((b, 1), t)
        if recurrence.segment_starts is not None:
            own = own + recurrence.segment_starts[..., 0, 0].cumsum(1)
        last = own[:, -1:]
        if kept is not None:
            keeps = kept[..., 0, 0].expand(b, t)
            order, length = (~keeps).long().argsort(dim=1, stable=True), keeps.sum(1, keepdim=True)
            own = own.take_along_dim(order, 1)
        there = torch.arange(t, device=age.device) < length
        cached = F.pad(
            torch.where(age < plan.window, 0, -1), (plan.window - age.shape[1], 0), value=-1
        )
        behind = last.expand(b, plan.length - t)
        running = torch.cat([torch.zeros_like(cached), torch.where(there, own, last), behind], 1)
        present = torch.cat([cached, torch.where(there, own, -1), -torch.ones_like(behind)], 1)
        return cls(order, length, _Documents(running, present))

    def tokens(self, stream: Tensor) -> Tensor:
        """``[b t h ·]`` → ``[b h t ·]`` in that order."""
        order = None if self.order is None else self.order[..., None, None]
        return (stream if order is None else stream.take_along_dim(order, 1)).transpose(1, 2)

    def outputs(self, o: Tensor) -> Tensor:
        """The reverse of `tokens`."""
        o = o.transpose(1, 2)
        return (
            o if self.order is None else o.take_along_dim(self.order.argsort(1)[..., None, None], 1)
        )


def blockwise_windows(recurrence: WindowedLinear, state: WindowState) -> tuple[Tensor, WindowState]:
    """(o, state)"""
    (b, t, h), g, (*cached, memory, age) = recurrence.shape, recurrence.groups, state
    plan, dtype = _WindowPlan.of(recurrence, age.shape[1]), recurrence.accumulator
    w = plan.window
    arranged = _PaddingLast.of(recurrence, plan, age)
    _, length, documents = arranged
    queries = (
        arranged.tokens(s.to(dtype).expand(b, t, h, -1))
        for s in (recurrence.q, recurrence.fq, recurrence.mix)
    )
    q, fq, mix = (F.pad(s, (0, 0, 0, plan.length - t)).unflatten(1, (g, -1)) for s in queries)
    own = (
        arranged.tokens(s.expand(b, t, g, -1)) for s in (recurrence.k, recurrence.v, recurrence.fk)
    )
    keys, values, features = (
        F.pad(torch.cat([old, new], 2), (0, 0, w - old.shape[2], plan.length - t))
        for old, new in zip(cached, own, strict=True)
    )
    gone = torch.arange(w + plan.length, device=age.device) <= length
    fk = features.to(dtype) * ((documents.present >= 0) & gone)[:, None, :, None]
    v = with_ones(values.to(dtype)) * (documents.present >= 0)[:, None, :, None]
    plain = arranged.order is None and recurrence.segment_starts is None
    o, last = _BlockwiseWindows.apply(
        plan, plain, documents, memory, q / q.shape[-1] ** 0.5, fq, mix, keys.to(dtype), fk, v
    )
    o = arranged.outputs(o.flatten(1, 2)[:, :, :t])

    current, ended = documents.running[:, -1:], documents.running[:, plan.length - 1 : plan.length]
    rest = fk * (documents.present == current)[:, None, :, None]
    memory = (
        last * (ended == current)[..., None, None]
        + rest[:, :, plan.length :].mT @ v[:, :, plan.length :]
    )
    left = torch.arange(
        min(max(recurrence.window - 1, 0), t + age.shape[1]), 0, -1, device=age.device
    )
    rows = length + w - left
    there = documents.present.take_along_dim(rows, 1) == current
    ring = (
        s.take_along_dim(rows[:, None, :, None], 2) * there[:, None, :, None]
        for s in (keys, values, features)
    )
    return o.to(recurrence.output), (*ring, memory, torch.where(there, left, FORGOTTEN))  # type: ignore[return-value]


BLOCKED_WINDOWS = Kernel(
    "windows and linear memory, block by block (torch)", WindowedLinear, blockwise_windows
)
