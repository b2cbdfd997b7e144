"""The autograd function over all blocks, and the record that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.gemm import route_products
from fastweights.kernels.windowed.backward import span_back
from fastweights.kernels.windowed.masks import Documents, PaddingLast, span_masks
from fastweights.kernels.windowed.plan import WindowPlan
from fastweights.kernels.windowed.spans import SpanStreams, weighted_sums
from fastweights.recurrence.derivatives import Definition, differentiable_by
from fastweights.recurrence.mapped import features
from fastweights.recurrence.streams import pad_tokens
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.windowed import (
    WindowedLinear,
    WindowState,
    mix_window_and_memory,
    normalize_by_last,
    with_ones,
)


def _evaluate_spans(
    plan: WindowPlan, plain: bool, documents: Documents, memory: Tensor, *streams: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(o, S after the last block, S before each span)."""
    o = streams[0].new_empty(*streams[0].shape[:-1], streams[-1].shape[-1] - 1)
    starts = []
    for span in plan.spans():
        starts.append(memory)
        blocks = SpanStreams.of(plan, span, *streams)
        masks = span_masks(plan, span, plain, documents)
        # S before every block; the weights of keys in the window and before it
        states = blocks.states(masks, memory)
        near, far = blocks.weights(masks, plan)
        # both sides' sums with their normalisers, joined, divided
        sides = weighted_sums(blocks, masks, near, far, states)
        sums = mix_window_and_memory(*sides, blocks.mix, shared=plan.shared)
        tokens = slice(span.start * plan.block, span.stop * plan.block)
        o[..., tokens, :] = plan.merge_queries(normalize_by_last(sums)[..., :-1])
        memory = states[:, :, -1]
    return o, memory.clone(), starts


def _again(ctx: Any) -> tuple[Definition, Sequence[Any]]:
    """All spans by torch's own operations, with autograd through them."""
    running, present, *saved = ctx.saved_tensors
    inputs = (ctx.plan, ctx.plain, Documents(running, present), saved[7], *saved[:7])
    return lambda *given: _evaluate_spans(*given)[:2], inputs


class BlockwiseWindows(torch.autograd.Function):
    """(o ``[b g r T v]``, S after the last block) of queries ``[b g r T ·]``, keys ``[b g w+T ·]``
    and S_0.
    """

    @staticmethod
    @route_products
    def forward(
        ctx: Any,
        plan: WindowPlan,
        plain: bool,
        documents: Documents,
        memory: Tensor,
        *streams: Tensor,
    ) -> tuple[Tensor, Tensor]:
        o, last, starts = _evaluate_spans(plan, plain, documents, memory, *streams)
        ctx.plan, ctx.plain = plan, plain
        ctx.save_for_backward(*documents, *streams, *starts)
        return o, last

    @staticmethod
    @differentiable_by(_again)
    @route_products
    def backward(ctx: Any, do: Tensor, dmemory: Tensor) -> tuple[Tensor | None, ...]:
        plan: WindowPlan = ctx.plan
        running, present, *saved = ctx.saved_tensors
        streams, starts = saved[:7], saved[7:]
        *queries, k, fk, v = (torch.zeros_like(s) for s in streams)
        for span, memory in reversed(list(zip(plan.spans(), starts, strict=True))):
            blocks = SpanStreams.of(plan, span, *streams)
            masks = span_masks(plan, span, ctx.plain, Documents(running, present))
            d, dmemory = span_back(plan, blocks, masks, memory, plan.queries(do, span), dmemory)
            tokens = slice(span.start * plan.block, span.stop * plan.block)
            for out, tiles in zip(queries, d[:4], strict=True):
                out[..., tokens, :] = plan.merge_queries(tiles)
            for out, tiles in zip((k, fk, v), d[4:], strict=True):
                plan.add_strips(tiles, span, out)
        return None, None, None, dmemory, *queries, k, fk, v


def blockwise_windows(recurrence: WindowedLinear, state: WindowState) -> tuple[Tensor, WindowState]:
    """(o, state)"""
    (b, t, h), g, (*cached, memory, age) = recurrence.shape, recurrence.groups, state
    plan, dtype = WindowPlan.of(recurrence, age.shape[1]), recurrence.accumulator
    w = plan.window
    arranged = PaddingLast.of(recurrence, plan, age)
    _, length, documents = arranged

    # queries by groups [b g r T ·]: tokens that count first, then zeros up to whole blocks
    scale = recurrence.mix[..., :0]
    if recurrence.log_scale is not None:
        scale = features(recurrence.log_scale)
    queries = (
        arranged.tokens(s.to(dtype).expand(b, t, h, -1))
        for s in (recurrence.q, features(recurrence.fq), recurrence.mix, scale)
    )
    q, fq, mix, scale = (pad_tokens(s, 0, plan.length - t).unflatten(1, (g, -1)) for s in queries)

    # keys [b g w+T ·]: the w before the record (zeros where fewer are cached), then its own
    own = (
        arranged.tokens(s.expand(b, t, g, -1))
        for s in (recurrence.k, recurrence.v, features(recurrence.fk))
    )
    before = (*cached[:2], recurrence.cached_features(cached[0], cached[2]))
    keys, values, mapped = (
        pad_tokens(torch.cat([old, new], 2), w - old.shape[2], plan.length - t)
        for old, new in zip(before, own, strict=True)
    )

    # S takes up keys that are there and have left the window; absent values sum to nothing
    present = documents.present >= 0
    gone = torch.arange(w + plan.length, device=age.device) <= length
    fk = mapped.to(dtype) * (present & gone)[:, None, :, None]
    v = with_ones(values.to(dtype)) * present[:, None, :, None]
    plain = arranged.order is None and recurrence.segment_starts is None
    o, last = BlockwiseWindows.apply(
        plan,
        plain,
        documents,
        memory,
        *(q / q.shape[-1] ** 0.5, fq, mix, scale),
        *(keys.to(dtype), fk, v),
    )
    o = arranged.outputs(o.flatten(1, 2)[:, :, :t])

    # S of the last token's document, with what lies behind the last block
    current, ended = documents.running[:, -1:], documents.running[:, plan.length - 1 : plan.length]
    rest = fk * (documents.present == current)[:, None, :, None]
    memory = (
        last * (ended == current)[..., None, None]
        + rest[:, :, plan.length :].mT @ v[:, :, plan.length :]
    )

    # the last w - 1 tokens as they are, as far as they are of that document
    left = torch.arange(
        min(max(recurrence.window - 1, 0), t + age.shape[1]), 0, -1, device=age.device
    )
    rows = length + w - left
    there = documents.present.take_along_dim(rows, 1) == current
    ring = (
        s.take_along_dim(rows[:, None, :, None], 2) * there[:, None, :, None]
        for s in (keys, values, recurrence.kept_features(mapped))
    )
    return o.to(recurrence.output), (*ring, memory, torch.where(there, left, FORGOTTEN))  # type: ignore[return-value]
