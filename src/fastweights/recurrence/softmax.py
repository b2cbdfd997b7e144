"""Softmax attention, whose state is the cache of all keys and values, or of the last few."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.base import (
    Evaluation,
    NoFiniteFormError,
    Recurrence,
    check_mask,
    expand_time,
)
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.streams import (
    ShapeError,
    State,
    broadcast_lengths,
    heads_first,
    lazy_property,
    mask_stream,
    require_width,
)
from fastweights.recurrence.timeline import FORGOTTEN, Passage, Timeline, insert_forgotten, newest
from fastweights.shapes import GroupKeys, GroupValues, Keys, Map, Mask, Output, PerToken

Cache = tuple[Tensor, ...]

LEAST_SUM = -1e30
"""A sum of log decays that leaves no weight, as caches keep it."""

SOFTMAX_OPERATIONS = 5
"""For one weight of a softmax: scale, maximum, exp, sum, division."""


@dataclass(frozen=True, eq=False)
class Softmax(Recurrence[Cache]):
    """Softmax attention to all tokens so far, or to the last few.

    o_t = Σ_s softmax_s(q_t·k_s / √d_k) v_s over s ≤ t, or over the last `window` tokens only

    A decay makes of the scores q_t·k_s / √d_k + Σ_{j=s+1..t} log f_j (forgetting transformer,
    2503.02130 eq. 4). A sink of score a takes a weight of its own and has no value: the weights of
    the tokens are e^(s_ts) / (e^a + Σ_s e^(s_ts)).

    The state is (keys ``[b g s k]``, values ``[b g s v]``, age ``[b s]`` in tokens as the next one
    will see it), in the streams' dtype; s grows with the sequence, or stays at most window - 1.
    With a decay, Σ log f_j over the tokens behind each, ``[b h s 1]`` in float32 or wider, stands
    before the age.

    Attributes:
        q: ``[b t h k]``
        k, v: ``[b t g k]``, ``[b t g v]`` with g | h: each key head serves h / g query heads (GQA)
        window: None, or how many tokens, itself included, a query sees
        log_decay: log f_t ≤ 0, ``[b t h 1]``, or None; −inf forgets all tokens before
        sinks: a, ``[b t h 1]``, such as a number per head ``[1 1 h 1]``; or None
        keep_mask, segment_starts: ``[b t 1 1]`` bool, set by `keep` and `segments`
    """

    q: Keys
    k: GroupKeys
    v: GroupValues
    window: int | None = None
    log_decay: PerToken | None = None
    sinks: PerToken | None = None
    keep_mask: Tensor | None = None
    segment_starts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"Softmax(window={self.window}): a query sees at least itself; use window ≥ 1 or"
                " None"
            )
        require_width("k", self.k, self.q.shape[-1])
        require_width("log_decay", self.log_decay, 1)
        require_width("sinks", self.sinks, 1)
        heads, groups = self.q.shape[2], max(self.k.shape[2], self.v.shape[2])
        if groups == 0 or heads % groups:
            raise ShapeError(
                f"q has {heads} heads and k, v {groups}; the latter must divide the former"
            )
        _ = self.shape

    @lazy_property
    def shape(self) -> tuple[int, int, int]:
        shapes = {name: s.shape for name, s in self.streams.items()}
        of_queries = {n: shapes.pop(n) for n in ("q", "log_decay", "sinks") if n in shapes}
        _, _, h = broadcast_lengths(of_queries)
        for_all = {name: (*shape[:2], 1, 0) for name, shape in of_queries.items()}
        b, t, _ = broadcast_lengths({**for_all, **shapes})
        return b, t, h

    @property
    def biased(self) -> bool:
        """Whether anything but queries and keys decides on the weights."""
        return self.log_decay is not None or self.sinks is not None

    @lazy_property
    def output(self) -> torch.dtype:
        return torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), self.v.dtype)

    @property
    def values(self) -> int:
        return self.v.shape[-1]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        (b, _, h), groups = self.shape, max(self.k.shape[2], self.v.shape[2])
        decays = () if self.log_decay is None else ((b, h, 0, 1),)
        return (b, groups, 0, self.k.shape[-1]), (b, groups, 0, self.v.shape[-1]), *decays, (b, 0)

    def initial_state(self) -> Cache:
        decays = () if self.log_decay is None else (self.accumulator,)
        dtypes = (self.output, self.output, *decays, torch.long)
        shapes = zip(self.state_shapes, dtypes, strict=True)
        return tuple(self.k.new_zeros(shape, dtype=dtype) for shape, dtype in shapes)

    def settle(self, state: Cache) -> Cache:
        if self.window is None:
            raise NoFiniteFormError(
                "softmax attention to all tokens keeps all their keys and values; give it a window"
            )
        *cached, age = state
        cached, age = insert_forgotten(cached, age, self.window - 1)
        return *cached, age

    def adopt(self, state: State) -> Cache:
        decays = "" if self.log_decay is None else " Σ log f [b h s 1],"
        return check_cache_shapes(
            self, state, f"(keys [b g s k], values [b g s v],{decays} age [b s])"
        )

    def step(self, state: Cache) -> tuple[Output, Cache]:
        seen = self._append_to_cache(state)
        o = self._weights(seen) @ repeat_kv(seen.values.to(self.accumulator), self.shape[2])
        return o.transpose(1, 2).to(self.output), self._next_cache(seen)

    def chunk(self, state: Cache) -> tuple[Output, Cache]:
        if self.biased:
            return self.step(state)
        seen = self._append_to_cache(state)
        q = heads_first(self.q, self.output).expand(-1, -1, len(self), -1)
        past = seen.keys.shape[2] - len(self)
        causal = (
            past == 0
            and self.window is None
            and self.keep_mask is None
            and self.segment_starts is None
        )
        mask = None if causal else self._visible(seen)[:, None]
        o = F.scaled_dot_product_attention(
            q, seen.keys, seen.values, mask, is_causal=causal, enable_gqa=True
        )
        return o.transpose(1, 2), self._next_cache(seen)

    def advance_cache(self, state: Cache) -> Cache:
        """The cache behind the record."""
        return self._next_cache(self._append_to_cache(state))

    def attention_map(self) -> Map:
        return self._weights(self._append_to_cache(self.initial_state()))

    def ltv(self) -> NoReturn:
        raise NoFiniteFormError(
            "softmax attention has no linear form with a finite state (DSF Lemma 1); "
            "look at attention_map(), or at Normalized(Decay(φ(q), φ(k), v, None)) with features φ"
        )

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        decay = None if self.log_decay is None else mask_stream(self.log_decay, mask)
        return replace(self, keep_mask=mask[..., None, None], log_decay=decay)

    def restart(self, starts: Mask) -> Self:
        return replace(self, segment_starts=starts[..., None, None])

    def effect(self, evaluate: Evaluation) -> Effect[Cache]:
        if self.window is None:
            raise NoFiniteFormError(
                "softmax attention to all tokens has no state of a fixed size that could travel"
                " from one process to the next; evaluate it by HeadSharded(group), or give it a"
                " window"
            )
        seen = self._append_to_cache(self.initial_state())
        keys, values, *decays, age = self._next_cache(seen)
        total = None if self.log_decay is None else self._log_decays().sum(2, keepdim=True)
        passage, decay = seen.time.passage, decays[0] if decays else None
        return CacheEffect(keys, values, age, passage, self.window, decay, total)

    def normalisers(self) -> Tensor | None:
        """Σ_s e^{q_t·k_s / √d_k}, where every query sees all tokens before it and nothing else
        counts; None elsewhere.
        """
        masked = self.keep_mask is not None or self.segment_starts is not None
        if self.window is not None or masked or self.biased:
            return None
        keys = self.k.repeat_interleave(self.q.shape[2] // self.k.shape[2], 2)
        scores = torch.einsum("bthk,bshk->bhts", self.q, keys) / self.q.shape[-1] ** 0.5
        later = torch.ones_like(scores).triu(1).bool()
        return scores.masked_fill(later, -torch.inf).logsumexp(-1).exp().mT[..., None]

    def surviving_state(self) -> Tensor | None:
        return None if self.log_decay is None else self._log_decays()[:, :, -1:].exp()

    def state_size(self, context: int) -> int:
        tokens = context if self.window is None else min(context, self.window - 1)
        groups = max(self.k.shape[2], self.v.shape[2])
        decays = 0 if self.log_decay is None else self.shape[2]
        return tokens * (groups * (self.k.shape[-1] + self.v.shape[-1]) + decays)

    def step_operations(self, context: int) -> int:
        return self._operations(context + 1)

    def chunk_operations(self, context: int, size: int) -> int:
        """Of queries that see half the context on average."""
        del size
        return self._operations(context // 2)

    def _operations(self, tokens: int) -> int:
        """Of one query that sees so many tokens, or the window."""
        h, k, v = self.operation_sizes
        seen = tokens if self.window is None else min(tokens, self.window)
        return h * seen * (2 * k + 2 * v + SOFTMAX_OPERATIONS)

    def _append_to_cache(self, state: Cache) -> _VisibleKeys:
        """The cache followed by the record's own tokens."""
        b, t, _ = self.shape
        keys, values, *decays, age = state
        k, v = (
            heads_first(s, self.output).expand(b, keys.shape[1], t, -1) for s in (self.k, self.v)
        )
        time = Timeline.of(age, t, self.keep_mask, self.segment_starts)
        decay = self._accumulate(decays[0]) if decays else None
        if not keys.shape[2]:
            return _VisibleKeys(k, v, time, decay)
        return _VisibleKeys(torch.cat([keys, k], 2), torch.cat([values, v], 2), time, decay)

    def _log_decays(self) -> Tensor:
        """log f ``[b h t 1]``"""
        assert self.log_decay is not None
        (b, _, h), decays = self.shape, expand_time(self, self.log_decay)
        return decays.expand(b, h, -1, -1)

    def _accumulate(self, before: Tensor) -> Tensor:
        """Σ_{j=s+1..t} log f_j ``[b h t s]``, sums only, where `before` has it for the cached s."""
        decays = self._log_decays()
        later = torch.ones(len(self), len(self), dtype=torch.bool, device=self.device).tril(-1)
        own = torch.where(later, decays, 0).cumsum(2)
        return torch.cat([before.mT + decays.cumsum(2), own], -1)

    def _visible(self, seen: _VisibleKeys) -> Tensor:
        """``[b t s]``: which of the seen keys each query attends to."""
        t, s = len(self), seen.keys.shape[2]
        span = FORGOTTEN // 2 if self.window is None else self.window
        visible = seen.time.same_document & (seen.time.distance < span)
        padding = torch.eye(t, s, dtype=torch.bool, device=self.device).roll(s - t, 1)
        return visible | (padding & ~visible.any(-1, keepdim=True))

    def _weights(self, seen: _VisibleKeys) -> Map:
        q = heads_first(self.q, self.accumulator).expand(-1, -1, len(self), -1)
        keys = repeat_kv(seen.keys.to(self.accumulator), self.shape[2])
        scores = q @ keys.mT / self.q.shape[-1] ** 0.5
        scores = scores if seen.decay is None else scores + seen.decay
        scores = scores.masked_fill(~self._visible(seen)[:, None], -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = expand_time(self, self.sinks).expand(*scores.shape[:3], 1)
        return torch.cat([sinks, scores], -1).softmax(-1)[..., 1:]

    def _next_cache(self, seen: _VisibleKeys) -> Cache:
        """The cache for the next token: all that it can still see."""
        decays = () if seen.decay is None else (_bounded(seen.decay[:, :, -1:].mT),)
        cache = (seen.keys, seen.values, *decays, seen.time.age)
        return cache if self.window is None else _keep_newest(cache, self.window - 1)


@dataclass(frozen=True, eq=False)
class CacheEffect(Effect[Cache]):
    """On the cache of a window.

    Attributes:
        keys, values, age: the cache after the tokens, from the empty one
        passage: what they do to the tokens cached before
        window: how many tokens a query sees
        decay: Σ log f behind each cached token, ``[b h s 1]``; None without decay
        total: Σ log f of all tokens, ``[b h 1 1]``; None without decay
    """

    keys: Tensor
    values: Tensor
    age: Tensor
    passage: Passage
    window: int
    decay: Tensor | None
    total: Tensor | None

    def after(self, state: Cache) -> Cache:
        keys, values, *decays, age = state
        together = [torch.cat([keys, self.keys], 2), torch.cat([values, self.values], 2)]
        if self.decay is not None and self.total is not None:
            together.append(torch.cat([_bounded(decays[0] + self.total), self.decay], 2))
        ages = torch.cat([self.passage.after(age), self.age], 1)
        return _keep_newest((*together, ages), self.window - 1)


def _bounded(decay: Tensor) -> Tensor:
    """Sums of log decays as a cache keeps them, with a number for −inf that no score outweighs."""
    return torch.where(decay > LEAST_SUM, decay, LEAST_SUM)


def _keep_newest(cache: Cache, count: int) -> Cache:
    """The part of a cache that the next token can still see."""
    *cached, age = cache
    chosen = newest(age, count)
    rows = chosen[:, None, :, None]
    return *(part.take_along_dim(rows, 2) for part in cached), age.take_along_dim(chosen, 1)


class _VisibleKeys(NamedTuple):
    """All keys and values that a record's queries may see, where they stand, and Σ log f between
    them and each query, ``[b h t s]``, if there is a decay.
    """

    keys: Tensor
    values: Tensor
    time: Timeline
    decay: Tensor | None = None


def check_cache_shapes(recurrence: Recurrence, state: State, form: str) -> tuple[Tensor, ...]:
    """`state` if its shapes are the record's, where 0 stands for as many tokens as are kept; or a
    ShapeError.
    """
    name, expected = type(recurrence).__name__, recurrence.state_shapes
    if not isinstance(state, tuple) or len(state) != len(expected):
        raise ShapeError(f"the state of {name} is {form}")
    for part, shape in zip(state, expected, strict=True):
        kept = [n if want else 0 for n, want in zip(part.shape, shape, strict=False)]
        if kept != [*shape] or part.dim() != len(shape):
            raise ShapeError(
                f"{name} here has state shapes {list(expected)} (0: as many tokens as are kept), "
                f"got {[tuple(s.shape) for s in state]}"
            )
    return state


def repeat_kv(groups: Tensor, heads: int) -> Tensor:
    """``[b g s ·]`` → ``[b h s ·]``: each group's keys for the query heads it serves."""
    return groups.repeat_interleave(heads // groups.shape[1], dim=1)
