"""A convolution as long as the sequence, read and written by queries and keys (Hyena)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.cached import Cache, CacheRule, SeenKeys, repeat_kv
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.streams import ShapeError, heads_first, mask_stream
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.recurrence.transition import DiagonalTransition, ShiftRegister
from fastweights.shapes import GroupKeys, GroupValues, Keys, Map, Mask, Output


@dataclass(frozen=True, eq=False)
class LongConvolution(CacheRule):
    """A causal convolution of what keys and values write, with any filter.

    o_t = Σ_s h_{t-s} (q_t·k_s) v_s over 0 ≤ t - s < l

    which is q_t (h * kᵀv)_t: of one key and one value per head, the product of a channel with its
    own filter. A skip of the input is more of h_0. Source: Hyena (2302.10866) of order two, with
    several channels per head as in 2310.18780, section 4.

    A filter of any shape asks for every token that it reaches: the state is a cache (see
    `CacheRule`) of the last l - 1 tokens, and a step costs as much as reading it. `chunk` is a fast
    Fourier transform, O(t log t), unless documents begin among its tokens, or these are so few that
    their map is smaller than the products of keys with values.

    Attributes:
        q: ``[b t h k]``
        k, v: ``[b t g k]``, ``[b t g v]`` with g | h: each key head serves h / g query heads
        filter: h, ``[h l]``, or ``[1 1 h l]``, as which it is kept; of as many tokens as are seen
        keep_mask, segment_starts: ``[b t 1 1]`` bool, set by `keep` and `segments`
    """

    reads: ClassVar[tuple[str, ...]] = ("q", "filter")
    of_queries: ClassVar[tuple[str, ...]] = ("q", "filter")

    q: Keys
    k: GroupKeys
    v: GroupValues
    filter: Tensor
    keep_mask: Tensor | None = None
    segment_starts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.filter.dim() == 2:
            object.__setattr__(self, "filter", self.filter[None, None])
        if self.filter.dim() != 4 or self.filter.shape[:2] != (1, 1) or not self.filter.numel():
            raise ShapeError(
                f"filter has shape {list(self.filter.shape)}, must be [heads, length], of one"
                " number or more per head"
            )
        self.check_groups()

    @property
    def span(self) -> int:
        return self.filter.shape[-1]

    def chunk(self, state: Cache) -> tuple[Output, Cache]:
        if self.segment_starts is not None:
            return self.step(state)
        seen = self.append_to_cache(state)
        if self.sees_its_own_alone(seen):
            o = self._convolve(self._queries, *self._repeated(seen))
            return o.transpose(1, 2).to(self.output), self.next_cache(seen)
        position = seen.time.position[:, None, :, None]
        queries = F.pad(self._queries, (0, 0, seen.keys.shape[2] - len(self), 0))
        tokens = [queries, *self._readable(seen, position)]
        if self.keep_mask is None:
            o = self._convolve(*tokens)
        else:
            # padding goes before all others, whose distances then are those of the convolution
            order = position.argsort(dim=2, stable=True)
            o = self._convolve(*(s.take_along_dim(order, 2) for s in tokens))
            o = o.take_along_dim(order.argsort(dim=2), 2)
        return o[:, :, -len(self) :].transpose(1, 2).to(self.output), self.next_cache(seen)

    @property
    def _queries(self) -> Tensor:
        """q ``[b h t k]``"""
        return heads_first(self.q, self.accumulator).expand(-1, self.shape[2], len(self), -1)

    def _readable(self, seen: SeenKeys, position: Tensor) -> list[Tensor]:
        """Keys and values ``[b h s ·]``, zeros where they are padding or forgotten."""
        there = position > -FORGOTTEN // 2
        return [torch.where(there, s, 0) for s in self._repeated(seen)]

    def _repeated(self, seen: SeenKeys) -> list[Tensor]:
        """Keys and values ``[b h s ·]`` of all heads."""
        tokens = (seen.keys.to(self.accumulator), seen.values.to(self.accumulator))
        return [repeat_kv(s, self.shape[2]) for s in tokens]

    def _convolve(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q_t (h * kᵀv)_t of tokens ``[b h s ·]``, each a step behind the one before it."""
        if self._are_few(q.shape[2]):
            return (q @ k.mT * self._taps_of_map(q.shape[2])) @ v
        written = k.mT[..., :, None, :] * v.mT[..., None, :, :]
        taps = self.filter[0, 0, :, None, None].to(self.accumulator)
        return (q.mT[..., :, None, :] * convolve_causally(taps, written)).sum(2).mT

    def _are_few(self, tokens: int) -> bool:
        """Whether so many tokens are faster by their map, as measured on a CPU."""
        return tokens <= 2 * self.q.shape[-1] * self.v.shape[-1]

    def _taps_of_map(self, tokens: int) -> Tensor:
        """h_{t-s} ``[h t s]`` of tokens that stand one after the other."""
        place = torch.arange(tokens, device=self.device)
        distance = place[:, None] - place
        return self._taps(distance, (distance >= 0) & (distance < self.span))

    def _taps(self, distance: Tensor, reached: Tensor) -> Tensor:
        """``[… h t s]`` at distances ``[… t s]``; 0 where none is reached."""
        taps = self.filter[0, 0].to(self.accumulator)[:, torch.where(reached, distance, 0)]
        return taps.movedim(0, -3) * reached[..., None, :, :]

    def weigh_tokens(self, seen: SeenKeys) -> Map:
        scores = self._queries @ repeat_kv(seen.keys.to(self.accumulator), self.shape[2]).mT
        return scores * self._taps(seen.time.distance, self.visible(seen))

    def ltv(self) -> LTV:
        """The last l values in a shift register, whose rows C_t weighs."""
        seen, dtype = self.append_to_cache(self.initial_state()), self.accumulator
        (b, t, h), rows = self.shape, torch.arange(self.span, device=self.device)
        found = seen.time.distance[..., None] == rows
        C = torch.einsum("bhts,btsj->bthj", self.weigh_tokens(seen), found.to(dtype))
        kept = torch.ones(b, t, 1, 1, dtype=torch.bool, device=self.device)
        moves = kept if self.keep_mask is None else kept & self.keep_mask
        lasts = kept if self.segment_starts is None else kept & ~self.segment_starts
        none = torch.zeros(b, t, h, 0, dtype=dtype, device=self.device)
        B = (moves & (rows == 0)).to(dtype).expand(b, t, h, -1)
        return LTV(ShiftRegister(none, self.span, moves, lasts, DiagonalTransition(none, 0)), B, C)

    def keep(self, mask: Mask) -> Self:
        """Padding neither reads nor is read."""
        kept = super().keep(mask)
        return replace(kept, q=mask_stream(self.q, mask))

    def surviving_state(self) -> Tensor:
        """Of the shift register: all rows but the first."""
        rows = torch.ones(self.span, 1, dtype=self.accumulator, device=self.device)
        return self[-1:].ltv().A.apply(rows)

    def step_operations(self, context: int) -> int:
        """A score, its tap and the sum of the values, for every token that is seen."""
        h, k, v = self.operation_sizes
        return h * min(context + 1, self.span) * (2 * k + 1 + 2 * v)

    def chunk_operations(self, context: int, size: int) -> int:
        """Of three transforms of twice the context, 5 n log₂ n / 2 each, for every product of a key
        with a value; or of the map.
        """
        if self._are_few(context):
            return self.step_operations(context)
        h, k, v = self.operation_sizes
        transform = 5 * math.ceil(math.log2(2 * context))
        return h * (2 * transform * k * v + transform + 10 * k * v)


def convolve_causally(h: Tensor, u: Tensor) -> Tensor:
    """(h * u)_t = Σ_s h_{t-s} u_s of ``[… l]`` and ``[… t]``, by the fast Fourier transform."""
    length = u.shape[-1]
    h = h[..., :length]
    # zeros behind both, as long as the whole convolution: nothing wraps around
    size = fast_length(length + h.shape[-1] - 1)
    if u.is_complex() or h.is_complex():
        return torch.fft.ifft(torch.fft.fft(h, size) * torch.fft.fft(u, size))[..., :length]
    spectrum = torch.fft.rfft(h, size) * torch.fft.rfft(u, size)
    return torch.fft.irfft(spectrum, size)[..., :length]


def fast_length(length: int) -> int:
    """The least even number from `length` on with few large factors: a power of two times at most
    16.
    """
    step = 1 << max(length.bit_length() - 4, 1)
    return -(-length // step) * step
