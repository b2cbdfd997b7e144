"""`Mesa` in chunks: H before all chunks, then all steps of conjugate gradients in one kernel.

Products are made of bfloat16 parts, two of a number where the streams are of half precision (16 of
float32's 24 bits) and three where they are float32: with a single one, the residual would stop
falling at bfloat16's precision. G, and the gradients, are `Decay`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.mesa import multiply, solve_blockwise
from fastweights.kernels.table import Kernel, run_fastest
from fastweights.kernels.triton.chips import chip_of
from fastweights.kernels.triton.chunks import (
    HOPPER,
    Chunks,
    ChunkSizes,
    Tiles,
    block_of,
    state_tiles,
    walk_time,
)
from fastweights.kernels.triton.decay import expand_streams, refuse_streams
from fastweights.kernels.triton.decay_backward import decay_backward
from fastweights.kernels.triton.launch import DEVICES, launch
from fastweights.kernels.triton.operator import NoSettings, OperatorResult, Streams, TritonOperator
from fastweights.kernels.triton.streams import Strided, side_by_side, strided
from fastweights.recurrence.base import State
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.mesa import Mesa
from fastweights.recurrence.solvers import ConjugateGradient, solve_implicitly

WIDEST = 128
"""The widest keys whose systems a program holds."""

EXACT_MEMORY = 160 << 10
"""Bytes of shared memory that the systems of 128 float32 keys need at least."""


class MesaSettings(NamedTuple):
    """`ConjugateGradient`, with a tolerance of 0 for None."""

    max_steps: int
    tol: float

    @classmethod
    def of(cls, solver: ConjugateGradient) -> MesaSettings:
        return cls(solver.max_steps, solver.tol or 0.0)


class System(NamedTuple):
    """(H_t + Λ_t) of all tokens: streams ``[b t h ·]``, expanded, and H before the first.

    Attributes:
        start: H ``[b h k k]`` in float32
        k, beta: streams
        log_decay: a stream or None
        ridge: a stream
    """

    start: Tensor
    k: Tensor
    beta: Tensor
    log_decay: Tensor | None
    ridge: Tensor

    @property
    def chunks(self) -> Chunks:
        """Those of float32, as H is as exact."""
        return Chunks.of(self.k, self.k, torch.float32)

    def parts(self, right: Tensor) -> int:
        """In how many bfloat16 numbers one is multiplied, for these right-hand sides."""
        return 3 if torch.float32 in (self.k.dtype, right.dtype) else 2


def gram_states(system: System, parts: int) -> tuple[Tensor, Tensor]:
    """(H before the chunks ``[parts, b h N, k, k]``, a sum of bfloat16 matrices; H ``[b h k k]``
    after the last token).
    """
    from fastweights.kernels.triton.device.mesa import gram_states as kernel

    chunks, start = system.chunks, system.start
    tiles = state_tiles(chunks)
    found = start.new_empty(parts, *chunks.states_shape, dtype=torch.bfloat16)

    def walk(start: Tensor | None, *kept: Tensor | None, span: int, segments: int) -> None:
        programs = chunks.sequences * segments * tiles.blocks(chunks)
        read = strided(system.k, system.beta, system.log_decay)
        lengths, sizes = (
            (chunks.time, chunks.heads, span, chunks.count),
            ChunkSizes.of(chunks, tiles),
        )
        arguments = (start, *read, *kept, *lengths, sizes, parts)
        launch(kernel, (programs,), *arguments, **tiles.options())

    decays = system.log_decay is not None
    return found, walk_time(walk, start, found, chunks, decays, reverse=False)


def solver_tiles(chunks: Chunks, parts: int) -> Tiles:
    """Of conjugate gradients, whose program holds all of a chunk. On an H200 two programs of 4
    warps to a multiprocessor take 0.7 of the time of one of 8; three parts would not fit.
    """
    keys, fits = block_of(chunks.keys, WIDEST), parts == 2 and chunks.capability == HOPPER
    return Tiles(keys, keys, warps=8 if keys > 64 and not fits else 4, stages=1)


def solve(
    settings: MesaSettings,
    right: Tensor,
    system: System,
    x: Tensor,
    steps: Tensor | None = None,
) -> Tensor:
    """H after the last token.

    Args:
        settings: how far the residuals are brought down
        right: b, a stream
        system: H + Λ
        x: ``[b t h k]``, into which the solutions go
        steps: ``[b h t]``, into which the number of steps of every token goes
    """
    from fastweights.kernels.triton.device.mesa import conjugate_gradients

    chunks, parts = system.chunks, system.parts(right)
    states, final = gram_states(system, parts)
    streams = strided(right, system.k, system.beta, system.log_decay, system.ridge)
    counts = (chunks.time, chunks.heads, chunks.per_sequence, chunks.count)
    tiles = solver_tiles(chunks, parts)
    widths = (chunks.keys, chunks.size, tiles.keys, parts)
    launch(
        conjugate_gradients,
        (chunks.count,),
        *(*streams, states, Strided.of(x), steps),
        *(*counts, settings.max_steps, settings.tol, *widths, system.ridge.stride(1) == 0),
        **tiles.options(),
    )
    return final


def mesa_forward(settings: MesaSettings, streams: Streams, keep: bool) -> OperatorResult:
    """(x, H after the last token), of H before the first, q, k, β, log γ or None, and Λ."""
    del keep
    start, q, k, beta, log_decay, ridge = streams
    assert start is not None
    assert q is not None
    assert k is not None
    assert beta is not None
    assert ridge is not None
    x = torch.empty_like(q, memory_format=torch.contiguous_format)
    final = solve(settings, q, System(start, k, beta, log_decay, ridge), x)
    return OperatorResult((x, final))


def mesa_backward(
    settings: MesaSettings,
    streams: Streams,
    saved: Streams,
    gradients: tuple[Tensor, ...],
    wanted: Sequence[bool],
) -> Streams:
    """As dx = (H + Λ)⁻¹ d(q - H x - Λ x) with x fixed on the right, e = (H + Λ)⁻¹ ∂L/∂x is the
    gradient of q, one more solve, and -e that of Λ x and of H x, which is the output of a `Decay`
    with values βk (MesaNet app. C).
    """
    (start, _, k, beta, log_decay, ridge), (x,) = streams, saved
    assert start is not None
    assert k is not None
    assert beta is not None
    assert ridge is not None
    assert x is not None
    upstream, upstream_final = gradients
    system, e = System(start, k, beta, log_decay, ridge), torch.empty_like(x)
    solve(settings, side_by_side(upstream), system, e)
    d_start, _, dk, d_written, d_decay = decay_backward(
        NoSettings(),
        (start, x, k, (beta * k).to(k.dtype), log_decay),
        (None,),
        (-e, upstream_final),
        (wanted[0], False, wanted[2], wanted[2] or wanted[3], wanted[4]),
    )
    d_beta = d_ridge = None
    if wanted[2]:
        assert dk is not None
        assert d_written is not None
        dk = (dk + beta * d_written).to(k.dtype)
    if wanted[3]:
        assert d_written is not None
        d_beta = (d_written * k.float()).sum(-1, keepdim=True).to(beta.dtype)
    if wanted[5]:
        d_ridge = -(e * x.float()).to(ridge.dtype)
    return d_start, e, dk, d_beta, d_decay, d_ridge


def _define(settings: MesaSettings, streams: Streams) -> tuple[Tensor, Any]:
    start, q, k, beta, log_decay, ridge = (None if s is None else s.float() for s in streams)
    assert None not in (start, q, k, beta, ridge)
    solve = partial(solve_blockwise, ConjugateGradient(settings.max_steps, settings.tol or None))
    x = solve_implicitly(solve, multiply, q, start, k, beta, ridge, log_decay)  # type: ignore[arg-type]
    _, last = run_fastest(Decay(k, k, beta * k, log_decay), start)  # type: ignore[arg-type, operator]
    return x.to(streams[1].dtype), last  # type: ignore[union-attr]


MESA = TritonOperator(
    "mesa",
    settings=MesaSettings,
    streams=("start", "q", "k", "beta", "log_decay", "ridge"),
    outputs=2,
    forward=mesa_forward,
    backward=mesa_backward,
    define=_define,
    reread=1,
)


def compute_mesa(record: Mesa, state: State) -> tuple[Tensor, State]:
    """(o, final state)."""
    assert isinstance(record.solver, ConjugateGradient)
    settings, (gram, memory) = MesaSettings.of(record.solver), state
    streams = expand_streams(record, "q", "k", "beta", "log_decay")
    x, gram = MESA(settings, gram, *streams, expand_ridge(record))
    # o_t = x_t G_t, and G_t is the state of a decay with values βv
    written = (record.beta * record.v).to(record.v.dtype)
    o, memory = run_fastest(Decay(x, record.k, written, record.log_decay), memory)
    return o.to(record.output), (gram, memory)


def expand_ridge(record: Mesa) -> Tensor:
    """Λ for all tokens, side by side once where they share it."""
    return side_by_side(record.ridge).expand(*record.shape, -1)


def refuse_mesa(record: Mesa) -> str | None:
    """Why these kernels do not take a record."""
    if not isinstance(record.solver, ConjugateGradient):
        return f"its solver is a {type(record.solver).__name__}"
    width = record.q.shape[-1]
    if width > WIDEST:
        return f"its keys are {width} wide, wider than {WIDEST}"
    exact = torch.float32 in (record.q.dtype, record.k.dtype)
    if exact and width > 64 and chip_of(record.device).shared_memory < EXACT_MEMORY:
        return (
            f"its float32 keys are {width} wide, for which a block of threads has too little"
            " shared memory here"
        )
    return refuse_streams(record)


TRITON_MESA = Kernel("mesa (Triton)", Mesa, compute_mesa, refuse_mesa, DEVICES, True)
