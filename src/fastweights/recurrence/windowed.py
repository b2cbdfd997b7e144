"""Softmax attention to the last few tokens and linear attention to all before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.base import Evaluation, Recurrence, check_mask
from fastweights.recurrence.cached import check_cache_shapes, repeat_kv, require_groups
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.mapped import LogScale, Mapped, features
from fastweights.recurrence.softmax import SOFTMAX_OPERATIONS
from fastweights.recurrence.streams import (
    ShapeError,
    State,
    at_most,
    broadcast_lengths,
    heads_first,
    lazy_property,
    pad_tokens,
    reciprocal_or_zero,
    require_width,
)
from fastweights.recurrence.timeline import FORGOTTEN, Passage, Timeline, insert_forgotten, newest
from fastweights.recurrence.transition import DiagonalTransition, ShiftRegister, Transition
from fastweights.shapes import (
    Features,
    GroupFeatures,
    GroupKeys,
    GroupValues,
    Keys,
    Map,
    Mask,
    Output,
    PerToken,
)

WindowState = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

LARGEST_LOG_WEIGHT = 40.0
"""Of scores relative to a `log_scale`: e to ± this, and sums of products of it, fit float32."""


@dataclass(frozen=True, eq=False)
class WindowedLinear(Recurrence[WindowState]):
    """Softmax attention to the last few tokens and linear attention to all before them (LoLCATs).

    o_n = (γ_n Σ_{n-w<i≤n} e^(s_ni - c_n) v_i + φ_n S_n) / (γ_n Σ_{n-w<i≤n} e^(s_ni - c_n) + φ_n
    z_n)

    with s_ni = q_n·k_i / √d_k, c_n their maximum in the window, S_n = Σ_{i≤n-w} φ_iᵀ v_i and z_n =
    Σ_{i≤n-w} φ_iᵀ (LoLCATs, 2024). The window is exact softmax for the first w tokens, and for all
    if w is as large as T. With ``shared=False`` each side has a normaliser of its own, the paper's
    eq. 8: γ Σ a_i v_i + (1-γ) Σ â_i v_i, where a side without any tokens leaves all weight to the
    other. With a `log_scale` a_n in place of c_n both sides are on one scale, if e^(a_n) φ_n φ_iᵀ
    is meant to be e^(s_ni): `Landmarks`. s_ni - a_n is then held between ± `LARGEST_LOG_WEIGHT`.

    The state is: keys ``[b g s k]``, values ``[b g s v]`` and features ``[b g s f]`` of the last
    s ≤ w - 1 tokens, oldest first and in the streams' dtypes; S with z as its last column
    ``[b g f v+1]``, in float32 or wider; the age ``[b s]`` of the s tokens as the next one will see
    it. Where fk is `Mapped`, features of the cache are φ of its keys: none are kept, f is 0 there.

    Attributes:
        q: ``[b t h k]``
        k, v: ``[b t g k]``, ``[b t g v]`` with g | h: each key head serves h / g query heads (GQA)
        fq, fk: φ of queries ``[b t h f]`` and of keys ``[b t g f]``; or `Mapped`: still to be made
        mix: γ ``[b t h 1]``, in (0, 1)
        window: w ≥ 0; 0 leaves normalised linear attention
        shared: one normaliser for both sides, or one each
        softcap: a > 0: a tanh(s_ni / a) for s_ni (Gemma 2); None: scores as they are
        log_scale: a_n ``[b t h 1]``, with one normaliser for both sides, or `LogScale`: still to be
            made; None: c_n
        sinks: so many of the last features are each one token's, whose weight is that of softmax
        keep_mask, segment_starts: ``[b t 1 1]`` bool, set by `keep` and `segments`
    """

    q: Keys
    k: GroupKeys
    v: GroupValues
    fq: Features | Mapped
    fk: GroupFeatures | Mapped
    mix: PerToken
    window: int
    shared: bool = True
    softcap: float | None = None
    log_scale: PerToken | LogScale | None = None
    sinks: int = 0
    keep_mask: Tensor | None = None
    segment_starts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(
                f"WindowedLinear(window={self.window}): a number of tokens; use window ≥ 0"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(
                f"WindowedLinear(softcap={self.softcap}): use a bound above 0, or None for no bound"
            )
        require_width("k", self.k, self.q.shape[-1])
        if self.fk.shape[-1] != self.fq.shape[-1]:
            raise ShapeError(f"fk has width {self.fk.shape[-1]}, must be {self.fq.shape[-1]}")
        require_width("mix", self.mix, 1)
        if self.log_scale is not None:
            self._require_one_scale(self.log_scale)
        require_groups(self.shape[2], self.groups)

    def _require_one_scale(self, log_scale: Tensor | LogScale) -> None:
        if log_scale.shape[-1] != 1:
            raise ShapeError(f"log_scale has width {log_scale.shape[-1]}, must be 1")
        if not self.shared:
            raise ValueError(
                "WindowedLinear(shared=False, log_scale=…): sides with a normaliser each have no"
                " scale in common; leave out one of the two"
            )

    @lazy_property
    def groups(self) -> int:
        """g"""
        return max(s.shape[2] for s in (self.k, self.v, self.fk))

    @lazy_property
    def shape(self) -> tuple[int, int, int]:
        """(b, t, h) after broadcasting, where keys have g heads."""
        shapes = {name: s.shape for name, s in self.streams.items()}
        of_groups = {name: shapes[name] for name in ("k", "v", "fk") if name in shapes}
        _, _, g = broadcast_lengths(of_groups)
        one_head = {name: (b, t, 1, w) for name, (b, t, _, w) in of_groups.items()}
        b, t, h = broadcast_lengths({**shapes, **one_head})
        return b, t, max(h, g)

    @property
    def values(self) -> int:
        return self.v.shape[-1]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        b, g, f = self.shape[0], self.groups, self.fq.shape[-1]
        kept = 0 if isinstance(self.fk, Mapped) else f
        cached = tuple((b, g, 0, width) for width in (self.q.shape[-1], self.values, kept))
        return *cached, (b, g, f, self.values + 1), (b, 0)

    def initial_state(self) -> WindowState:
        keys, values, kept, memory, age = self.state_shapes
        return (
            self.k.new_zeros(keys),
            self.v.new_zeros(values),
            self.k.new_zeros(kept),
            torch.zeros(memory, dtype=self.accumulator, device=self.device),
            torch.zeros(age, dtype=torch.long, device=self.device),
        )

    def settle(self, state: WindowState) -> WindowState:
        *cached, memory, age = state
        (keys, values, kept), age = insert_forgotten(cached, age, self.window - 1)
        return keys, values, kept, memory, age

    def adopt(self, state: State) -> WindowState:
        form = (
            "(keys [b g s k], values [b g s v], features [b g s f], memory [b g f v+1], age [b s])"
        )
        keys, values, kept, memory, age = check_cache_shapes(self, state, form)
        return keys, values, kept, memory.to(self.accumulator), age

    def step(self, state: WindowState) -> tuple[Output, WindowState]:
        """The equation above as it stands; a token that may be padding or begin a document is a
        chunk of one.
        """
        if self.keep_mask is not None or self.segment_starts is not None:
            return self.chunk(state)
        *cached, memory, age = state
        keys, values, mapped = self.append_tokens(cached)
        age, exact = F.pad(age, (0, 1)), with_ones(values.to(self.accumulator))
        q, fq, mix = (self._grouped(s) for s in (self.q, self.fq, self.mix))
        scores = soft_cap(q @ keys.to(self.accumulator).mT / q.shape[-1] ** 0.5, self.softcap)
        scores = scores.masked_fill((age >= self.window)[:, None, None], -torch.inf)
        near = exponentials(scores, self._grouped(self.log_scale)) @ exact
        # the window shows the token of age w - 1 for the last time: the next query reads it in S,
        # or this one if there is no window
        leaving = mapped[:, :, :1] * (age[:, :1] == max(self.window - 1, 0))[:, None, :, None]
        written = memory + leaving.to(memory.dtype).mT @ exact[:, :, :1]
        far = fq @ (memory if self.window else written)
        o = join_sides(near, far, mix, shared=self.shared).flatten(1, 2)[:, None]
        # w - 1 tokens stay: of w the oldest goes
        rest = slice(int(age.shape[1] >= self.window), None)
        ring = (s[:, :, rest] for s in (keys, values, self.kept_features(mapped)))
        age = torch.where(age < FORGOTTEN, age + 1, age)[:, rest]
        return o.to(self.output), (*ring, written, age)  # type: ignore[return-value]

    def chunk(self, state: WindowState) -> tuple[Output, WindowState]:
        seen = self._append_to_cache(state)
        values = with_ones(seen.values.to(self.accumulator))
        near, far = self._weights(seen)
        # only queries of the cache's own document read its S
        first = (seen.time.document[:, -self.shape[1] :] == 0)[:, None, :, None]
        read = (self._queries(features(self.fq)) * first) @ repeat_kv(state[3], self.shape[2])
        values = repeat_kv(values, self.shape[2])
        o = self._mix_and_normalize(near @ values, far @ values + read)
        return o.transpose(1, 2).to(self.output), self._next_state(seen, state[3])

    def attention_map(self) -> Map:
        near, far = self._weights(self._append_to_cache(self.initial_state()))
        return self._mix_and_normalize(with_sum(near), with_sum(far))

    def ltv(self) -> LTV:
        """The last w values in a shift register, whose end goes on into S: w + f rows."""
        seen, w = self._append_to_cache(self.initial_state()), self.window
        near, far = self._weights(seen)
        behind = seen.time.distance[..., None] == torch.arange(w + 1, device=self.device)
        behind = (behind & seen.time.same_document[..., None]).to(self.accumulator)
        fk = repeat_kv(seen.features.to(self.accumulator), near.shape[1])
        fq = self._queries(features(self.fq))
        # row j of the register holds the value j tokens behind
        slots = torch.einsum("bhts,btsj->bhtj", near, behind[..., :w])
        # C before the division: the window's rows, S's rows, and each side's sum of weights
        read = self._mix_and_normalize(
            torch.cat([slots, 0 * fq, near.sum(-1, keepdim=True)], -1),
            torch.cat([0 * slots, fq, far.sum(-1, keepdim=True)], -1),
        )
        # the value w tokens behind is added to S along its φ
        A, B = self._register(torch.einsum("bhsf,bts->bthf", fk, behind[..., w]))
        return LTV(A, B, C=read.transpose(1, 2))

    def _register(self, leaving: Tensor) -> tuple[Transition, Tensor]:
        """(A, B) of `ltv`, from the features ``[b t h f]`` of the tokens that leave the window."""
        b, t, _ = self.shape
        always = torch.ones(b, t, 1, 1, dtype=torch.bool, device=self.device)
        moves = always if self.keep_mask is None else self.keep_mask
        lasts = always if self.segment_starts is None else ~self.segment_starts
        if self.window == 0:
            return (
                DiagonalTransition(
                    lasts.to(leaving.dtype).expand(*leaving.shape[:3], 1), leaving.shape[-1]
                ),
                moves * leaving,
            )
        slots = torch.zeros(
            self.window + leaving.shape[-1], dtype=leaving.dtype, device=self.device
        )
        slots[0] = 1
        ones = torch.ones_like(leaving[..., :1])
        below = DiagonalTransition(ones, leaving.shape[-1])
        return ShiftRegister(leaving, self.window, moves, lasts, below), moves * slots.expand(
            *leaving.shape[:3], -1
        )

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        return replace(self, keep_mask=mask[..., None, None])

    def restart(self, starts: Mask) -> Self:
        return replace(self, segment_starts=starts[..., None, None])

    def effect(self, evaluate: Evaluation) -> Effect[WindowState]:
        empty = self.initial_state()
        seen = self._append_to_cache(empty)
        fk = self.fk if isinstance(self.fk, Mapped) else None
        state = self._next_state(seen, empty[3])
        return WindowEffect(*state, seen.time.passage, self.window, fk)

    def state_size(self, context: int) -> int:
        k, v, f = (s.shape[-1] for s in (self.k, self.v, self.fk))
        tokens = min(context, max(self.window - 1, 0))
        return self.groups * (f * (v + 1) + tokens * (k + v + f))

    def step_operations(self, context: int) -> int:
        """Of the window's softmax, and of the memory behind it, written and read."""
        h, _, v = self.operation_sizes
        return self._window_operations(context + 1) + h * 4 * self.fq.shape[-1] * (v + 1)

    def chunk_operations(self, context: int, size: int) -> int:
        h, _, v = self.operation_sizes
        features = self.fq.shape[-1]
        linear = 2 * size * (features + v) + 4 * features * (v + 1)
        return self._window_operations(context) + h * linear

    def _window_operations(self, tokens: int) -> int:
        """Of one query that sees so many tokens, or the window."""
        h, k, v = self.operation_sizes
        return h * min(tokens, self.window) * (2 * k + 2 * v + SOFTMAX_OPERATIONS)

    def _mix_and_normalize(self, near: Tensor, far: Tensor) -> Tensor:
        return join_sides(near, far, self._queries(self.mix), shared=self.shared)

    def _queries(self, stream: Tensor) -> Tensor:
        """`stream` of queries as ``[b h t ·]``, zero where a token is padding."""
        b, t, h = self.shape
        stream = heads_first(stream, self.accumulator).expand(b, h, t, -1)
        return stream if self.keep_mask is None else stream * self.keep_mask.transpose(1, 2)

    def _grouped(self, stream: Tensor | Mapped | None) -> Any:
        """`stream` of one token's queries as ``[b g h/g ·]``; None as it is."""
        if stream is None:
            return None
        return self._queries(features(stream)).unflatten(1, (self.groups, -1)).squeeze(3)

    def _append_to_cache(self, state: WindowState) -> _VisibleTokens:
        """The cache followed by the record's own tokens."""
        *cached, _, age = state
        return _VisibleTokens(
            *self.append_tokens(cached),
            time=Timeline.of(age, self.shape[1], self.keep_mask, self.segment_starts),
        )

    def append_tokens(self, cached: Sequence[Tensor]) -> list[Tensor]:
        """Cached keys, values and features ``[b g s ·]`` with the record's own behind them."""
        (b, t, _), (keys, values, kept) = self.shape, cached
        streams = (self.k, self.v, features(self.fk))
        own = (s.transpose(1, 2).expand(b, self.groups, t, -1) for s in streams)
        before = (keys, values, self.cached_features(keys, kept))
        return [torch.cat([old, new], 2) for old, new in zip(before, own, strict=True)]

    def cached_features(self, keys: Tensor, kept: Tensor) -> Tensor:
        """φ of the cached keys: the state's; or made of those that these tokens push out of the
        window, as only they are read.
        """
        if not isinstance(self.fk, Mapped):
            return kept
        first = at_most(keys.shape[2], self.shape[1])
        leaving = self.fk.of(keys[:, :, :first].transpose(1, 2)).transpose(1, 2)
        return pad_tokens(leaving, 0, keys.shape[2] - first)

    def kept_features(self, mapped: Tensor) -> Tensor:
        """What the state keeps of features ``[b g s f]``: nothing where keys will do."""
        return mapped[..., :0] if isinstance(self.fk, Mapped) else mapped

    def _weights(self, seen: _VisibleTokens) -> tuple[Map, Map]:
        """e^(s - c) inside the window and φ φᵀ before it."""
        keys, fk = (
            repeat_kv(s.to(self.accumulator), self.shape[2]) for s in (seen.keys, seen.features)
        )
        reach = (
            seen.time.same_document
            if self.keep_mask is None
            else seen.time.same_document & self.keep_mask[..., 0]
        )
        near = reach & (seen.time.distance < self.window)
        far = reach & (seen.time.distance >= self.window) & (seen.time.distance < FORGOTTEN // 2)
        scores = soft_cap(self._queries(self.q) @ keys.mT / self.q.shape[-1] ** 0.5, self.softcap)
        scale = None if self.log_scale is None else self._queries(features(self.log_scale))
        weights = exponentials(scores.masked_fill(~near[:, None], -torch.inf), scale)
        return weights, (self._queries(features(self.fq)) @ fk.mT) * far[:, None]

    def _next_state(self, seen: _VisibleTokens, memory: Tensor) -> WindowState:
        """The last w - 1 tokens as they are, and all before them in S."""
        kept = memory * ~seen.time.passage.fresh[..., None, None]
        *cached, memory, age = _slide_window(seen, seen.time.age, kept, self.window)
        keys, values, mapped = cached
        return keys, values, self.kept_features(mapped), memory, age


@dataclass(frozen=True, eq=False)
class WindowEffect(Effect[WindowState]):
    """On the window and the memory behind it.

    Attributes:
        keys, values, features, memory, age: the state after the tokens, from the empty one
        passage: what they do to the tokens cached before
        window: w
        fk: φ of the keys, where no features are kept
    """

    keys: Tensor
    values: Tensor
    features: Tensor
    memory: Tensor
    age: Tensor
    passage: Passage
    window: int
    fk: Mapped | None

    def after(self, state: WindowState) -> WindowState:
        keys, values, mapped, memory, age = state
        own = self.features
        if self.fk is not None:
            # tokens of its own have not left the window, and those before it may
            mapped = self.fk.of(keys.transpose(1, 2)).transpose(1, 2)
            own = mapped.new_zeros(*self.keys.shape[:3], mapped.shape[-1])
        pairs = ((keys, self.keys), (values, self.values), (mapped, own))
        tokens = _WindowTokens(*(torch.cat(pair, 2) for pair in pairs))
        ages = torch.cat([self.passage.after(age), self.age], 1)
        kept = memory * ~self.passage.fresh[..., None, None] + self.memory
        keys, values, mapped, memory, age = _slide_window(tokens, ages, kept, self.window)
        return keys, values, mapped[..., : self.features.shape[-1]], memory, age


class _WindowTokens(NamedTuple):
    """Keys, values and features ``[b g s ·]``."""

    keys: Tensor
    values: Tensor
    features: Tensor


class _VisibleTokens(NamedTuple):
    """All that a record's queries may see, and where it stands."""

    keys: Tensor
    values: Tensor
    features: Tensor
    time: Timeline


def _slide_window(
    seen: _WindowTokens | _VisibleTokens, age: Tensor, memory: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The last w - 1 of the tokens with ages ``[b s]`` as they are, and all before them in S."""
    chosen = newest(age, max(window - 1, 0))
    gone = ((age >= window) & (age < FORGOTTEN // 2))[:, None, :, None]
    written = (seen.features * gone).to(memory.dtype).mT @ with_ones(seen.values.to(memory.dtype))
    last = age.gather(1, chosen)
    # a token is kept or written, never both: one that has left the window makes room
    last = torch.where(last < window, last, FORGOTTEN)
    rows, there = chosen[:, None, :, None], (last < FORGOTTEN)[:, None, :, None]
    keys, values, features = (
        s.gather(2, rows.expand(*s.shape[:2], -1, s.shape[3])) * there for s in seen[:3]
    )
    return keys, values, features, memory + written, last


def exponentials(scores: Tensor, log_scale: Tensor | None = None) -> Tensor:
    """e^(s - c), c the largest of the row; or relative to a scale; zeros where scores are −inf."""
    if log_scale is not None:
        log_weights = (scores - log_scale).clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        return log_weights.exp().masked_fill(scores == -torch.inf, 0)
    # where a row sees nothing, −inf - (−inf) would be NaN
    highest = scores.amax(-1, keepdim=True)
    return (scores - highest.masked_fill(highest == -torch.inf, 0)).exp()


def soft_cap(scores: Tensor, softcap: float | None) -> Tensor:
    """a tanh(s / a), between -a and a."""
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def with_ones(values: Tensor) -> Tensor:
    """``[… v]`` → ``[… v+1]``: the last column sums the weights."""
    return torch.cat([values, torch.ones_like(values[..., :1])], -1)


def with_sum(weights: Tensor) -> Tensor:
    return torch.cat([weights, weights.sum(-1, keepdim=True)], -1)


def mix_window_and_memory(near: Tensor, far: Tensor, mix: Tensor, *, shared: bool) -> Tensor:
    """What o is the quotient of, from both sides' sums ``[… v+1]``; the last column is the
    normaliser.
    """
    if shared:
        return mix * near + far
    return mix * normalize_by_last(near) + (1 - mix) * normalize_by_last(far)


def join_sides(near: Tensor, far: Tensor, mix: Tensor, *, shared: bool) -> Tensor:
    """o ``[… v]`` of both sides' sums ``[… v+1]``."""
    return normalize_by_last(mix_window_and_memory(near, far, mix, shared=shared))[..., :-1]


def normalize_by_last(sums: Tensor) -> Tensor:
    """By the last column; a row without any weight stays zero."""
    return sums * reciprocal_or_zero(sums[..., -1:])
