"""Softmax attention to the last few tokens, and any rule to all before them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self, cast

import torch
from torch import Tensor

from fastweights.recurrence.base import (
    Evaluation,
    Recurrence,
    check_mask,
    tensor_fields,
    written_streams,
)
from fastweights.recurrence.cached import check_cache_shapes, repeat_kv, require_groups
from fastweights.recurrence.composed import Normalized
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.softmax import SOFTMAX_OPERATIONS
from fastweights.recurrence.streams import (
    ShapeError,
    State,
    broadcast_lengths,
    heads_first,
    lazy_property,
    pack_state,
    require_width,
    state_parts,
)
from fastweights.recurrence.timeline import FORGOTTEN, Passage, Timeline, insert_forgotten
from fastweights.recurrence.window_cache import (
    KeptTokens,
    Parts,
    SeenTokens,
    join_state,
    keep_tokens,
    ranks_in_documents,
    register,
    register_rows,
    swap_time_and_heads,
    tokens_behind,
)
from fastweights.recurrence.windowed import (
    exponentials,
    join_sides,
    soft_cap,
    with_ones,
    with_sum,
)
from fastweights.recurrence.wrapper import Composed
from fastweights.shapes import GroupKeys, GroupValues, Keys, Map, Mask, Output, PerToken


@dataclass(frozen=True, eq=False)
class Windowed(Composed[Parts]):
    """Softmax attention to the last few tokens, and any rule to all before them.

    The rule is written late: at token n it writes what token n - w asked it to, which is when that
    token leaves the window, and its query is that of token n. With S_n the rule's state then, s_ni
    = q_n·k_i / √d_k and c_n their maximum in the window,

    o_n = γ_n Σ_{n-w<i≤n} softmax_i(s_ni) v_i + (1 - γ_n) read(q_n, S_n)

    where a side without any tokens leaves all weight to the other. With ``shared=True`` there is
    one normaliser, for a rule that is `Normalized` and whose weights are not negative:

    o_n = (γ_n Σ_{n-w<i≤n} e^(s_ni - c_n) v_i + q_n S_n) / (γ_n Σ_{n-w<i≤n} e^(s_ni - c_n) + q_n
    z_n)

    The first `sinks` tokens of a document stay in the window's softmax for ever, and are not
    written to the rule. `WindowedLinear` is the fused form of the rule without decay.

    Source: LoLCATs (2024) for φφᵀ; Liger (2503.01496) and xLSTM's distillation (2603.15590) for
    gated rules, with sinks as in StreamingLLM (2309.17453).

    The state is: keys ``[b g s k]`` and values ``[b g s v]`` of the `sinks` tokens and of the last
    ≤ w, oldest first; each stream that the rule writes of the same tokens, ``[b h s ·]``; the
    rule's own state; the tokens' age ``[b s]`` as the next one will see it.

    Attributes:
        inner: the rule, of the same tokens
        q: ``[b t h k]``
        k, v: ``[b t g k]``, ``[b t g v]`` with g | h: each key head serves h / g query heads (GQA)
        mix: γ ``[b t h 1]``, in [0, 1]
        window: w ≥ 0
        shared: one normaliser for both sides, or one each
        sinks: how many tokens stay visible for ever
        softcap: a > 0: a tanh(s_ni / a) for s_ni (Gemma 2); None: scores as they are
        keep_mask, segment_starts: ``[b t 1 1]`` bool, set by `keep` and `segments`
    """

    inner: Recurrence
    q: Keys
    k: GroupKeys
    v: GroupValues
    mix: PerToken
    window: int
    shared: bool = False
    sinks: int = 0
    softcap: float | None = None
    keep_mask: Tensor | None = None
    segment_starts: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window < 0 or self.sinks < 0:
            raise ValueError(
                f"Windowed(window={self.window}, sinks={self.sinks}): numbers of tokens; use 0 or"
                " more"
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(
                f"Windowed(softcap={self.softcap}): use a bound above 0, or None for no bound"
            )
        self._require_rule()
        require_width("k", self.k, self.q.shape[-1])
        require_width("mix", self.mix, 1)
        require_groups(self.shape[2], self.groups)
        if self.inner.values != self.values:
            raise ShapeError(
                f"the rule has values of width {self.inner.values}, the window of {self.values};"
                " both add up to one output"
            )

    def _require_rule(self) -> None:
        name = type(self.inner.innermost).__name__
        if not isinstance(self.inner.innermost, MatrixRule):
            raise TypeError(
                f"Windowed({name}): a window stands beside a rule with a matrix as its state; use"
                " Decay, Delta or Mesa, or a MatrixRule of your own"
            )
        direct = {"skip", "bonus"} & self.inner.streams.keys()
        if direct:
            raise TypeError(
                f"Windowed({name}) with a {min(direct)}: the current token is the window's; leave"
                " it out"
            )
        if self.shared and not (isinstance(self.inner, Normalized) and self.inner.floor is None):
            raise TypeError(
                f"Windowed({type(self.inner).__name__}, shared=True): only a Normalized rule"
                " without a floor has a normaliser to share; use shared=False"
            )

    @lazy_property
    def streams(self) -> dict[str, Tensor]:
        """Its own, and the rule's."""
        of_rule = {f"inner.{name}": stream for name, stream in self.inner.streams.items()}
        return {**tensor_fields(self), **of_rule}

    @lazy_property
    def groups(self) -> int:
        """g"""
        return max(self.k.shape[2], self.v.shape[2])

    @lazy_property
    def shape(self) -> tuple[int, int, int]:
        """(b, t, h) after broadcasting, without the heads of keys."""
        own = {"q": self.q, "mix": self.mix, "k": self.k[:, :, :1], "v": self.v[:, :, :1]}
        masks = {"keep mask": self.keep_mask, "segments": self.segment_starts}
        given = {name: s.shape for name, s in {**own, **masks}.items() if s is not None}
        return broadcast_lengths({**given, "inner": (*self.inner.shape, 1)})

    @property
    def values(self) -> int:
        return self.v.shape[-1]

    @lazy_property
    def _spread(self) -> Recurrence:
        """The rule with batch, time and heads of what it writes spelled out."""
        (b, t, _), h = self.shape, self.inner.shape[2]
        return self.inner.map_written(lambda s: s.expand(b, t, h, -1))

    @lazy_property
    def written(self) -> list[Tensor]:
        """``[b t h ·]``, in the order of `map_written`."""
        return written_streams(self._spread)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Where 0 stands for as many tokens as are kept."""
        b, g = self.shape[0], self.groups
        window = ((b, g, 0, self.q.shape[-1]), (b, g, 0, self.values))
        written = ((b, s.shape[2], 0, s.shape[3]) for s in self.written)
        return *window, *written, *self._spread.state_shapes, (b, 0)

    def initial_state(self) -> Parts:
        b, g, n = self.shape[0], self.groups, self.sinks
        age = torch.full((b, n), FORGOTTEN, dtype=torch.long, device=self.device)
        keys, values = (s.new_zeros(b, g, n, s.shape[-1]) for s in (self.k, self.v))
        written = (s.new_zeros(b, s.shape[2], n, s.shape[3]) for s in self.written)
        return keys, values, *written, *state_parts(self._spread.initial_state()), age

    def settle(self, state: Parts) -> Parts:
        *parts, age = state
        cached, memory = parts[: len(self.written) + 2], parts[len(self.written) + 2 :]
        settled = self._spread.settle(pack_state(memory))
        room = self.sinks + self.window
        filled, age = insert_forgotten(cached, age, room, self.sinks)
        return *filled, *state_parts(settled), age

    def adopt(self, state: State) -> Parts:
        form = (
            "(keys [b g s k], values [b g s v], a part [b h s ·] for each stream that the rule"
            " writes, the rule's state, age [b s])"
        )
        cache, memory = self._split_state(check_cache_shapes(self, state, form))
        if cache.age.shape[1] < self.sinks:
            raise ShapeError(
                f"the state of a Windowed with sinks={self.sinks} has room for them first; this one"
                f" holds {cache.age.shape[1]} tokens"
            )
        return join_state(cache, self._spread.adopt(memory))

    def _split_state(self, state: Parts) -> tuple[KeptTokens, State]:
        keys, values, *others, age = state
        written, memory = others[: len(self.written)], others[len(self.written) :]
        return KeptTokens(keys, values, swap_time_and_heads(written), age), pack_state(memory)

    def evaluate_with(
        self, evaluate: Evaluation, state: Parts, block: int | None = None
    ) -> tuple[Output, Any]:
        """(o, state) from the rule on what leaves the window, and the window for all queries at
        once, or for `block` of them.
        """
        cache, memory = self._split_state(state)
        if self.shape[1] == 1 and self._slides(cache):
            return self._evaluate_token(evaluate, cache, memory)
        seen = self._append(cache)
        rule, there = self._delay(seen)
        far, memory = evaluate(self._summing(rule), memory)
        near = self._window_sums(seen) if block is None else self._window_by_blocks(cache, block)
        o = self._join_sides(near, self._rule_sums(far, there))
        return o.transpose(1, 2).to(self.output), join_state(self._slide(seen), memory)

    def _slides(self, cache: KeptTokens) -> bool:
        """Whether the record's token enters the window, and the oldest leaves it if it is full."""
        if self.keep_mask is not None or self.segment_starts is not None:
            return False
        if not self.sinks:
            return True
        # a token goes behind the others, which one that is still to be a sink does not
        unseen = torch.compiler.is_compiling() or cache.age.is_meta
        return not unseen and bool((cache.age[:, : self.sinks] < FORGOTTEN).all())

    def _evaluate_token(
        self, evaluate: Evaluation, cache: KeptTokens, memory: State
    ) -> tuple[Output, Any]:
        """Of one token that `_slides`: every tensor of the cache is copied once."""
        b, n, w = self.shape[0], self.sinks, self.window
        full = w > 0 and cache.age.shape[1] - n == w
        own = KeptTokens(*self._own_tokens(), tuple(self.written), cache.age.new_zeros(b, 1))
        after = cache.slide(own, n, drop=full) if w else cache
        age = torch.where(after.age < FORGOTTEN, after.age + 1, FORGOTTEN)
        # what leaves is the oldest; without a window the token itself; or none, the window has room
        leaving = iter(s[:, n : n + 1] for s in cache.written) if full else iter(own.written)
        there = cache.age[:, n : n + 1] == w if full else own.age == w
        rule = self._spread.map_written(lambda _: next(leaving))
        far, memory = evaluate(self._summing(rule.keep(there)), memory)
        o = self._join_sides(self._token_sums(after, age), self._rule_sums(far, there))
        return o.transpose(1, 2).to(self.output), join_state(after._replace(age=age), memory)

    def _token_sums(self, cache: KeptTokens, age: Tensor) -> Tensor:
        """``[b h 1 v+1]``: Σ e^(s - c) (v, 1) over all that is cached; a group's queries stand
        beside each other."""
        q = self._queries(self.q).unflatten(1, (self.groups, -1)).squeeze(3)
        scores = q @ cache.keys.to(self.accumulator).mT / q.shape[-1] ** 0.5
        lost = (age >= FORGOTTEN)[:, None, None]
        scores = soft_cap(scores, self.softcap).masked_fill(lost, -torch.inf)
        if not scores.shape[-1]:
            return scores.new_zeros(*self.shape[::2], 1, self.values + 1)
        weights = exponentials(scores)
        sums = [weights @ cache.values.to(self.accumulator), weights.sum(-1, keepdim=True)]
        return torch.cat(sums, -1).flatten(1, 2)[:, :, None]

    def _own_tokens(self) -> tuple[Tensor, Tensor]:
        """k and v, ``[b g t ·]``."""
        b, t, _ = self.shape
        keys, values = (
            heads_first(s, s.dtype).expand(b, self.groups, t, -1) for s in (self.k, self.v)
        )
        return keys, values

    def _append(self, cache: KeptTokens) -> SeenTokens:
        """The cached tokens followed by the record's own."""
        t, old = self.shape[1], (cache.keys, cache.values)
        keys, values = (torch.cat(pair, 2) for pair in zip(old, self._own_tokens(), strict=True))
        written = tuple(
            torch.cat(pair, 1) for pair in zip(cache.written, self.written, strict=False)
        )
        time = Timeline.of(cache.age, t, self.keep_mask, self.segment_starts)
        rank = ranks_in_documents(cache.age, time, self.sinks, self.segment_starts)
        return SeenTokens(keys, values, written, time, (rank >= 0) & (rank < self.sinks), rank)

    def _delay(self, seen: SeenTokens) -> tuple[Recurrence, Mask]:
        """The rule that writes what leaves the window, and ``[b t]``: whether something has."""
        behind, found = tokens_behind(seen.time, self.window, self.keep_mask)
        t, document = self.shape[1], seen.time.document
        # written is what leaves the window, unless it is lost, a sink, or of another document
        ordinary = (seen.rank >= 0) & ~seen.sink
        there = found & behind(ordinary) & (behind(document) == document[:, -t:])
        written = iter(seen.written)
        rule = self._spread.map_written(lambda _: behind(next(written))).keep(there)
        if self.segment_starts is not None:
            rule = rule.restart(self.segment_starts[..., 0, 0].expand(there.shape))
        return rule, there

    def _summing(self, rule: Recurrence) -> Recurrence:
        """With a column of ones, where both sides share the normaliser."""
        return cast(Normalized, rule).append_ones() if self.shared else rule

    def _bare(self, rule: Recurrence) -> Recurrence:
        """Without its normaliser, where both sides share it."""
        return cast(Normalized, rule).inner if self.shared else rule

    def _rule_sums(self, far: Tensor, there: Mask) -> Tensor:
        """``[b h t v+1]``: the rule's side of the quotient, zeros where nothing was written."""
        far = heads_first(far, self.accumulator)
        far = far if self.shared else with_ones(far)
        return torch.where(there[:, None, :, None], far, 0)

    def _join_sides(self, near: Tensor, far: Tensor) -> Tensor:
        return join_sides(near, far, self._queries(self.mix), shared=self.shared)

    def _window_sums(self, seen: SeenTokens) -> Tensor:
        """``[b h t v+1]``: Σ e^(s - c) (v, 1) over the tokens in the window, and the sinks."""
        values = repeat_kv(with_ones(seen.values.to(self.accumulator)), self.shape[2])
        return self._window_weights(seen) @ values

    def _window_by_blocks(self, cache: KeptTokens, block: int) -> Tensor:
        found: list[Tensor] = []
        # queries need keys and values alone
        cache = cache._replace(written=())
        for piece in self.split(block):
            seen = piece._append(cache)
            found.append(piece._window_sums(seen))
            cache = piece._slide(seen)
        return torch.cat(found, 2)

    def _window_weights(self, seen: SeenTokens) -> Map:
        """e^(s - c) ``[b h t s]`` in the window, zeros elsewhere."""
        keys = repeat_kv(seen.keys.to(self.accumulator), self.shape[2])
        scores = self._queries(self.q) @ keys.mT / self.q.shape[-1] ** 0.5
        near = (seen.time.distance < self.window) | seen.sink[:, None]
        visible = seen.time.same_document & near & (seen.rank >= 0)[:, None]
        if self.keep_mask is not None:
            visible = visible & self.keep_mask[..., 0]
        scores = soft_cap(scores, self.softcap).masked_fill(~visible[:, None], -torch.inf)
        return exponentials(scores)

    def _queries(self, stream: Tensor) -> Tensor:
        """`stream` of queries as ``[b h t ·]``."""
        b, t, h = self.shape
        return heads_first(stream, self.accumulator).expand(b, h, t, -1)

    def _slide(self, seen: SeenTokens) -> KeptTokens:
        """The sinks and the last w tokens."""
        return keep_tokens(
            KeptTokens(seen.keys, seen.values, seen.written, seen.time.age),
            seen.sink,
            self.sinks,
            self.window,
        )

    def attention_map(self) -> Map:
        cache, _ = self._split_state(self.initial_state())
        seen = self._append(cache)
        rule, there = self._delay(seen)
        past, own = cache.age.shape[1], torch.arange(len(self), device=self.device)
        behind, _ = tokens_behind(seen.time, self.window, self.keep_mask)
        tokens = behind(torch.arange(len(own) + past, device=self.device).expand(len(there), -1))
        # from the map over what the delayed rule writes to one over the tokens that it is of
        to_tokens = (tokens[..., None] == own + past).to(self.accumulator)
        far = self._bare(rule).attention_map() @ to_tokens[:, None]
        far = with_sum(far) if self.shared else with_ones(far)
        near = self._window_weights(seen)[..., past:]
        return self._join_sides(with_sum(near), torch.where(there[:, None, :, None], far, 0))

    def ltv(self) -> LTV:
        """The sinks' values, those of the last w tokens in a shift register, and the rule's state,
        which the end of the register goes on into.
        """
        cache, _ = self._split_state(self.initial_state())
        seen = self._append(cache)
        rule, there = self._delay(seen)
        system = self._bare(rule).ltv()
        near, slots = self._window_weights(seen), register_rows(seen, self.window, self.sinks)
        read = torch.einsum("bhts,btsj->bhtj", near, slots.to(near.dtype))
        far = heads_first(system.C, self.accumulator).expand(*near.shape[:3], -1)
        n = rule.normalisers() if self.shared else torch.ones_like(system.C[..., :1])
        assert n is not None
        # rows of sinks and window, rows of the rule, and each side's sum of weights
        C = self._join_sides(
            torch.cat([read, torch.zeros_like(far), near.sum(-1, keepdim=True)], -1),
            torch.where(
                there[:, None, :, None],
                torch.cat([torch.zeros_like(read), far, heads_first(n, far.dtype)], -1),
                0,
            ),
        )
        A, B = register(seen, system, self.window, self.sinks, self.keep_mask, self.segment_starts)
        return LTV(A, B, C=C.transpose(1, 2))

    def keep(self, mask: Mask) -> Self:
        check_mask(self, mask, "keep mask")
        return replace(self, keep_mask=mask[..., None, None])

    def restart(self, starts: Mask) -> Self:
        return replace(self, segment_starts=starts[..., None, None])

    def effect(self, evaluate: Evaluation) -> Effect[Parts]:
        cache, _ = self._split_state(self.initial_state())
        seen = self._append(cache)
        rule, _ = self._delay(seen)
        return WindowedEffect(
            *self._slide(seen),
            memory=rule.effect(evaluate),
            passage=seen.time.passage,
            tokens=self[:1],
            evaluate=evaluate,
        )

    def write(self, written: Parts, leaving: Mask, memory: State, evaluate: Evaluation) -> State:
        """The rule's state after it has written tokens ``[b s h ·]``, where `leaving`."""
        if not leaving.shape[1]:
            return memory
        parts = iter(written)
        rule = self._spread[:1].map_written(lambda _: next(parts)).keep(leaving)
        return evaluate(self._summing(rule), memory)[1]

    def surviving_state(self) -> Tensor | None:
        return self.inner.surviving_state()

    def state_size(self, context: int) -> int:
        tokens = min(context, self.sinks + self.window)
        token = self.groups * (self.k.shape[-1] + self.v.shape[-1])
        token += sum(prod(s.shape[2:]) for s in self.written)
        return tokens * token + self.inner.state_size(context)

    def step_operations(self, context: int) -> int:
        """Of the window's softmax, and of the rule."""
        return self._window_operations(context + 1) + self.inner.step_operations(context)

    def chunk_operations(self, context: int, size: int) -> int:
        return self._window_operations(context) + self.inner.chunk_operations(context, size)

    def _window_operations(self, tokens: int) -> int:
        """Of one query that sees so many tokens, or the window and the sinks."""
        h, k, v = self.operation_sizes
        seen = min(tokens, self.sinks + self.window)
        return h * seen * (2 * k + 2 * v + SOFTMAX_OPERATIONS)


