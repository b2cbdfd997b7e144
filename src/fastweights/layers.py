"""The pieces that projections are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.convolution import convolved
from fastweights.normalization import rms_normed
from fastweights.recurrence.base import ShapeError, starts
from fastweights.shapes import Embedded, Mask, Segments

T = TypeVar("T")


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
        """``[b t]``: how many tokens of its document precede each token, padding not counted."""
        seen = self._seen
        return seen if self.document is None else seen - self._elsewhere(seen)

    @property
    def position(self) -> Tensor:
        """``[b]``: how many tokens of its document precede the next one."""
        seen = self._before + (self._length if self.keep is None else self.keep.sum(1))
        return seen if self.document is None else seen - F.pad(self._elsewhere(self._seen), (1, 0))[:, -1]

    @property
    def _seen(self) -> Tensor:
        """``[b t]``: how many tokens of any document precede each token."""
        if self.keep is None:
            return self._before[:, None] + torch.arange(self._length, device=self._before.device)
        return self._before[:, None] + self.keep.long().cumsum(1) - self.keep.long()

    def _elsewhere(self, seen: Tensor) -> Tensor:
        """``[b t]``: how many of them belong to earlier documents."""
        assert self.document is not None
        return seen.masked_fill(~starts(self.document), 0).cummax(1).values

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

    @property
    def taps(self) -> Tensor:
        """``[size d]``, that of the current input last."""
        return self.weight

    def forward(self, x: Embedded, past: Past) -> Embedded:
        t, before = x.shape[1], self.size - 1
        tail = past.tail(x, before)
        if t == 1 and past.keep is None and past.document is None:
            seen = torch.cat([tail, x], dim=1)
            past.leave(seen[:, 1:])
            return (seen * self.taps).sum(1, keepdim=True)
        document = None if past.document is None else F.pad(past.document, (before, 0))
        if past.keep is None:
            return self._convolved(tail, x, document, past)
        kept = F.pad(past.keep, (before, 0), value=True)
        order = kept.long().argsort(dim=1, stable=True)
        seen = torch.cat([tail, x], dim=1).take_along_dim(order[..., None], 1)
        document = None if document is None else document.take_along_dim(order, 1)
        y = self._convolved(seen[:, :before], seen[:, before:], document, past)
        behind = F.pad(y, (0, 0, before, 0))
        return behind.take_along_dim(order.argsort(dim=1)[..., None], 1)[:, before:]

    def _convolved(self, tail: Tensor, x: Tensor, document: Tensor | None, past: Past) -> Tensor:
        """The outputs; the tail for what follows is left in `past`."""
        before, t = self.size - 1, x.shape[1]
        last = torch.cat([tail, x[:, max(t - before, 0) :]], dim=1)
        last = last[:, last.shape[1] - before :]
        if document is not None:
            last = last * (document[:, t:] == document[:, -1:])[..., None]
        past.leave(last)
        return convolved(tail, x, self.taps, document)


class TokenShift(ShortConvolution):
    """μ ⊙ x_t + (1 - μ) ⊙ x_{t-1} (RWKV eq. 11-13)."""

    def __init__(self, d: int) -> None:
        nn.Module.__init__(self)
        self.size = 2
        self.mu = nn.Parameter(torch.empty(d))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.mu, 0.5)

    @property
    def taps(self) -> Tensor:
        return torch.stack([1 - self.mu, self.mu])


class HeadNorm(nn.Module):
    """Normalises vectors ``[… width]``, as those of heads; `center` subtracts the mean (LayerNorm) or not (RMSNorm)."""

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
        if self.weight is None:
            return rms_normed(o, None, self.eps)
        dtype = torch.promote_types(o.dtype, self.weight.dtype)
        return rms_normed(o.to(dtype), self.weight.to(dtype), self.eps)


class WholeNorm(HeadNorm):
    """Normalises the values of all heads ``[… h v]`` as one vector of `width` = h·v channels."""

    def forward(self, o: Tensor) -> Tensor:
        return super().forward(o.flatten(-2)).view_as(o)


class GatedMLP(nn.Module):
    """(σ(x W_1) ⊙ x W_2) W_3; with σ = SiLU the SwiGLU of MetaLA's and MesaNet's blocks."""

    def __init__(self, d: int, width: int, activation: nn.Module, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.W_1 = nn.Linear(d, width, bias=bias)
        self.W_2 = nn.Linear(d, width, bias=bias)
        self.W_3 = nn.Linear(width, d, bias=bias)

    @property
    def W_o(self) -> nn.Linear:
        return self.W_3

    def forward(self, x: Embedded) -> Embedded:
        return self.W_3(self.activation(self.W_1(x)) * self.W_2(x))


class MLP(nn.Module):
    """σ(x W_1) W_2, the channel mixer of GPT-2 and Pythia."""

    def __init__(self, d: int, width: int, activation: nn.Module, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.W_1 = nn.Linear(d, width, bias=bias)
        self.W_2 = nn.Linear(width, d, bias=bias)

    @property
    def W_o(self) -> nn.Linear:
        return self.W_2

    def forward(self, x: Embedded) -> Embedded:
        return self.W_2(self.activation(self.W_1(x)))


NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": partial(HeadNorm, center=False, affine=True),
    "layer": nn.LayerNorm,
    "simple_rms": partial(HeadNorm, center=False, affine=False),
}
"""Norms of the model width by name, called as (d, eps=…)."""

MLPS: dict[str, Callable[..., nn.Module]] = {"gated": GatedMLP, "plain": MLP, "identity": nn.Identity}
"""Channel mixers by name, called as (d, width, activation, bias=…); "identity" adds the normalised stream itself."""


def _mean(x: Embedded, keep: Mask) -> Tensor:
    return x.masked_fill(~keep[..., None], 0).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


def _first(x: Embedded, keep: Mask) -> Tensor:
    return x[torch.arange(len(x), device=x.device), keep.int().argmax(1)]


def _last(x: Embedded, keep: Mask) -> Tensor:
    return _first(x.flip(1), keep.flip(1))


POOLINGS: dict[str, Callable[[Embedded, Mask], Tensor]] = {"mean": _mean, "first": _first, "last": _last}
"""``[b d]`` of ``x [b t d]`` and ``keep [b t]``, by name."""


class LowRank(nn.Sequential):
    """x W¹ W² (+ b): a projection through `rank` channels."""

    def __init__(self, d: int, rank: int, width: int, *, bias: bool) -> None:
        super().__init__(nn.Linear(d, rank, bias=False), nn.Linear(rank, width, bias=bias))


def heads(x: Tensor, count: int) -> Tensor:
    """``[b t h·w]`` → ``[b t h w]``."""
    return x.unflatten(-1, (count, -1))


def both_ways(x: Tensor) -> Tensor:
    """``[b t …]`` → ``[2b t …]``: every sequence as it is, then every sequence from its end."""
    return torch.cat([x, x.flip(1)])


def head_width(name: str, width: int, count: int) -> int:
    """width / count, or an error that lists the counts which divide it."""
    if count < 1 or width % count:
        divisors = [str(n) for n in range(1, width + 1) if width % n == 0]
        raise ShapeError(f"{name} = {width} is not divisible by heads = {count}; use {', '.join(divisors)}")
    return width // count


def choose(argument: str, name: str, among: Mapping[str, T]) -> T:
    """What `name` means, or an error that lists the names there are."""
    if name not in among:
        raise ValueError(f"{argument} = {name!r}; use {', '.join(sorted(among))}")
    return among[name]


def fraction(argument: str, value: float) -> float:
    """`value`, or an error unless it lies in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"{argument} = {value}; it must lie in [0, 1)")
    return value


