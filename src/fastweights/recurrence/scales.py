"""Logs of what a state is divided by, so that exponential gates of any size fit numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

EMPTY_LOG_SCALE = -1e30
"""The log scale of a state without weight: a number, where −inf - (−inf) would be none."""


class Scales(NamedTuple):
    """Logs of the gains and of the divisors of a state.

    Attributes:
        gain: w ``[b t h 1]``, float64 as all logs here
        before: m_{t-1}: the state before token t is kept divided by e^{m_{t-1}}
        after: m_t, that of the state after it
        least: the lowest m, which an empty state has
        dtype: of factors
    """

    gain: Tensor
    before: Tensor
    after: Tensor
    least: float
    dtype: torch.dtype

    @classmethod
    def of(
        cls, gain: Tensor, log_decay: Tensor, start: Tensor, least: float, dtype: torch.dtype
    ) -> Scales:
        """The smallest under which nothing grows, m_t = max(m_{t-1} + log α_t, w_t, least); the
        last fits `dtype`.
        """
        with torch.no_grad():
            # the state before the first token is one more weight, already at m_0 = start
            first = torch.maximum(gain[:, :1], start + log_decay[:, :1])
            after = running_maximum(log_decay, torch.cat([first, gain[:, 1:]], 1).clamp(min=least))
            # the last m is kept in the state: only what its dtype holds is subtracted later
            after = torch.cat([after[:, :-1], round_up(after[:, -1:], dtype)], 1)
        return cls(gain, torch.cat([start, after[:, :-1]], 1), after, least, dtype)

    def factors(self, log: Tensor) -> Tensor:
        """e^log"""
        return log.exp().to(self.dtype)

    @property
    def written(self) -> Tensor:
        """e^{w_t - m_t} ≤ 1, by which a key is multiplied."""
        return self.factors(self.gain - self.after)

    def rescale_decay(self, log_decay: Tensor) -> Tensor:
        """log α_t + m_{t-1} - m_t; what rounding leaves of it above 0 is taken away."""
        log_decay = log_decay + (self.before - self.after)
        return log_decay - log_decay.detach().clamp(min=0)


def merge_scales(
    m: Tensor, log_decay: Tensor, other: Tensor, least: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The factors of a state divided by e^m that decays, and of one divided by e^other, in their
    sum; and the m of the sum, in the dtype of `m`.
    """
    decayed = m.double() + log_decay
    largest = torch.maximum(decayed.detach(), other.detach().double()).clamp(min=least)
    after = round_up(largest, m.dtype)
    return (decayed - after).exp().to(m.dtype), (other - after).exp().to(m.dtype), after.to(m.dtype)


def running_maximum(log_decay: Tensor, w: Tensor) -> Tensor:
    """m_t = max(m_{t-1} + log α_t, w_t) from m_0 = −∞, along the time axis of ``[b t …]``, for w >
    −∞.

    Of every two neighbours the second follows from the seconds before it, and the firsts from the
    seconds: linear work, and no difference of sums, which would lose the digits of whatever is far
    behind.
    """
    if w.shape[1] == 1:
        return w
    # a, left: of the tokens 0, 2, 4, …; b, right: of those behind them
    (a, b), (left, right) = (log_decay[:, ::2], log_decay[:, 1::2]), (w[:, ::2], w[:, 1::2])
    pairs = right.shape[1]
    # two tokens are one whose decay is a + b and whose weight is max(left + b, right)
    seconds = running_maximum(a[:, :pairs] + b, torch.maximum(left[:, :pairs] + b, right))
    # a first token follows the pair before it
    m = torch.empty_like(w)
    m[:, 1::2], m[:, :1] = seconds, w[:, :1]
    m[:, 2::2] = torch.maximum(seconds[:, : left.shape[1] - 1] + a[:, 1:], left[:, 1:])
    return m


def round_up(m: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers not below ``m`` that `dtype` has: so rounded, m only shrinks what it
    divides.
    """
    near = m.to(dtype)
    return torch.where(near < m, next_above(near), near).to(m.dtype)


def next_above(x: Tensor) -> Tensor:
    """The next larger number, whose derivatives are those of x."""
    return _above(x) if torch.compiler.is_compiling() else _NextAbove.apply(x)  # type: ignore[return-value]


def _above(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))


class _NextAbove(torch.autograd.Function):
    """torch 2.11 has no derivatives of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _above(x)

    @staticmethod
    def setup_context(*_: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0]

    @staticmethod
    def jvp(_: Any, *tangents: Any) -> Any:
        return tangents[0]
