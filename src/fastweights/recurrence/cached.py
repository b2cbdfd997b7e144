"""What the rules have in common whose state is a cache of tokens: their keys and values as they
are, all of them or the last few.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

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
    require_width,
)
from fastweights.recurrence.timeline import (
    FORGOTTEN,
    Passage,
    Timeline,
    insert_forgotten,
    newest,
    zero_or_more,
)
from fastweights.shapes import GroupKeys, GroupValues, Keys, Map, Mask, Output, PerToken

Cache = tuple[Tensor, ...]

LEAST_SUM = -1e30
"""A sum of log decays that leaves no weight, as caches keep it."""


class SeenKeys(NamedTuple):
    """All tokens that a record's queries may see, the s - t cached ones first.

    Attributes:
        keys, values: ``[b g s ·]``
        time: where the tokens stand
        decay: Σ log f between each token and each query, ``[b h t s]``, if there is a decay
    """

    keys: Tensor
    values: Tensor
    time: Timeline
    decay: Tensor | None = None


class CacheRule(Recurrence[Cache]):
    """A rule that keeps tokens and weighs them anew for every query: o_t = Σ_s P_ts v_s.

    A subclass is a frozen dataclass of streams, among them those named here, and states
    `weigh_tokens`. The state is (keys ``[b g s k]``, values ``[b g s v]``, age ``[b s]`` in tokens
    as the next one will see it), in the streams' dtype; s grows with the sequence, or stays at most
    span - 1. With a decay, Σ log f_j over the tokens behind each, ``[b h s 1]`` in float32 or
    wider, stands before the age.

    Attributes:
        of_queries: the streams that have a head for every query, not for every key
    """

    of_queries: ClassVar[tuple[str, ...]] = ("q",)

    q: Keys
    k: GroupKeys
    v: GroupValues
    keep_mask: Tensor | None
    segment_starts: Tensor | None

    @property
    @abstractmethod
    def span(self) -> int | None:
        """How many tokens, itself included, a query sees; None for all."""

    @property
    def fading(self) -> PerToken | None:
        """log f ``[b t h 1]``, if what is seen of tokens fades at every token."""
        return None

    @abstractmethod
    def weigh_tokens(self, seen: SeenKeys) -> Map:
        """P ``[b h t s]`` of the record's queries and all tokens that they may see."""

    @lazy_property
    def shape(self) -> tuple[int, int, int]:
        shapes = {name: s.shape for name, s in self.streams.items()}
        of_queries = {name: shapes.pop(name) for name in self.of_queries if name in shapes}
        _, _, h = broadcast_lengths(of_queries)
        for_all = {name: (*shape[:2], 1, 0) for name, shape in of_queries.items()}
        b, t, _ = broadcast_lengths({**for_all, **shapes})
        return b, t, h

    @property
    def groups(self) -> int:
        """g, the heads of keys and values."""
        return max(self.k.shape[2], self.v.shape[2])

    def check_groups(self) -> None:
        """Raise a ShapeError unless the groups divide the heads, as all streams must fit."""
        require_width("k", self.k, self.q.shape[-1])
        require_groups(self.shape[2], self.groups)

    @lazy_property
    def output(self) -> torch.dtype:
        return torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), self.v.dtype)

    @property
    def values(self) -> int:
        return self.v.shape[-1]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        (b, _, h), groups = self.shape, self.groups
        decays = () if self.fading is None else ((b, h, 0, 1),)
        return (b, groups, 0, self.k.shape[-1]), (b, groups, 0, self.v.shape[-1]), *decays, (b, 0)

    def initial_state(self) -> Cache:
        decays = () if self.fading is None else (self.accumulator,)
        dtypes = (self.output, self.output, *decays, torch.long)
        shapes = zip(self.state_shapes, dtypes, strict=True)
        return tuple(self.k.new_zeros(shape, dtype=dtype) for shape, dtype in shapes)

    def settle(self, state: Cache) -> Cache:
        if self.span is None:
            raise NoFiniteFormError(
                "softmax attention to all tokens keeps all their keys and values; give it a window"
            )
        *cached, age = state
        cached, age = insert_forgotten(cached, age, self.span - 1)
        return *cached, age

    def adopt(self, state: State) -> Cache:
        decays = "" if self.fading is None else " Σ log f [b h s 1],"
        return check_cache_shapes(
            self, state, f"(keys [b g s k], values [b g s v],{decays} age [b s])"
        )

    def step(self, state: Cache) -> tuple[Output, Cache]:
        seen = self.append_to_cache(state)
        o = self.weigh_tokens(seen) @ repeat_kv(seen.values.to(self.accumulator), self.shape[2])
        return o.transpose(1, 2).to(self.output), self.next_cache(seen)

    def advance_cache(self, state: Cache) -> Cache:
        """The cache behind the record."""
        return self.next_cache(self.append_to_cache(state))

    def attention_map(self) -> Map:
        return self.weigh_tokens(self.append_to_cache(self.initial_state()))

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        return replace(self, keep_mask=mask[..., None, None])

    def restart(self, starts: Mask) -> Self:
        return replace(self, segment_starts=starts[..., None, None])

    def effect(self, evaluate: Evaluation) -> Effect[Cache]:
        if self.span is None:
            raise NoFiniteFormError(
                "softmax attention to all tokens has no state of a fixed size that could travel"
                " from one process to the next; evaluate it by HeadSharded(group), or give it a"
                " window"
            )
        seen = self.append_to_cache(self.initial_state())
        keys, values, *decays, age = self.next_cache(seen)
        total = None if self.fading is None else self.log_decays().sum(2, keepdim=True)
        passage, decay = seen.time.passage, decays[0] if decays else None
        return CacheEffect(keys, values, age, passage, self.span, decay, total)

    def state_size(self, context: int) -> int:
        tokens = context if self.span is None else min(context, self.span - 1)
        decays = 0 if self.fading is None else self.shape[2]
        return tokens * (self.groups * (self.k.shape[-1] + self.v.shape[-1]) + decays)

    def append_to_cache(self, state: Cache) -> SeenKeys:
        """The cache followed by the record's own tokens."""
        b, t, _ = self.shape
        keys, values, *decays, age = state
        k, v = (
            heads_first(s, self.output).expand(b, keys.shape[1], t, -1) for s in (self.k, self.v)
        )
        time = Timeline.of(age, t, self.keep_mask, self.segment_starts)
        decay = self._accumulate(decays[0]) if decays else None
        if not keys.shape[2]:
            return SeenKeys(k, v, time, decay)
        return SeenKeys(torch.cat([keys, k], 2), torch.cat([values, v], 2), time, decay)

    def log_decays(self) -> Tensor:
        """log f ``[b h t 1]``"""
        assert self.fading is not None
        (b, _, h), decays = self.shape, expand_time(self, self.fading)
        return decays.expand(b, h, -1, -1)

    def _accumulate(self, before: Tensor) -> Tensor:
        """Σ_{j=s+1..t} log f_j ``[b h t s]``, sums only, where `before` has it for the cached s."""
        decays = self.log_decays()
        t = self.shape[1]
        # column s sums the decays behind s; a difference of two sums would make NaN of −inf
        later = torch.ones(t, t, dtype=torch.bool, device=self.device).tril(-1)
        own = torch.where(later, decays, 0).cumsum(2)
        return torch.cat([before.mT + decays.cumsum(2), own], -1)

    def visible(self, seen: SeenKeys) -> Tensor:
        """``[b t s]``: which of the seen tokens each query reads."""
        span = FORGOTTEN // 2 if self.span is None else self.span
        return seen.time.same_document & (seen.time.distance < span)

    def next_cache(self, seen: SeenKeys) -> Cache:
        """The cache for the next token: all that it can still see."""
        decays = () if seen.decay is None else (_bounded(seen.decay[:, :, -1:].mT),)
        cache = (seen.keys, seen.values, *decays, seen.time.age)
        if self.span is None:
            return cache
        # without padding, and nothing cached before, the newest tokens are the last ones
        if self.sees_its_own_alone(seen):
            first = zero_or_more(len(self) - (self.span - 1))
            *tokens, age = cache
            return *(part[:, :, first:].clone() for part in tokens), age[:, first:].clone()
        return _keep_newest(cache, self.span - 1)

    def sees_its_own_alone(self, seen: SeenKeys) -> bool:
        """Whether all that is seen are the record's own tokens, in their order and none of them
        padding.
        """
        return self.keep_mask is None and seen.keys.shape[2] == len(self)


