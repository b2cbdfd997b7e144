"""One token of `WindowedLinear` through the compiled extension: windowed.c."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from fastweights.kernels.native import library
from fastweights.kernels.native.library import address, view
from fastweights.kernels.native.memory import empty
from fastweights.kernels.native.rules import _refuses as _refuses_all
from fastweights.kernels.table import Kernel
from fastweights.recurrence.base import Recurrence
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.windowed import WindowedLinear, WindowState

CODE = "fw_window_step"

_DOUBLE, _INTEGER = Struct("d"), Struct("q")


def _run(recurrence: WindowedLinear, state: WindowState) -> tuple[Tensor, WindowState]:
    streams = (recurrence.q, recurrence.fq, recurrence.mix, recurrence.k, recurrence.v, recurrence.fk)
    *ring, memory, age = state
    if torch.is_grad_enabled() and any(s.requires_grad for s in (*streams, *ring, memory)):
        return recurrence.step(state)
    return _step(recurrence, streams, ring, memory, age)


def _step(
    recurrence: WindowedLinear, streams: tuple[Tensor, ...], ring: list[Tensor], memory: Tensor, age: Tensor
) -> tuple[Tensor, WindowState]:
    (b, _, h), (_, g, f, _), (cached, window) = recurrence.shape, memory.shape, (age.shape[1], recurrence.window)
    k, v = recurrence.q.shape[-1], recurrence.values
    kept = cached + (cached + 1 < window)
    o, written = torch.empty(b, 1, h, v), empty(b, g, f, v + 1)
    following = [torch.empty(b, g, kept, width) for width in (k, v, f)]
    later = torch.empty(b, kept, dtype=torch.long)
    softcap = _INTEGER.unpack(_DOUBLE.pack(recurrence.softcap or 0))[0]
    sizes = (b, h, g, k, v, f, window, cached, recurrence.shared, FORGOTTEN, softcap, library.threads(memory.numel()))
    views = [n for s in streams for n in view(_single(s))]
    before = [s.contiguous() for s in (*map(_single, ring), age, memory)]
    library.call(CODE, [*sizes, *views, *map(address, (*before, o, *following, later, written))])
    own = zip(following, ring, streams[3:], strict=True)
    following = [s.to(torch.promote_types(old.dtype, new.dtype)) for s, old, new in own]
    return o.to(recurrence.output), (*following, written, later)  # type: ignore[return-value]


def _single(stream: Tensor) -> Tensor:
    return stream if stream.dtype == torch.float32 else stream.float()


def _refuses(recurrence: Recurrence) -> str | None:
    if not isinstance(recurrence, WindowedLinear):
        return f"it is a {type(recurrence).__name__}, not a WindowedLinear"
    if len(recurrence) != 1:
        return f"it has {len(recurrence)} tokens, not one"
    if recurrence.kept is not None or recurrence.starts is not None:
        return "its token may be padding or begin a document"
    if torch.compiler.is_compiling():
        return "a compiled graph has the step's own operations"
    return _refuses_all(recurrence)


NATIVE_WINDOW = Kernel("window and linear memory, one token (compiled)", _refuses, _run)
