"""RMSNorm and LayerNorm over the last axis, with a weight and a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.triton.launch import launch, refuse_layer
from fastweights.kernels.triton.operator import OperatorResult, Streams
from fastweights.kernels.triton.streams import ceiling, next_power, side_by_side

WIDEST = 8192
TILE = 2048
"""Elements of the tiles of rows that are not longer."""
TILES = 16
"""Tiles whose share of the weight's gradient one program sums."""


class NormSettings(NamedTuple):
    """Attributes:
    eps: added to the mean square
    center: whether the mean is subtracted
    silu: whether the gate is SiLU of what is given
    """

    eps: float
    center: bool
    silu: bool


class _NormProblem(NamedTuple):
    """x and the gate as rows ``[n d]``, and the weight ``[d]``."""

    x: Tensor
    weight: Tensor | None
    gate: Tensor | None

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> _NormProblem:
        weight = None if weight is None else weight.contiguous()
        return cls(_rows(x), weight, None if gate is None else _rows(gate))

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        dtype = self.x.dtype
        for stream in (self.weight, self.gate):
            dtype = dtype if stream is None else torch.promote_types(dtype, stream.dtype)
        return dtype

    @property
    def inputs(self) -> tuple[object, ...]:
        """What both kernels read."""
        x, weight, gate = self
        return x, x.stride(0), weight, gate, 0 if gate is None else gate.stride(0), len(x)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        columns = next_power(self.x.shape[1])
        return max(1, TILE // columns), columns


def _rows(x: Tensor) -> Tensor:
    """``[… d]`` → ``[n d]``, as it lies wherever its rows are equally far apart."""
    return side_by_side(x.reshape(-1, x.shape[-1]))


def _warps(elements: int) -> int:
    return min(16, max(4, elements // 512))


def forward(settings: NormSettings, streams: Streams, _keep: bool) -> OperatorResult:
    """x̂ ⊙ weight ⊙ gate ``[… d]``."""
    from fastweights.kernels.triton.device import normalization as device

    x, weight, gate = streams
    assert x is not None
    problem = _NormProblem.of(x, weight, gate)
    rows, columns = problem.tile
    y = torch.empty(x.shape, dtype=problem.dtype, device=x.device)
    launch(
        device.normalize,
        (ceiling(len(problem.x), rows),),
        *(y, *problem.inputs, settings.eps, x.shape[-1]),
        *(settings.center, settings.silu, rows, columns),
        num_warps=_warps(rows * columns),
    )
    return OperatorResult((y,))


def backward(
    settings: NormSettings,
    streams: Streams,
    _saved: Streams,
    gradients: tuple[Tensor, ...],
    wanted: Sequence[bool],
) -> Streams:
    """The gradients of x, of the weight where it is asked for, and of the gate."""
    from fastweights.kernels.triton.device import normalization as device

    x, weight, gate = streams
    assert x is not None
    problem = _NormProblem.of(x, weight, gate)
    d_y, (rows, columns) = _rows(gradients[0]), problem.tile
    programs = ceiling(len(problem.x), rows * TILES)
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    d_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    sums = None
    if weight is not None and wanted[1]:
        sums = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    launch(
        device.normalize_back,
        (programs,),
        *(d_x, d_gate, sums, d_y, d_y.stride(0), *problem.inputs, settings.eps, x.shape[-1]),
        *(settings.center, settings.silu, rows, columns, TILES),
        num_warps=_warps(rows * columns),
    )
    d_weight = None if sums is None or weight is None else sums.sum(0).to(weight.dtype)
    return d_x, d_weight, d_gate


def refuses(x: Tensor, weight: Tensor | None, gate: Tensor | None) -> str | None:
    """Why Triton cannot take a norm of these."""
    if gate is not None and gate.shape != x.shape:
        return f"its gate has shape {list(gate.shape)}, x {list(x.shape)}"
    if x.shape[-1] > WIDEST:
        return f"it is {x.shape[-1]} wide, more than {WIDEST}"
    return refuse_layer(x, weight, gate)