@dataclass(frozen=True, eq=False)
class CacheEffect(Effect[Cache]):
    """On the cache of the last tokens.

    Attributes:
        keys, values, age: the cache after the tokens, from the empty one
        passage: what they do to the tokens cached before
        span: how many tokens a query sees
        decay: Σ log f behind each cached token, ``[b h s 1]``; None without decay
        total: Σ log f of all tokens, ``[b h 1 1]``; None without decay
    """

    keys: Tensor
    values: Tensor
    age: Tensor
    passage: Passage
    span: int
    decay: Tensor | None
    total: Tensor | None

    def after(self, state: Cache) -> Cache:
        keys, values, *decays, age = state
        together = [torch.cat([keys, self.keys], 2), torch.cat([values, self.values], 2)]
        if self.decay is not None and self.total is not None:
            # all of the tokens lie behind those that were cached before
            together.append(torch.cat([_bounded(decays[0] + self.total), self.decay], 2))
        ages = torch.cat([self.passage.after(age), self.age], 1)
        return _keep_newest((*together, ages), self.span - 1)


def _bounded(decay: Tensor) -> Tensor:
    """Sums of log decays as a cache keeps them, with a number for −inf that no score outweighs."""
    return torch.where(decay > LEAST_SUM, decay, LEAST_SUM)


def _keep_newest(cache: Cache, count: int) -> Cache:
    """The part of a cache that the next token can still see."""
    *cached, age = cache
    chosen = newest(age, count)
    rows = chosen[:, None, :, None]
    kept = (part.gather(2, rows.expand(*part.shape[:2], -1, part.shape[3])) for part in cached)
    return *kept, age.gather(1, chosen)


def require_groups(heads: int, groups: int) -> None:
    """Raise unless each of the heads of k and v serves as many of q."""
    if groups == 0 or heads % groups:
        raise ShapeError(
            f"q has {heads} heads and k, v {groups}; the latter must divide the former"
        )


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
