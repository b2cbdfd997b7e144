"""Recurrences made of recurrences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fastweights.recurrence.base import (
    Recurrence,
    State,
    check_mask,
    lazy_property,
    mask_stream,
    reciprocal_or_zero,
    require_width,
)
from fastweights.recurrence.bonus import Bonus
from fastweights.recurrence.decay import Decay
from fastweights.recurrence.delta import Delta
from fastweights.recurrence.ltv import LTV
from fastweights.shapes import Map, Mask, Output, PerToken, Segments

EMPTY_LOG_SCALE = -1e30
"""The log scale of a state without weight: a number, where −inf - (−inf) would be none."""


@dataclass(frozen=True, eq=False)
class Normalized(Recurrence):
    """o_t = q_t S_t / n_t, n_t = q_t z_t, or max(|q_t z_t|, floor_t)      (DSF eq. 13-16; mLSTM's
    max{1, ·})

    z is the state of an extra value column of ones, so that the rows of the attention map sum to
    one (or, under the floor, to less). A row without weight (n = 0: nothing but padding so far)
    gives o = 0.

    inner  a `Decay`, `Delta` or `Bonus`; its skip, if any, has width 1
    floor  None, a number > 0, or ``[b t h 1]``
    State ``[b h k v+1]``, the last column z.
    """

    inner: Decay | Delta | Bonus
    floor: PerToken | float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.inner, Decay):
            require_width("skip (of a Normalized)", self.inner.skip, 1)
        if isinstance(self.floor, Tensor):
            require_width("floor", self.floor, 1)
        elif self.floor is not None and self.floor <= 0:
            raise ValueError(
                f"Normalized(floor={self.floor}): the floor of a normaliser is above 0, or None"
            )
        _ = self.shape

    @lazy_property
    def streams(self) -> dict[str, Tensor]:
        floor = {"floor": self.floor} if isinstance(self.floor, Tensor) else {}
        return {**self.inner.streams, **floor}

    @property
    def values(self) -> int:
        return self.inner.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        ((*before, v),) = self.inner.state_shapes
        return ((*before, v + 1),)

    def step(self, state: Tensor) -> tuple[Output, State]:
        return self.divide_output(self.append_ones().step(state))

    def chunk(self, state: Tensor) -> tuple[Output, State]:
        return self.divide_output(self.append_ones().chunk(state))

    def attention_map(self) -> Map:
        weights = self.inner.attention_map()
        return weights * self._reciprocal(weights.sum(-1, keepdim=True).transpose(1, 2)).transpose(
            1, 2
        )

    def append_ones(self) -> Decay | Delta | Bonus:
        """The inner record with the column of ones on v."""
        v = self.inner.v.to(self.accumulator)
        return replace(self.inner, v=torch.cat([v, torch.ones_like(v[..., :1])], dim=-1))

    def divide_output(self, evaluated: tuple[Tensor, State]) -> tuple[Output, State]:
        """The output and state of this record from those of the extended one."""
        o, state = evaluated
        return (o[..., :-1] * self._reciprocal(o[..., -1:])).to(self.output), state

    def _reciprocal(self, n: Tensor) -> Tensor:
        if self.floor is not None:
            n = (
                n.abs().clamp(min=self.floor)
                if isinstance(self.floor, float | int)
                else n.abs().maximum(self.floor)
            )
        return reciprocal_or_zero(n)

    def ltv(self) -> LTV:
        """Read through C_t = q_t / n_t, on this record's own normalisers from the empty state."""
        system, scale = self.inner.ltv(), self._reciprocal(self.normalisers())
        skip = None if system.D is None else system.D * scale
        return replace(system, C=system.C * scale, D=skip)

    def normalisers(self) -> Tensor:
        """q_t z_t ``[b t h 1]`` from the empty state, before the floor: DSF's η."""
        weights = replace(
            self.inner, v=torch.ones_like(self.inner.v[..., :1], dtype=self.accumulator)
        )
        state: Any = weights.initial_state()
        found = [weights.empty_output()]
        for piece in weights.split():
            n, state = piece.chunk(state)
            found.append(n)
        return torch.cat(found, 1)

    def keep(self, mask: Mask) -> Self:
        return replace(self, inner=self.inner.keep(mask))

    def segments(self, ids: Segments) -> Self:
        return replace(self, inner=self.inner.segments(ids))


