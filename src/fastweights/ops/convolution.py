"""The short causal convolution of every channel by itself: compiled where that is possible, else
through torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.memory import empty


def convolve(tail: Tensor, x: Tensor, taps: Tensor, document: Tensor | None) -> Tensor:
    """y_t = Σ_j taps_j ⊙ x_{t-n+j} ``[b t d]``, the n inputs before the first being the tail.

    Args:
        tail: ``[b n d]``
        taps: ``[n+1 d]``, that of the token itself last
        document: ``[b n+t]`` or None: only inputs of a token's own document count
    """
    if torch.compiler.is_compiling() or _refuses(tail, x, taps):
        return _convolve_by_taps(torch.cat([tail, x], dim=1), taps, document, x.shape[1])
    if torch.is_grad_enabled() and (x.requires_grad or taps.requires_grad or tail.requires_grad):
        return _ConvolutionFunction.apply(tail, x, taps, document)  # type: ignore[return-value]
    return _forward(_ConvolutionInputs.of(tail, x, taps, document))


def _convolve_by_taps(seen: Tensor, taps: Tensor, document: Tensor | None, t: int) -> Tensor:
    """The outputs of the last `t` of the seen inputs, tap by tap."""
    last = len(taps) - 1
    y = seen[:, last:] * taps[last]
    for tap in range(last):
        x = seen[:, tap : tap + t]
        if document is not None:
            x = x * (document[:, tap : tap + t] == document[:, last:])[..., None]
        y = torch.addcmul(y, x, taps[tap])
    return y


def _refuses(tail: Tensor, x: Tensor, taps: Tensor) -> bool:
    return (
        not library.can_read(tail, x, taps)
        or x.numel() == 0
        or len(taps) > library.read_constant("fw_most_taps")
    )


class _ConvolutionInputs(NamedTuple):
    """What C reads: channels side by side."""

    tail: Tensor
    x: Tensor
    taps: Tensor
    document: Tensor | None

    @classmethod
    def of(
        cls, tail: Tensor, x: Tensor, taps: Tensor, document: Tensor | None
    ) -> _ConvolutionInputs:
        tail, x = (s if s.stride(-1) == 1 else s.contiguous() for s in (tail, x))
        return cls(tail, x, taps.contiguous(), None if document is None else document.contiguous())

    def problem(self) -> abi.Convolution:
        """Sizes and inputs, without results."""
        b, t, d = self.x.shape
        threads = library.threads(self.x.numel() * len(self.taps))
        return abi.Convolution(
            b,
            t,
            d,
            len(self.taps),
            threads,
            document=self.document,
            weight=self.taps,
            d_weight=None,
            tail=self.tail.unsqueeze(2),
            x=self.x.unsqueeze(2),
        )


def _forward(given: _ConvolutionInputs) -> Tensor:
    y = empty(*given.x.shape)
    library.call("fw_convolve", given.problem()._replace(y=y.unsqueeze(2)))
    return y


class _ConvolutionFunction(torch.autograd.Function):
    """y of the tail, x, the taps and the document"""

    @staticmethod
    def forward(ctx: Any, *streams: Any) -> Tensor:
        given = _ConvolutionInputs.of(*streams)
        ctx.save_for_backward(*given)
        return _forward(given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        given, (d_y,) = _ConvolutionInputs(*ctx.saved_tensors), gradients
        tail, x, taps, _ = given
        d_y = d_y if d_y.stride(-1) == 1 else d_y.contiguous()
        d_tail, d_x, d_taps = (
            torch.empty(tail.shape),
            empty(*x.shape),
            torch.empty(len(x), *taps.shape),
        )
        d_views = {"d_tail": d_tail, "d_x": d_x, "d_y": d_y}
        views = {name: s.unsqueeze(2) for name, s in d_views.items()}
        library.call("fw_convolve_back", given.problem()._replace(d_weight=d_taps, **views))
        return d_tail, d_x, d_taps.sum(0), None