def per_head(count: int, x: Tensor) -> Tensor:
    """0 … count-1 as ``[1 1 h 1]``, in `precise`'s dtype: for decays that are constants of the head's number."""
    return torch.arange(count, device=x.device, dtype=wide(x))[None, None, :, None]


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which decays and angles are computed: that of x, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def precise(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider: decays and angles are computed so."""
    return x.to(wide(x))


def unit(x: Tensor, floor: float = 0.0) -> Tensor:
    """x / √(|x|² + floor) over the last axis; a floor above 0 is for weights that were trained with one."""
    if floor == 0:
        return F.normalize(x, dim=-1)
    return x * (precise(x).square().sum(-1, keepdim=True) + floor).rsqrt().to(x.dtype)


def elu_plus_one(x: Tensor) -> Tensor:
    """1 + ELU(x) > 0, the feature map of linear attention (DSF eq. 16)."""
    return F.elu(x) + 1


def log_gate(x: Tensor, lower: float) -> Tensor:
    """log(lower + (1 - lower) σ(x)): a decay that stays above `lower` (HGRN eq. 5)."""
    x = F.logsigmoid(precise(x))
    return x if lower == 0 else torch.logaddexp(x + math.log1p(-lower), x.new_tensor(lower).log())


@dataclass(frozen=True)
class Rope:
    """Rotary positions: of the first r = fraction · width channels, the pairs (i, i + r/2) turn by position · θ_i.

    θ_i = base^(-2i/r). For a context longer than the one trained on, frequencies may be divided by `factor`: all of
    them (position interpolation), or, if the trained `context` is given, those that turn less than `low` times within
    it, none that turn more than `high` times, and between the two a mixture (Llama 3.1).

    Raises ShapeError where channels do not form pairs.
    """

    width: int
    base: float = 10_000.0
    fraction: float = 1.0
    factor: float = 1.0
    context: float = 0.0
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if self.turned % 2:
            raise ShapeError(f"RoPE turns pairs of channels: {self.turned} of {self.width} per head must be even")

    @property
    def turned(self) -> int:
        """r, how many channels turn."""
        return int(self.width * self.fraction)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [b t h width]`` turned by its ``positions [b t]``."""
        if not self.turned:
            return x
        turning, rest = x.split([self.turned, self.width - self.turned], dim=-1)
        turned = _turned(turning, positions[..., None] * self._frequencies(x))
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def _frequencies(self, x: Tensor) -> Tensor:
        pairs = torch.arange(0, self.turned, 2, device=x.device, dtype=wide(x))
        theta = self.base ** -(pairs / self.turned)
        if self.factor == 1:
            return theta
        turns = self.context * theta / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * theta + (1 - kept) * theta / self.factor


def rotary(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """RoPE: the pairs (i, i + w/2) of ``x [b t h w]`` turned by ``positions [b t]`` · base^(-2i/w)."""
    return Rope(x.shape[-1], base)(x, positions)


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos()[:, :, None].to(x.dtype), angle.sin()[:, :, None].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