class Scales(NamedTuple):
    """Logs in float64, ``[b t h 1]``: of e^{w_t}, and of what the state is divided by before and
    after token t.
    """

    gain: Tensor
    before: Tensor
    after: Tensor

    @classmethod
    def of(
        cls, gain: Tensor, log_decay: Tensor, start: Tensor, least: float, dtype: torch.dtype
    ) -> Scales:
        """The smallest under which nothing grows, m_t = max(m_{t-1} + log α_t, w_t, least); the
        last fits `dtype`.
        """
        with torch.no_grad():
            first = torch.maximum(gain[:, :1], start + log_decay[:, :1])
            after = running_maximum(log_decay, torch.cat([first, gain[:, 1:]], 1).clamp(min=least))
            after = torch.cat([after[:, :-1], round_up(after[:, -1:], dtype)], 1)
        return cls(gain, torch.cat([start, after[:, :-1]], 1), after)

    def rescale_decay(self, log_decay: Tensor) -> Tensor:
        """log α_t + m_{t-1} - m_t; what rounding leaves of it above 0 is taken away."""
        log_decay = log_decay + (self.before - self.after)
        return log_decay - log_decay.detach().clamp(min=0)


@dataclass(frozen=True, eq=False)
class Amplified(Recurrence):
    """`Normalized` with exponential gates: e^{w_t} k_t for k_t       (mLSTM, xLSTM eq. 19-27; RWKV
    eq. 16)

    e^{w_t} also multiplies the token's skip or bonus; the floor it does not. Any finite w_t is
    exact, and so is −inf, a token without weight; log α_t may be above 0 here. The state is kept
    divided by e^{m_t}, m_t about the largest log weight in it, so that the rule becomes, with
    decays ≤ 1 and gains ≤ 1,

        S_t e^{-m_t} = e^{log α_t + m_{t-1} - m_t} S_{t-1} e^{-m_{t-1}} + e^{w_t - m_t} k_tᵀ v_t

    and the floor e^{-m_t} floor. This holds for every m, which is a constant to differentiation for
    that reason.

    inner     of a `Decay` or `Bonus` with one decay per head, or none
    log_gain  w, ``[b t h 1]``
    State (``[b h k v+1]`` divided by e^m, m ``[b h 1]``). Under a floor m ≥ 0.
    """

    inner: Normalized
    log_gain: PerToken

    def __post_init__(self) -> None:
        if isinstance(self.inner.inner, Delta):
            raise TypeError(
                "Amplified(Normalized(Delta)): a gain would erase as well as write; use Decay or"
                " Bonus"
            )
        require_width("log_gain", self.log_gain, 1)
        require_width("log_decay (of an Amplified)", self.inner.inner.log_decay, 1)
        _ = self.shape

    @lazy_property
    def streams(self) -> dict[str, Tensor]:
        return {**self.inner.streams, "log_gain": self.log_gain}

    @property
    def values(self) -> int:
        return self.inner.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, _, h = self.shape
        _, _, *memory = self.inner.state_shapes[0]
        return (b, h, *memory), (b, h, 1)

    @property
    def initial_log_scale(self) -> float:
        """The m of an empty state. Only under a floor do weights count absolutely, so that those
        far below 1 vanish.
        """
        return EMPTY_LOG_SCALE if self.inner.floor is None else 0.0

    def initial_state(self) -> State:
        memory, m = (
            torch.zeros(s, dtype=self.accumulator, device=self.device) for s in self.state_shapes
        )
        return memory, m + self.initial_log_scale

    def step(self, state: tuple[Tensor, Tensor]) -> tuple[Output, State]:
        return self.evaluate_with(Normalized.step, state)

    def chunk(self, state: tuple[Tensor, Tensor]) -> tuple[Output, State]:
        return self.evaluate_with(Normalized.chunk, state)

    def evaluate_with(
        self,
        evaluate: Callable[[Normalized, Any], tuple[Tensor, State]],
        state: tuple[Tensor, Tensor],
    ) -> tuple[Output, State]:
        """(o, state) by an evaluation of the rescaled record."""
        memory, m = state
        record, m = self.rescale(m)
        o, memory = evaluate(record, memory)
        assert isinstance(memory, Tensor)
        return o.to(self.output), (memory, m)

    def rescale(self, m: Tensor) -> tuple[Normalized, Tensor]:
        """(the record for the state divided by e^m, m after the last token)."""
        rule, one = self.inner.inner, (*self.shape, 1)
        log_decay = torch.zeros_like(self.log_gain) if rule.log_decay is None else rule.log_decay
        gain, log_decay = self.log_gain.double().expand(one), log_decay.double().expand(one)
        scales = Scales.of(
            gain, log_decay, m.double()[:, None], self.initial_log_scale, self.accumulator
        )
        rule, read = self._rule(scales, scales.rescale_decay(log_decay).to(self.accumulator))
        floor = None if self.inner.floor is None else self.inner.floor * self._exp(-read)
        return Normalized(rule, floor), scales.after[:, -1].to(self.accumulator)

    def _rule(self, scales: Scales, log_decay: Tensor) -> tuple[Decay | Bonus, Tensor]:
        """(the rescaled rule, the log of what its outputs are divided by)."""
        rule, written = self.inner.inner, self._exp(scales.gain - scales.after)
        if isinstance(rule, Bonus):
            reading = (rule.q != 0).any(
                -1, keepdim=True
            )  # not what a document before this one has left
            before = torch.where(reading, scales.before, EMPTY_LOG_SCALE)
            read = torch.maximum(before, scales.gain).clamp(min=self.initial_log_scale).detach()
            q, own = self._exp(before - read), self._exp(scales.gain - read)
            return Bonus(rule.q * q, rule.k * written, rule.v, log_decay, rule.bonus * own), read
        assert isinstance(rule, Decay)
        skip = None if rule.skip is None else rule.skip * written
        return Decay(rule.q, rule.key * written, rule.v, log_decay, skip), scales.after

    def _exp(self, log: Tensor) -> Tensor:
        return log.exp().to(self.accumulator)

    def _from_empty_state(self) -> Normalized:
        """The rescaled record from the empty state, whose m is free: one that the first token does
        not leave.
        """
        m = self.log_gain[:, 0].double().clamp(min=self.initial_log_scale)
        return self.rescale(m.expand(self.state_shapes[1]))[0]

    def attention_map(self) -> Map:
        return self._from_empty_state().attention_map()

    def ltv(self) -> LTV:
        return self._from_empty_state().ltv()

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        return replace(
            self,
            inner=self.inner.keep(mask),
            log_gain=mask_stream(self.log_gain, mask, -torch.inf),
        )

    def segments(self, ids: Segments) -> Self:
        return replace(self, inner=self.inner.segments(ids))


def running_maximum(log_decay: Tensor, w: Tensor) -> Tensor:
    """m_t = max(m_{t-1} + log α_t, w_t) from m_0 = −∞, along the time axis of ``[b t …]``, for w >
    −∞.

    Of every two neighbours the second follows from the seconds before it, and the firsts from the
    seconds: linear work, and no difference of sums, which would lose the digits of whatever is far
    behind.
    """
    if w.shape[1] == 1:
        return w
    (a, b), (left, right) = (log_decay[:, ::2], log_decay[:, 1::2]), (w[:, ::2], w[:, 1::2])
    pairs = right.shape[1]
    seconds = running_maximum(a[:, :pairs] + b, torch.maximum(left[:, :pairs] + b, right))
    m = torch.empty_like(w)
    m[:, 1::2], m[:, :1] = seconds, w[:, :1]
    m[:, 2::2] = torch.maximum(seconds[:, : left.shape[1] - 1] + a[:, 1:], left[:, 1:])
    return m


def round_up(m: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers not below ``m`` that `dtype` has: so rounded, m only shrinks what it
    divides.
    """
    near = m.to(dtype)
    return torch.where(near < m, torch.nextafter(near, torch.full_like(near, torch.inf)), near).to(
        m.dtype
    )
