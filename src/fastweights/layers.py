"""The pieces that projections are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.recurrence.base import ShapeError, starts
from fastweights.shapes import Embedded, Mask, Segments


class Past:
    """What came before the tokens at hand, and which of them are padding or begin a document.

    A projection asks it for positions and for the tails of its short convolutions, and leaves new tails in it,
    always in the same order.

    keep      ``[b t]`` bool or None: False marks padding
    segments  ``[b t]`` or None: a new value begins a document
    """

    def __init__(
        self,
        x: Embedded,
        tails: tuple[Tensor, ...] | None,
        position: Tensor | None,
        keep: Mask | None,
        segments: Segments | None,
    ) -> None:
        self.keep = keep
        self.document = None if segments is None else starts(segments).cumsum(1)
        self._old = None if tails is None else iter(tails)
        self._before = position if position is not None else x.new_zeros(x.shape[0], dtype=torch.long)
        self._length = x.shape[1]
        self.tails: tuple[Tensor, ...] = ()

    @property
    def positions(self) -> Tensor:
        """``[b t]``: how many tokens precede each token, padding not counted."""
        if self.keep is None:
            return self._before[:, None] + torch.arange(self._length, device=self._before.device)
        return self._before[:, None] + self.keep.long().cumsum(1) - self.keep.long()

    @property
    def position(self) -> Tensor:
        """``[b]``: how many tokens precede the next one."""
        return self._before + (self._length if self.keep is None else self.keep.sum(1))

    def tail(self, x: Tensor, length: int) -> Tensor:
        """The last `length` inputs of this convolution before `x`: zeros at the start of a sequence."""
        if self._old is None:
            return x.new_zeros(x.shape[0], length, x.shape[2])
        return next(self._old).to(x.dtype)

    def leave(self, tail: Tensor) -> None:
        self.tails = (*self.tails, tail)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution without bias: y_t = Σ_j w_j ⊙ x_{t-j}, j < `size`."""

    def __init__(self, d: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(size, d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Embedded, past: Past) -> Embedded:
        t, before = x.shape[1], self.size - 1
        seen = torch.cat([past.tail(x, before), x], dim=1)
        if t == 1 and past.keep is None and past.document is None:
            past.leave(seen[:, 1:])
            return (seen * self.weight).sum(1, keepdim=True)
        document = None if past.document is None else F.pad(past.document, (before, 0))
        order = None
        if past.keep is not None:
            kept = F.pad(past.keep, (before, 0), value=True)
            order = kept.long().argsort(dim=1, stable=True)
            seen = seen.take_along_dim(order[..., None], 1)
            document = None if document is None else document.take_along_dim(order, 1)
        past.leave(self._tail(seen, document))
        y = self._convolved(seen, document, t)
        if order is None:
            return y
        behind = F.pad(y, (0, 0, before, 0))
        return behind.take_along_dim(order.argsort(dim=1)[..., None], 1)[:, before:]

    def _convolved(self, seen: Tensor, document: Tensor | None, t: int) -> Tensor:
        """The outputs of the last `t` of the seen inputs; inputs of other documents do not count."""
        last = self.size - 1
        y = seen[:, last:] * self.weight[last]
        for tap in range(last):
            x = seen[:, tap : tap + t]
            if document is not None:
                x = x * (document[:, tap : tap + t] == document[:, last:])[..., None]
            y = torch.addcmul(y, x, self.weight[tap])
        return y

    def _tail(self, seen: Tensor, document: Tensor | None) -> Tensor:
        start = seen.shape[1] - (self.size - 1)
        tail = seen[:, start:]
        if document is not None:
            tail = tail * (document[:, start:] == document[:, -1:])[..., None]
        return tail.clone()


class HeadNorm(nn.Module):
    """Normalises each head's value vector ``[… v]``; `center` subtracts the mean (LayerNorm) or not (RMSNorm)."""

    def __init__(self, width: int, *, center: bool, affine: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.center, self.eps = center, eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.width = width

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, o: Tensor) -> Tensor:
        if self.center:
            return F.layer_norm(o, (self.width,), self.weight, None, self.eps)
        return F.rms_norm(o, (self.width,), self.weight, self.eps)


class SwiGLU(nn.Module):
    """(SiLU(x W_1) ⊙ x W_2) W_3, the channel mixer of MetaLA's and MesaNet's blocks."""

    def __init__(self, d: int, width: int) -> None:
        super().__init__()
        self.W_1 = nn.Linear(d, width, bias=False)
        self.W_2 = nn.Linear(d, width, bias=False)
        self.W_3 = nn.Linear(width, d, bias=False)

    def forward(self, x: Embedded) -> Embedded:
        return self.W_3(F.silu(self.W_1(x)) * self.W_2(x))


class LowRank(nn.Sequential):
    """x W¹ W² (+ b): a projection through `rank` channels."""

    def __init__(self, d: int, rank: int, width: int, *, bias: bool) -> None:
        super().__init__(nn.Linear(d, rank, bias=False), nn.Linear(rank, width, bias=bias))


def heads(x: Tensor, count: int) -> Tensor:
    """``[b t h·w]`` → ``[b t h w]``."""
    return x.unflatten(-1, (count, -1))


def head_width(name: str, width: int, count: int) -> int:
    """width / count, or an error that lists the counts which divide it."""
    if count < 1 or width % count:
        divisors = [str(n) for n in range(1, width + 1) if width % n == 0]
        raise ShapeError(f"{name} = {width} is not divisible by heads = {count}; use {', '.join(divisors)}")
    return width // count


def precise(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider: decays and angles are computed so."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def elu_plus_one(x: Tensor) -> Tensor:
    """1 + ELU(x) > 0, the feature map of linear attention (DSF eq. 16)."""
    return F.elu(x) + 1


def rotary(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """RoPE: the pairs (i, i + w/2) of ``x [b t h w]`` turned by ``positions [b t]`` · base^(-2i/w)."""
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = base ** -(torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = (positions[..., None] * frequency)[:, :, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
