"""`Selective` on a CPU in blocks of time, whose written-out decay fits the cache: for what the
compiled scan refuses, and where there is none.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fastweights.kernels.chunked import chunk_loop
from fastweights.kernels.table import Kernel, run_fastest
from fastweights.recurrence.base import State
from fastweights.recurrence.derivatives import differentiable_by
from fastweights.recurrence.selective import Selective

BLOCK = 1 << 20
"""Numbers of a block's decay, ``[b t h k]``, about."""
STREAMS = tuple(f.name for f in fields(Selective))


def compute_in_blocks(recurrence: Selective, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, state) from the plain rule, block by block; the backward writes each out again."""
    streams = [getattr(recurrence, name) for name in STREAMS]
    return _Blocked.apply(recurrence, *streams, state)  # type: ignore[return-value]


def _refuses(recurrence: Selective) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled graph does not look into its blocks"
    if len(recurrence) <= _tokens(recurrence):
        return "its decay fits the cache as a whole"
    return None


def _tokens(recurrence: Selective) -> int:
    """Tokens of a block."""
    b, _, h = recurrence.shape
    return max(16, BLOCK // max(1, b * h * recurrence.q.shape[-1]))


def _by_chunks(_: Selective, *streams_and_state: Tensor) -> tuple[Tensor, State]:
    *streams, state = streams_and_state
    return chunk_loop(Selective(*streams), state)


class _Blocked(torch.autograd.Function):
    """(o, S_T) of the record, its streams and S_0; states between blocks are kept."""

    @staticmethod
    def forward(
        ctx: Any, recurrence: Selective, *streams_and_state: Tensor
    ) -> tuple[Tensor, Tensor]:
        *streams, state = streams_and_state
        outputs, starts = [], []
        for block in recurrence.split(_tokens(recurrence)):
            starts.append(state)
            o, state = run_fastest(block.plain, state)
            outputs.append(o)
        ctx.save_for_backward(*streams, *starts)
        ctx.size = _tokens(recurrence)
        return torch.cat(outputs, 1), state

    @staticmethod
    @differentiable_by(lambda ctx: (_by_chunks, (None, *ctx.saved_tensors[: len(STREAMS) + 1])))
    def backward(ctx: Any, d_o: Tensor, d_state: Tensor) -> Any:
        saved, count = ctx.saved_tensors, len(STREAMS)
        streams, starts = saved[:count], saved[count:]
        gradients = [torch.zeros_like(s) for s in streams]
        record = Selective(*streams)
        blocks = zip(record.split(ctx.size), starts, d_o.split(ctx.size, 1), strict=True)
        end = len(record)
        for block, start, d_block in reversed(list(blocks)):
            d_state, found = _go_back(block, start, d_block, d_state)
            for whole, part in zip(gradients, found, strict=True):
                constant = whole.shape[1] == 1
                (whole if constant else whole[:, end - len(block) : end]).add_(part)
            end -= len(block)
        return None, *gradients, d_state


def _go_back(
    block: Selective, start: Tensor, d_o: Tensor, d_state: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradients of the state before a block and of its streams."""
    leaves = {name: getattr(block, name).detach().requires_grad_() for name in STREAMS}
    start = start.detach().requires_grad_()
    with torch.enable_grad():
        found = run_fastest(replace(block, **leaves).plain, start)
        d_start, *gradients = torch.autograd.grad(found, (start, *leaves.values()), (d_o, d_state))
    return d_start, tuple(gradients)


BLOCKED_SELECTIVE = Kernel(
    "selective: in blocks", Selective, compute_in_blocks, _refuses, ("cpu",), opaque=True
)
