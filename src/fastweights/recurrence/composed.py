"""Recurrences made of recurrences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fastweights.recurrence.base import Evaluation, Recurrence, check_mask, read_by_chunks
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.scales import EMPTY_LOG_SCALE, Scales, merge_scales
from fastweights.recurrence.streams import mask_stream, reciprocal_or_zero, require_width
from fastweights.recurrence.wrapper import Composed, Wrapper
from fastweights.shapes import Map, Mask, Output, PerToken


@dataclass(frozen=True, eq=False)
class Normalized(Composed[Tensor], Wrapper[Tensor]):
    """The output is divided by the sum of its weights.

    o_t = q_t S_t / n_t, n_t = q_t z_t, or max(|q_t z_t|, floor_t)

    z is the state of an extra value column of ones, so that the rows of the attention map sum to
    one (or, under the floor, to less). A row without weight (n = 0: nothing but padding so far)
    gives o = 0. The state is ``[b h k v+1]``, the last column z.

    Source: DSF eq. 13-16; mLSTM's max{1, ·}.

    Attributes:
        inner: a `Decay`, `Delta`, `Bonus` or a `MatrixRule` of one's own with the state
            ``[b h k v]``; its skip, if any, has width 1
        floor: None, a number > 0, or ``[b t h 1]``
    """

    reads: ClassVar[tuple[str, ...]] = ("floor",)

    inner: MatrixRule[Tensor]
    floor: PerToken | float | None = None

    def __post_init__(self) -> None:
        require_width("skip (of a Normalized)", self.inner.streams.get("skip"), 1)
        if isinstance(self.floor, Tensor):
            require_width("floor", self.floor, 1)
        elif self.floor is not None and self.floor <= 0:
            raise ValueError(
                f"Normalized(floor={self.floor}): the floor of a normaliser is above 0, or None"
            )
        _ = self.shape

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        ((*before, v),) = self.inner.state_shapes
        return ((*before, v + 1),)

    def evaluate_with(self, evaluate: Evaluation, state: Tensor) -> tuple[Output, Tensor]:
        """(o, state) from the inner record with its column of ones."""
        return self.divide_output(evaluate(self.append_ones(), state))

    def effect(self, evaluate: Evaluation) -> Effect[Tensor]:
        return self.append_ones().effect(evaluate)

    def attention_map(self) -> Map:
        weights = self.inner.attention_map()
        n = weights.sum(-1, keepdim=True).transpose(1, 2)
        return weights * self._reciprocal(n).transpose(1, 2)

    def append_ones(self) -> MatrixRule[Tensor]:
        """The inner record with the column of ones on v."""
        v = self.inner.v.to(self.accumulator)
        return self.inner.with_values(torch.cat([v, torch.ones_like(v[..., :1])], dim=-1))

    def divide_output(self, evaluated: tuple[Tensor, Tensor]) -> tuple[Output, Tensor]:
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
        one = torch.ones_like(self.inner.v[..., :1], dtype=self.accumulator)
        return read_by_chunks(self.inner.with_values(one))

    @property
    def reader(self) -> Recurrence:
        return self

    def step_operations(self, context: int) -> int:
        return self.append_ones().step_operations(context) + self.shape[2] * self.values

    def chunk_operations(self, context: int, size: int) -> int:
        return self.append_ones().chunk_operations(context, size) + self.shape[2] * self.values


@dataclass(frozen=True, eq=False)
class Amplified(Composed[tuple[Tensor, Tensor]], Wrapper[tuple[Tensor, Tensor]]):
    """`Normalized` with exponential gates of any size: e^{w_t} k_t for k_t.

    e^{w_t} also multiplies the token's skip or bonus; the floor it does not. Any finite w_t is
    exact, and so is −inf, a token without weight; log α_t may be above 0 here. The state is kept
    divided by e^{m_t}, m_t about the largest log weight in it, so that the rule becomes, with
    decays ≤ 1 and gains ≤ 1,

        S_t e^{-m_t} = e^{log α_t + m_{t-1} - m_t} S_{t-1} e^{-m_{t-1}} + e^{w_t - m_t} k_tᵀ v_t

    and the floor e^{-m_t} floor. This holds for every m, which is a constant to differentiation for
    that reason. The state is (``[b h k v+1]`` divided by e^m, m ``[b h 1]``); under a floor m ≥ 0.

    Source: mLSTM, xLSTM eq. 19-27; RWKV eq. 16.

    Attributes:
        inner: of a rule that states `amplify`, such as `Decay` or `Bonus`, with one decay per
            head, or none
        log_gain: w, ``[b t h 1]``
    """

    inner: Normalized
    log_gain: PerToken

    def __post_init__(self) -> None:
        rule = type(self.inner.inner)
        if not rule.takes_gain():
            raise TypeError(
                f"Amplified(Normalized({rule.__name__})): the rule states no `amplify`, and of one"
                " that erases a gain would erase as well as write; use Decay or Bonus"
            )
        require_width("log_gain", self.log_gain, 1)
        require_width("log_decay (of an Amplified)", self.inner.inner.log_decay, 1)
        _ = self.shape

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

    def initial_state(self) -> tuple[Tensor, Tensor]:
        memory, m = (
            torch.zeros(s, dtype=self.accumulator, device=self.device) for s in self.state_shapes
        )
        return memory, m + self.initial_log_scale

    def evaluate_with(
        self, evaluate: Evaluation, state: tuple[Tensor, Tensor]
    ) -> tuple[Output, tuple[Tensor, Tensor]]:
        """(o, state) from the rescaled record."""
        memory, m = state
        record, m = self.rescale(m)
        o, memory = evaluate(record, memory)
        return o.to(self.output), (memory, m)

    def rescale(self, m: Tensor) -> tuple[Normalized, Tensor]:
        """(the record for the state divided by e^m, m after the last token)."""
        rule, one = self.inner.inner, (*self.shape, 1)
        log_decay = torch.zeros_like(self.log_gain) if rule.log_decay is None else rule.log_decay
        gain, log_decay = self.log_gain.double().expand(one), log_decay.double().expand(one)
        # m of every token, without gradient
        scales = Scales.of(
            gain, log_decay, m.double()[:, None], self.initial_log_scale, self.accumulator
        )
        # the rule of S_t e^{-m_t}, whose outputs come out divided by e^read
        rule, read = rule.amplify(scales, scales.rescale_decay(log_decay).to(self.accumulator))
        # a quotient stays the same if its floor is divided by as much
        floor = None if self.inner.floor is None else self.inner.floor * scales.factors(-read)
        return Normalized(rule, floor), scales.after[:, -1].to(self.accumulator)

    def effect(self, evaluate: Evaluation) -> Effect[tuple[Tensor, Tensor]]:
        _, (added, scale) = evaluate(self, self.initial_state())
        decay = self.inner.inner.log_decay
        total = self.log_gain.new_zeros(1, 1, 1) if decay is None else self._total(decay)
        return AmplifiedEffect(added, scale, total.double(), self.initial_log_scale)

    def _total(self, log_decay: Tensor) -> Tensor:
        """Σ log α_t ``[b h 1]``"""
        return log_decay.double().expand(-1, len(self), -1, -1).sum(1)

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


@dataclass(frozen=True, eq=False)
class AmplifiedEffect(Effect[tuple[Tensor, Tensor]]):
    """S ↦ e^{Σ log α} S + E on states that are divided by e^m.

    Attributes:
        added: E, divided by e^scale, ``[b h k v+1]``
        scale: its m, ``[b h 1]``
        total: Σ log α in float64, ``[b h 1]``
        least: the m of an empty state
    """

    added: Tensor
    scale: Tensor
    total: Tensor
    least: float

    def after(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        memory, m = state
        kept, added, m = merge_scales(m, self.total, self.scale, self.least)
        return kept[..., None] * memory + added[..., None] * self.added, m
