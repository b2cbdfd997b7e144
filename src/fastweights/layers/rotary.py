"""Rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.layers.functions import accumulate_dtype
from fastweights.recurrence.base import ShapeError


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021).

    Of the first r = fraction · width channels, the pairs (i, i + r/2) turn by the angle
    position · θ_i, θ_i = base^(-2i/r). For a context longer than the one trained on, frequencies
    may be divided by `factor`: all of them (position interpolation), or, if the trained `context`
    is given, those that turn less than `low` times within it, none that turn more than `high`
    times, and between the two a mixture (Llama 3.1).

    Attributes:
        width: Channels of a head.
        base: The base of the frequencies.
        fraction: The part of the channels that turns.
        factor: What frequencies are divided by; 1 leaves them.
        context: Tokens of the trained context; 0 divides all frequencies alike.
        low, high: Turns within `context`, between which the division sets in.

    Raises:
        ShapeError: The channels that turn do not form pairs.
    """

    width: int
    base: float = 10_000.0
    fraction: float = 1.0
    factor: float = 1.0
    context: float = 0.0
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if self.rotary_width % 2:
            raise ShapeError(
                "RoPE turns pairs of channels:"
                f" {self.rotary_width} of {self.width} per head must be even"
            )

    @property
    def rotary_width(self) -> int:
        """The number r of channels that turn."""
        return int(self.width * self.fraction)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn ``x [b t h width]`` by its ``positions [b t]``."""
        if not self.rotary_width:
            return x
        turning, rest = x.split([self.rotary_width, self.width - self.rotary_width], dim=-1)
        turned = _rotate(turning, positions[..., None] * self._frequencies(x))
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def _frequencies(self, x: Tensor) -> Tensor:
        pairs = torch.arange(0, self.rotary_width, 2, device=x.device, dtype=accumulate_dtype(x))
        theta = self.base ** -(pairs / self.rotary_width)
        if self.factor == 1:
            return theta
        turns = self.context * theta / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * theta + (1 - kept) * theta / self.factor


def rotary(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Turn all channels of ``x [b t h w]`` by ``positions [b t]`` as `Rope` does."""
    return Rope(x.shape[-1], base)(x, positions)


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos()[:, :, None].to(x.dtype), angle.sin()[:, :, None].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
