"""One token of `WindowedLinear` in Triton, without gradients: decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.kernels.table import Kernel
from fastweights.kernels.triton.launch import DEVICES, launch
from fastweights.kernels.triton.streams import Strided, side_by_side
from fastweights.kernels.triton.windowed import (
    FeatureParts,
    KernelSizes,
    LearnedMap,
    activation,
    refuses,
    requires_grad,
    scale_of,
    tile_width,
)
from fastweights.recurrence.mapped import features
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.windowed import WindowedLinear, WindowState

TOKENS = 32
"""Cached tokens at once."""
COLUMNS = 32
"""Of the caches, of the memory and of the outputs, by one program."""
FEATURES = 64
"""At once, where they are given."""


def compute(recurrence: WindowedLinear, state: WindowState) -> tuple[Tensor, WindowState]:
    """(o, state)"""
    if torch.is_grad_enabled() and (
        requires_grad(recurrence) or any(s.requires_grad for s in state)
    ):
        return recurrence.step(state)
    from fastweights.kernels.triton.device import windowed_token as device

    (b, t, h), g, learned = recurrence.shape, recurrence.groups, LearnedMap.of(recurrence)
    keys, values, kept, memory, age = (s.contiguous() for s in state)
    if learned is None:
        fq, fk = features(recurrence.fq), features(recurrence.fk)
        kept = recurrence.cached_features(keys, kept).contiguous()
    else:
        fq, fk = recurrence.fq.stream, recurrence.fk.stream  # type: ignore[union-attr]
    q, fq, mix = (side_by_side(s.expand(b, t, h, -1)) for s in (recurrence.q, fq, recurrence.mix))
    own = recurrence.k, recurrence.v, fk
    k, v, fk = (side_by_side(s.expand(b, t, g, -1)) for s in own)

    cached, width, f = age.shape[1], values.shape[-1], memory.shape[2]
    length = cached + int(cached + 1 < recurrence.window)
    o = q.new_empty(b, t, h, width, dtype=recurrence.output)
    ring = [
        s.new_empty(b, g, length, s.shape[-1], dtype=torch.promote_types(s.dtype, new.dtype))
        for s, new in zip((keys, values, kept), (k, v, fk), strict=True)
    ]
    written, after = torch.empty_like(memory), age.new_empty(b, length)
    parts = FeatureParts.of(f, FEATURES, made=learned is not None)
    tiles = TOKENS, tile_width(q.shape[-1]), COLUMNS, parts.tile
    widest = max(keys.shape[-1], width, kept.shape[-1])
    launch(
        device.step,
        (b * g, -(-widest // COLUMNS)),
        *(Strided.of(s) for s in (q, k, v, fq, fk, mix)),
        Strided.or_none(scale_of(recurrence)),
        *(learned[:2] if learned else (None, None)),
        *(keys, values, kept, memory, age),
        *(Strided.of(o), *ring, written, after),
        *(q.shape[-1] ** -0.5, recurrence.softcap, cached, recurrence.window),
        sizes=KernelSizes(h, g, q.shape[-1], width, f, parts.size, parts.count, *tiles, None),
        SHARED=recurrence.shared,
        FORGOTTEN=FORGOTTEN,
        activate=activation(learned.activation if learned else -1),
        num_warps=4,
    )
    return o, (*ring[:2], recurrence.kept_features(ring[2]), written, after)  # type: ignore[return-value]


def _refuses(recurrence: WindowedLinear) -> str | None:
    if len(recurrence) != 1:
        return f"it has {len(recurrence)} tokens, not one"
    if recurrence.segment_starts is not None:
        return "its token may begin a document"
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of the step's own operations"
    return refuses(recurrence)


TRITON_WINDOW_TOKEN = Kernel(
    "window and linear memory, one token (Triton)", WindowedLinear, compute, _refuses, DEVICES, True
)
