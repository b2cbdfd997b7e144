"""Rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

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

    def turn(self, positions: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
        """Turn streams of one dtype ``[b t h width]``, such as q and k, by their positions
        ``[b t]``.
        """
        if not self.rotary_width:
            return streams
        cos, sin = self.turns(positions, streams[0])
        return tuple(self.turn_by(stream, cos, sin) for stream in streams)

    def turns(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines ``[b t 1 r]`` by which streams like x turn at these positions."""
        angle = positions[:, :, None, None] * self._frequencies(x)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def turn_by(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn a stream ``[b t h width]`` by `turns`."""
        rest = self.width - self.rotary_width
        if not rest:
            return _rotate(x, cos, sin)
        turning, rest = x.split([self.rotary_width, rest], dim=-1)
        return torch.cat([_rotate(turning, cos, sin), rest], dim=-1)

    def _frequencies(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_meta:
            return self._frequencies_on(x.device, accumulate_dtype(x))
        return _known_frequencies(self, x.device, accumulate_dtype(x))

    def _frequencies_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """``[r]``: those of the pairs twice, at first negated, so that one sine turns both."""
        theta = self._frequencies_of_pairs(device, dtype)
        return torch.cat([-theta, theta])

    def _frequencies_of_pairs(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        pairs = torch.arange(0, self.rotary_width, 2, device=device, dtype=dtype)
        theta = self.base ** -(pairs / self.rotary_width)
        if self.factor == 1:
            return theta
        turns = self.context * theta / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * theta + (1 - kept) * theta / self.factor


@lru_cache(maxsize=64)
def _known_frequencies(rope: Rope, device: torch.device, dtype: torch.dtype) -> Tensor:
    """They are the same for every token, in whatever mode the first is computed."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return rope._frequencies_on(device, dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(l, r) → (l cos - r sin, r cos + l sin): cos and sin are of (-angle, angle)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
