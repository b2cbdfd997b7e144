"""The short causal convolution: all tokens with gradients, or one token and its tail in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastweights.kernels.triton.chunks import block_of
from fastweights.kernels.triton.launch import launch, refuse_layer
from fastweights.kernels.triton.operator import OperatorResult, Streams
from fastweights.kernels.triton.streams import (
    Strided,
    ceiling,
    next_power,
    place_of_next,
    side_by_side,
    strided,
)

MOST_TAPS = 16
ROWS = 16
TILES = 8
"""Tiles of ROWS tokens whose share of the taps' gradient one program sums."""


class ConvolutionSettings(NamedTuple):
    """Attributes:
    silu: whether SiLU follows
    """

    silu: bool


class _ConvolutionProblem(NamedTuple):
    """The streams ``[b t 1 d]`` as kernels read them."""

    tail: Tensor
    x: Tensor
    taps: Tensor
    document: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, streams: Streams) -> _ConvolutionProblem:
        tail, x, taps, document, bias = streams
        assert tail is not None
        assert x is not None
        assert taps is not None
        tail, x = (side_by_side(s).unsqueeze(2) for s in (tail, x))
        document = None if document is None else document.expand(len(x), -1)[..., None]
        bias = None if bias is None else bias.contiguous()
        return cls(tail, x, taps.contiguous(), document, bias)

    @property
    def before(self) -> int:
        """n, the inputs before its own that a token reads."""
        return len(self.taps) - 1

    @property
    def dtype(self) -> torch.dtype:
        dtype = torch.promote_types(self.x.dtype, self.taps.dtype)
        return dtype if self.bias is None else torch.promote_types(dtype, self.bias.dtype)

    @property
    def columns(self) -> int:
        return block_of(self.x.shape[-1], 128)

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for a stream ``[b t 1 d]`` of the shape of another."""
        return torch.empty(like.shape, dtype=dtype, device=like.device)


def is_token_alone(streams: Streams) -> bool:
    """Whether it is one token, of a known document, without gradients."""
    _, x, _, document, _ = streams
    wanted = torch.is_grad_enabled() and any(s is not None and s.requires_grad for s in streams)
    return x is not None and x.shape[1] == 1 and document is None and not wanted


def convolve_token(silu: bool, streams: Streams) -> tuple[Tensor, Tensor]:
    """(y ``[b 1 d]``, the next tail ``[b n d]``) of a token alone."""
    from fastweights.kernels.triton.device import convolution as device

    problem = _ConvolutionProblem.of(streams)
    tail, x, taps, _, bias = problem
    (b, _, _, width), columns = x.shape, problem.columns
    y, following = problem.empty(x, problem.dtype), place_of_next(tail)
    launch(
        device.convolve_token,
        (b, ceiling(width, columns)),
        *strided(y, following, tail, x),
        *(taps, bias, width, problem.before, silu, columns),
        num_warps=columns // 32 if columns >= 32 else 1,
    )
    return y.squeeze(2), following.squeeze(2)


def forward(settings: ConvolutionSettings, streams: Streams, _keep: bool) -> OperatorResult:
    """(y ``[b t d]``, the next tail ``[b n d]``)"""
    problem = _ConvolutionProblem.of(streams)
    y, following = (
        problem.empty(problem.x, problem.dtype),
        problem.empty(problem.tail, problem.tail.dtype),
    )
    _launch_forward(settings, problem, y, following, None)
    return OperatorResult((y.squeeze(2), following.squeeze(2)))


def _launch_forward(
    settings: ConvolutionSettings,
    problem: _ConvolutionProblem,
    y: Tensor,
    following: Tensor | None,
    d_y: Tensor | None,
) -> None:
    """y, or with `d_y` that times the derivative of SiLU."""
    from fastweights.kernels.triton.device import convolution as device

    tail, x, taps, document, bias = problem
    (b, length, _, width), tiles = x.shape, ceiling(x.shape[1], ROWS)
    launch(
        device.convolve,
        (b * tiles, ceiling(width, problem.columns)),
        *strided(y, following if problem.before else None, d_y, tail, x),
        *(taps, bias, Strided.or_none(document), length, tiles, width, problem.before),
        *(settings.silu, ROWS, problem.columns, next_power(max(problem.before, 1))),
    )


def backward(
    settings: ConvolutionSettings,
    streams: Streams,
    _saved: Streams,
    gradients: tuple[Tensor, ...],
    wanted: Sequence[bool],
) -> Streams:
    """The gradients of all but the document."""
    from fastweights.kernels.triton.device import convolution as device

    problem = _ConvolutionProblem.of(streams)
    tail, x, taps, document, bias = problem
    d_y, d_following = (side_by_side(g).unsqueeze(2) for g in gradients)
    d_z = d_y
    if settings.silu:
        d_z = problem.empty(d_y, d_y.dtype)
        _launch_forward(settings, problem, d_z, None, d_y)
    d_tail, d_x = problem.empty(tail, tail.dtype), problem.empty(x, x.dtype)
    (b, length, _, width), weights = x.shape, len(taps) + (bias is not None)
    programs = ceiling(length + problem.before, ROWS * TILES)
    # programs sum the weights' gradients for themselves; then their sum, in one order
    sums = None
    if wanted[2] or wanted[4]:
        sums = torch.empty(b * programs, weights, width, dtype=torch.float32, device=x.device)
    d_outer, d_behind = (s if problem.before else None for s in (d_tail, d_following))
    launch(
        device.convolve_back,
        (b * programs, ceiling(width, problem.columns)),
        *(*strided(d_outer, d_x), sums, *strided(d_z, d_behind, tail, x)),
        *(taps, Strided.or_none(document), length, programs, width, problem.before),
        *(bias is not None, ROWS, problem.columns, TILES, next_power(weights)),
    )
    d_taps = d_bias = None
    if sums is not None:
        total = sums.sum(0)
        d_taps = total[: len(taps)].to(taps.dtype)
        d_bias = None if bias is None else total[-1].to(bias.dtype)
    return d_tail.squeeze(2), d_x.squeeze(2), d_taps, None, d_bias


def refuses(tail: Tensor, x: Tensor, taps: Tensor, bias: Tensor | None) -> str | None:
    """Why Triton cannot take a convolution of these."""
    if tail.dtype != x.dtype:
        return f"its tail is of {tail.dtype}, x of {x.dtype}"
    if len(taps) > MOST_TAPS:
        return f"it has {len(taps)} taps, more than {MOST_TAPS}"
    return refuse_layer(x, taps, bias)
