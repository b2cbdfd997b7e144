"""Rules that are constant in time as convolutions, by the fast Fourier transform: a rank-one rule
(S4), and a filter that is given (Hyena).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastweights.kernels.table import Kernel
from fastweights.recurrence.cached import Cache
from fastweights.recurrence.convolution import LongConvolution, convolve_causally
from fastweights.recurrence.dplr import DPLR
from fastweights.recurrence.streams import heads_first

CONSTANT = ("q", "w", "a", "b", "log_decay")
"""The streams that make the convolution's kernel."""


def convolve(recurrence: DPLR, state: Tensor) -> tuple[Tensor, Tensor]:
    """(o, final state) of y = K * v, K_l = q A^l w, beside what is read of the state before.

    The states A^l w are those after an impulse: its steps, one for all sequences, and the transform
    are all that is done token by token.
    """
    silent = replace(recurrence, v=torch.zeros_like(recurrence.v[:1, :1, :, :1]))
    impulse = heads_first(recurrence.w, state.dtype).mT
    # S, and beside it the state that an impulse leaves: both go through the same steps
    both = torch.cat([state, impulse.expand(*state.shape[:-1], 1)], -1)
    first = heads_first(recurrence.q, state.dtype) @ impulse
    impulses, reads = [], []
    for _ in range(len(recurrence)):
        impulses.append(both[:1, ..., -1])
        o, both = silent.step(both)
        reads.append(o)
    read, own = torch.cat(reads, 1).split([state.shape[-1], 1], -1)
    # K_0 = q w is read at once, K_l behind l steps
    kernel = torch.cat([first.transpose(1, 2).expand_as(own[:1, :1]), own[:1, :-1]], 1)
    v = recurrence.v.to(state.dtype).expand(*recurrence.shape, -1)
    # what the tokens leave in the state, Σ_t A^(T-1-t) w v_t
    written = torch.einsum("thk,bthv->bhkv", torch.cat(impulses).flip(0), v)
    o = convolve_causally(kernel.movedim(1, -1), v.movedim(1, -1)).movedim(-1, 1) + read
    return o.to(recurrence.output), both[..., :-1] + written


def _refuses(recurrence: DPLR) -> str | None:
    streams = recurrence.streams
    varying = [n for n in CONSTANT if n in streams and streams[n].shape[:2] != (1, 1)]
    if varying:
        return f"its {', '.join(varying)} differ between tokens or sequences"
    if len(recurrence) < 2:
        return f"it has {len(recurrence)} tokens; a convolution needs more"
    return "a compiled graph would hold every token" if torch.compiler.is_compiling() else None


CONVOLUTION = Kernel("convolution by FFT (torch)", DPLR, convolve, _refuses)


def convolve_all(recurrence: LongConvolution, state: Cache) -> tuple[Tensor, Cache]:
    """(o, cache), all tokens at once."""
    return recurrence.chunk(state)


def _refuses_documents(recurrence: LongConvolution) -> str | None:
    return None if recurrence.segment_starts is None else "documents may begin among its tokens"


LONG_CONVOLUTION = Kernel(
    "long convolution by FFT (torch)", LongConvolution, convolve_all, _refuses_documents
)
