"""What the queries of a block may see: windows, documents, padding."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.kernels.windowed.plan import WindowPlan
from fastweights.recurrence.windowed import WindowedLinear


class Documents(NamedTuple):
    """``[b w+T]``: the segment that each token is in, and the same or -1 if it is absent (padding,
    no such past).
    """

    running: Tensor
    present: Tensor


class WindowMasks(NamedTuple):
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
        cls, plan: WindowPlan, span: slice, documents: Documents | None, device: torch.device
    ) -> Self:
        n, row, column = (
            torch.arange(x, device=device)
            for x in (span.stop - span.start + 1, plan.block, plan.strip)
        )
        # a strip begins a window before its block: how far each key lies behind each query
        behind = row[:, None] + plan.window - column
        near, far = (behind >= 0) & (behind < plan.window), (behind >= plan.window)[:, : plan.block]
        carry = n[:, None] >= n
        if documents is None:
            return cls(near, far, carry)
        present = documents.present[:, None, :, None]
        keys = plan.strips(present, span, plan.strip)[:, :, :, None, None, :, 0]
        queries = plan.strips(present[:, :, plan.window :], span, plan.block)[:, :, :, None]
        # the document of the last token that S holds, at the start of every block
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


def span_masks(plan: WindowPlan, span: slice, plain: bool, documents: Documents) -> WindowMasks:
    """Only the first blocks of plain sequences reach tokens that may be absent."""
    unseen = None if plain and span.start * plan.block >= plan.window else documents
    return WindowMasks.of(plan, span, unseen, documents.present.device)


class PaddingLast(NamedTuple):
    """The kept tokens in front of the padding: ``order [b t]`` of a record with padding, how many
    there are ``[b 1]``, and where they belong.
    """

    order: Tensor | None
    length: Tensor
    documents: Documents

    @classmethod
    def of(cls, recurrence: WindowedLinear, plan: WindowPlan, age: Tensor) -> Self:
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
        return cls(order, length, Documents(running, present))

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
