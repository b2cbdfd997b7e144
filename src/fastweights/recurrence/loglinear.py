"""Log-linear attention: O(log T) states of a linear rule, each of tokens of one age."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.base import (
    Evaluation,
    NoFiniteFormError,
    Recurrence,
    check_mask,
)
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.streams import ShapeError, State, heads_first
from fastweights.recurrence.wrapper import Wrapper
from fastweights.shapes import Levels, Map, Mask, Output

Fenwick = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class LogLinear(Wrapper[Fenwick]):
    """A linear rule with a state for every power of two of tokens, the last ones apart.

    o_t = Σ_l λ_t^(l) q_t S_t^(l) ;  S_t = A_t merge_t(S_{t-1}) + (k_tᵀ v_t at l = 0)

    A_t is the inner rule's transition, on every level. Before token t, counted from 0, the levels
    up to that of t's least bit are merged: S^(l) ← Σ_{l'<l} S^(l'), l = 1 + lssb(t), and those
    below l are empty. So token s is at level bit_length(t xor s) for token t: 0 for itself, its
    neighbours in time in small states, those long ago in large ones. The last level also takes all
    that would be beyond it. Source: log-linear attention (2506.04761 eq. 5-8).

    The state is (S ``[b h l·k v]``, level after level; how many tokens it has read, ``[b]``): as
    many numbers for every sequence, whatever their lengths.

    Attributes:
        inner: `Decay`, `Delta` or another `MatrixRule` whose state is one matrix, of all tokens
        weights: λ, ``[b t h l]`` for l ≥ 2 levels; 2^(l-2) tokens are told apart by their age
        keep_mask, starts: ``[b t 1 1]`` bool, set by `keep` and `restart`
    """

    reads: ClassVar[tuple[str, ...]] = ("weights",)

    inner: MatrixRule[Tensor]
    weights: Levels
    keep_mask: Tensor | None = None
    starts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.levels < 2:
            raise ShapeError(
                f"weights has width {self.levels}: LogLinear has 2 levels or more; with one,"
                " use the inner rule"
            )
        if len(self.inner.state_shapes) > 1:
            raise TypeError(
                f"LogLinear({type(self.inner).__name__}): the rule's state is more than one matrix;"
                " use Decay, Delta or DPLR"
            )
        if self.inner.shape != self.shape:
            raise ShapeError(
                f"the inner record has [batch, time, heads] = {list(self.inner.shape)}, weights"
                f" {list(self.weights.shape[:3])}; weights may have length 1 on any axis, and the"
                " inner record as little as 1 only where they do"
            )

    @property
    def levels(self) -> int:
        """l"""
        return self.weights.shape[-1]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        ((b, h, k, v),) = self.inner.state_shapes
        return (b, h, self.levels * k, v), (b,)

    def state_size(self, context: int) -> int:
        """Of the levels: how many tokens there were is no memory of them."""
        return self.levels * self.inner.state_size(context)

    def initial_state(self) -> Fenwick:
        levels, count = super().initial_state()
        return levels, count.long()

    def adopt(self, state: State) -> Fenwick:
        levels, count = super().adopt(state)
        return levels, state[1].expand(count.shape).long()

    def step(self, state: Fenwick) -> tuple[Output, Fenwick]:
        time, after = self._count(state[1])
        levels = _merge(self._by_level(state[0]), self._merged(time)[:, 0])
        # all levels are values of one state, and v those of level 0
        own = F.pad(self._values, (0, (self.levels - 1) * self.values))
        read, moved = self.inner.with_values(own).step(_side_by_side(levels))
        o = self._weigh(read, self._numbers.expand(*time.shape, -1))
        return o.to(self.output), (self._stack(moved), after)

    def chunk(self, state: Fenwick) -> tuple[Output, Fenwick]:
        """The chunk's own tokens by the inner rule's map, those before it by their states: all of a
        state are at one level for any later token.
        """
        (time, after), before = self._count(state[1]), self._by_level(state[0])
        width, last = self.levels * self.values, after[:, None] - 1
        # beside what is left of each state, the chunk's tokens at the level that they end at
        ends = F.one_hot(self._level(last, time), self.levels).to(self.accumulator)[:, 0]
        own = (ends[:, :, None, :, None] * self._values[:, :, :, None]).flatten(3)
        wide = self.inner.with_values(F.pad(own, (width, 0)))
        # first half: the states before, which decay; second half: what the chunk writes
        read, moved = wide.chunk(F.pad(_side_by_side(before), (0, width)))
        left, added = (self._by_level(self._stack(part)) for part in moved.split(width, -1))
        # the states before at the level they have for each token, then the tokens by their map
        o = self._weigh(read[..., :width], self._seen(state[1], time))
        o = o + (self._within(time) @ self._values.transpose(1, 2)).transpose(1, 2)
        # what was before moves to the level that it has for the last token
        levels = _merge(left, self._seen(state[1], last)[:, 0]) + added
        return o.to(self.output), (levels.flatten(2, 3), after)

    @property
    def _values(self) -> Tensor:
        """v ``[b t h v]``"""
        return self.inner.v.to(self.accumulator).expand(*self.shape, -1)

    @property
    def _numbers(self) -> Tensor:
        """0 … l-1"""
        return torch.arange(self.levels, device=self.device)

    def _by_level(self, levels: Tensor) -> Tensor:
        """``[b h l·k v]`` → ``[b h l k v]``"""
        return levels.unflatten(2, (self.levels, -1))

    def _stack(self, wide: Tensor) -> Tensor:
        """``[b h k l·v]`` → ``[b h l·k v]``"""
        return wide.unflatten(3, (self.levels, -1)).transpose(2, 3).flatten(2, 3)

    def _count(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """The time of each token ``[b t]``, which is how many of its document are before it, and of
        the next ``[b]``. Padding has that of the token before it, as which it reads.
        """
        b, t, _ = self.shape
        always = torch.ones(b, t, dtype=torch.bool, device=self.device)
        keeps = always if self.keep_mask is None else always & self.keep_mask[..., 0, 0]
        last = keeps.cumsum(1) - 1
        time = count[:, None] + last
        if self.starts is not None:
            # kept tokens before the document's first; a start at padding is the next kept one's
            begun = torch.where(self.starts[..., 0, 0], last + (~keeps).long(), -1).cummax(1).values
            time = torch.where(begun < 0, time, last - begun)
        return time, time[:, -1] + 1

    def _bit_length(self, x: Tensor) -> Tensor:
        """That of integers, at most l - 1; 0 for negative ones."""
        return torch.bucketize(x, 2 ** self._numbers[:-1], right=True)

    def _level(self, reader: Tensor, token: Tensor) -> Tensor:
        """``[b t s]``: the level of tokens at times ``[b s]`` for readers at times ``[b t]``."""
        return self._bit_length(reader[:, :, None] ^ token[:, None])

    def _seen(self, count: Tensor, time: Tensor) -> Tensor:
        """``[b t l]``: the level, at times ``[b t]``, of the states after ``count [b]`` tokens."""
        # of each level a token: the last one read, its l least bits cleared (any if there is none)
        first = (count[:, None] - 1 >> self._numbers) << self._numbers
        seen = self._level(time, first)
        # the last level takes all beyond it, and stays the last
        return torch.where(self._numbers == self.levels - 1, self._numbers, seen)

    def _merged(self, time: Tensor) -> Tensor:
        """``[b t l]``: the level that each becomes a part of before the tokens at ``[b t]``."""
        # l = 1 + lssb(t), into which the levels below merge; 0 at t = 0
        filled = self._bit_length(time & -time)
        if self.keep_mask is not None:
            filled = filled * self.keep_mask[..., 0, 0]
        return torch.maximum(filled[..., None], self._numbers)

    def _weigh(self, read: Tensor, seen: Tensor) -> Tensor:
        """Σ λ o ``[b t h v]`` of every state's output ``[b t h l·v]``, seen at ``[b t l]``."""
        weights = self.weights.to(self.accumulator).expand(*self.shape, -1)
        weights = weights.gather(-1, seen[:, :, None].expand_as(weights))
        return (weights[..., None, :] @ read.unflatten(-1, (self.levels, -1))).squeeze(-2)

    def _within(self, time: Tensor) -> Map:
        """The inner rule's map, weighed by levels."""
        weights = heads_first(self.weights.expand(*self.shape, -1), self.accumulator)
        inner, level = self.inner.attention_map(), self._level(time, time)
        return inner * weights.gather(-1, level[:, None].expand_as(inner))

    def attention_map(self) -> Map:
        return self._within(self._count(self.initial_state()[1])[0])

    def ltv(self) -> NoReturn:
        raise NoFiniteFormError(
            "the levels of a LogLinear merge from token to token, for which there is no transition"
            " of a compact structure here; look at attention_map(), or at the inner rule's ltv()"
        )

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        return replace(self, inner=self.inner.keep(mask), keep_mask=mask[..., None, None])

    def restart(self, starts: Mask) -> Self:
        return replace(self, inner=self.inner.restart(starts), starts=starts[..., None, None])

    def effect(self, evaluate: Evaluation) -> NoReturn:
        raise NoFiniteFormError(
            "what tokens do to the levels of a LogLinear depends on how many are before them;"
            " evaluate it by HeadSharded(group), to which HybridSharded(group) turns by itself"
        )

    @property
    def reader(self) -> Recurrence:
        return self

    def step_operations(self, context: int) -> int:
        return self._wide(1).step_operations(context)

    def chunk_operations(self, context: int, size: int) -> int:
        return self._wide(2).chunk_operations(context, size)

    def _wide(self, count: int) -> MatrixRule[Tensor]:
        """The inner rule on `count` times all levels' values."""
        v = self.inner.v
        return self.inner.with_values(v.new_zeros(1, 1, 1, count * self.levels * v.shape[-1]))


def _side_by_side(levels: Tensor) -> Tensor:
    """``[b h l k v]`` → ``[b h k l·v]``"""
    return levels.transpose(2, 3).flatten(3)


def _merge(levels: Tensor, into: Tensor) -> Tensor:
    """``[b h l k v]`` with every level added to the one that ``into [b l]`` says."""
    chosen = F.one_hot(into, levels.shape[2]).to(levels.dtype)
    return torch.einsum("bhlkv,blm->bhmkv", levels, chosen)