@dataclass(frozen=True, eq=False)
class WindowedEffect(Effect[Parts]):
    """On the tokens that are kept and on the rule's state.

    Attributes:
        keys, values, written, age: the cache after the tokens, from the empty state
        memory: what those of the tokens do to the rule's state that leave the window before the
            last token, but for the first `sinks` of them
        passage: what they do to the tokens cached before
        tokens: a record of such tokens
        evaluate: how to write what the window lets go
    """

    keys: Tensor
    values: Tensor
    written: Parts
    age: Tensor
    memory: Effect[Any]
    passage: Passage
    tokens: Windowed
    evaluate: Evaluation

    def after(self, state: Parts) -> Parts:
        """The state after the tokens.

        What was cached before leaves first. Then come the tokens that are sinks only if there were
        too few before them.
        """
        sinks, window = self.tokens.sinks, self.tokens.window
        before, memory = self.tokens._split_state(state)
        age = torch.cat([self.passage.after(before.age), self.age], 1)
        past, live = before.age.shape[1], age < FORGOTTEN // 2
        place = torch.arange(age.shape[1], device=age.device)
        # candidates: what was cached as sinks, then what the tokens had as sinks; the first count
        first = (place < sinks) | ((place >= past) & (place < past + sinks))
        sink = live & first
        sink = sink & (sink.cumsum(1) <= sinks)
        written = tuple(torch.cat(p, 1) for p in zip(before.written, self.written, strict=True))
        # other own tokens have been written, if they left: `memory` is their effect
        older = slice(0, past + sinks)
        leaving = (live & ~sink & (age > window))[:, older]
        memory = self.tokens.write(
            tuple(s[:, older] for s in written), leaving, memory, self.evaluate
        )
        keys, values = (
            torch.cat(pair, 2) for pair in ((before.keys, self.keys), (before.values, self.values))
        )
        cache = keep_tokens(KeptTokens(keys, values, written, age), sink, sinks, window)
        return join_state(cache, self.memory.after(memory))
