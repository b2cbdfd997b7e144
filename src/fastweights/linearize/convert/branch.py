"""The modules that replace softmax attention: each makes a recurrence of a layer's q, k and v."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.kernels.pages import load, store
from fastweights.layers import upcast
from fastweights.linearize.convert.attention_layers import AttentionLayer
from fastweights.linearize.convert.cache import Kept, StateLayer
from fastweights.linearize.convert.config import LinearAttentionConfig
from fastweights.linearize.convert.convolution import (
    QueryKeyConvolution,
    convolve_queries_and_keys,
)
from fastweights.linearize.convert.past import BranchTokens, Past, PastReader, ProjectedTokens
from fastweights.methods import Auto, Method, advance, begin, evaluate
from fastweights.recurrence import Recurrence, State, WindowedLinear
from fastweights.recurrence.mapped import LogScale, Mapped
from fastweights.recurrence.streams import disable_autocast, pack_state, state_parts
from fastweights.recurrence.timeline import FORGOTTEN
from fastweights.shapes import Mask, Output, Segments

START = -2.1972
"""m of γ = σ(m): γ = 0.1 (LoLCATs)."""
ON_ONE_SCALE = 5.0
"""m where both sides are on one scale, and γ is to be about 1."""


class LinearBranch(nn.Module, ABC):
    """The linear counterpart of one softmax attention, which owns all of its new parameters.

    It is the child ``linear_branch`` of the model's own attention module, which still projects,
    normalises and rotates; the branch gets the q, k and v that softmax attention would get.

    Args:
        attention: Heads, widths and scaling of the attention that it replaces.
        config: The linear attention.

    Attributes:
        past_heads: Which key heads of what `reader` has kept are its own.
        method: Evaluates its recurrence.
    """

    past_heads: list[int] | slice = slice(None)
    method: Method = Auto()

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__()
        self.attention, self.config = attention, config
        channels = (attention.heads + attention.kv_heads) * attention.head_dim
        size = config.convolution
        self.convolution = QueryKeyConvolution(channels, size) if size else None

    @abstractmethod
    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Recurrence:
        """Return the recurrence of these streams, before padding and packed documents are applied.

        Args:
            q: Queries ``[b t h k]``, after norms, rotary positions and convolutions.
            k: Keys ``[b t g k]`` of g key heads, g | h.
            v: Values ``[b t g v]``.
        """

    def reset_parameters(self) -> None:
        """Set all parameters to their initial values."""
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def align(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        keep: Mask | None,
        segments: Segments | None,
        kept: Kept,
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys as rotary positions turn them that count from 0 in every
        document, if the branch reads what they were before.

        Args:
            q, k: As in `project`.
            positions: ``[b t]``, those that they have been turned by.
            keep, segments: As in `forward`.
            kept: What the cache has kept of the tokens before; None for none.
        """
        del positions, keep, segments, kept
        return q, k

    @property
    def reader(self) -> PastReader | None:
        """What reads tokens before those at hand; None for nothing."""
        return self.convolution

    def project_behind(
        self,
        past: Past,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Mask | None,
        segments: Segments | None,
    ) -> Recurrence:
        """Return `project`'s recurrence of streams behind what `reader` has kept."""
        if self.convolution is not None:
            q, k = convolve_queries_and_keys(self.convolution, q, k, past, keep, segments)
        return self.project(q, k, v)

    def record(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Mask | None = None,
        segments: Segments | None = None,
        past: Past = (),
    ) -> Recurrence:
        """Return `project`'s recurrence with padding and packed documents applied, in float32 or
        wider; `past` is what `reader` has kept of the tokens before."""
        with disable_autocast(q.device):
            record = self.project_behind(past, q, k, v, keep, segments)
        record = record if keep is None else record.keep(keep)
        return record if segments is None else record.segments(segments)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Mask | None,
        segments: Segments | None,
        memory: StateLayer | None,
        replacement: Callable[[Recurrence], Recurrence] | None = None,
    ) -> Output:
        """Evaluate the recurrence of these streams.

        Args:
            q, k, v: As in `project`.
            keep: ``[b t]``, False for padding; None if there is none.
            segments: ``[b t]``, the number of each token's packed document; None if there is one.
            memory: The layer of the cache to continue from, which is advanced; None starts from an
                empty state and keeps nothing.
            replacement: Makes another recurrence of the branch's own, which is evaluated instead.

        Returns:
            The output ``[b t h v]``, in the dtype of `v`.
        """
        kept = None if memory is None else memory.state
        record = self.record(q, k, v, keep, segments, self._split(kept)[1])
        record = record if replacement is None else replacement(record)
        if memory is None:
            o, _ = evaluate(record, method=self.method)
            return self.read(o).to(v.dtype)
        tokens = self._with_inputs(record, q, k, keep, segments)
        if not memory.records:
            return self.read(self._advance(memory, tokens)).to(v.dtype)
        parts = memory.record(tokens, self._after)
        o = torch.cat([self._advance(memory, part) for part in parts], 1)
        return self.read(o).to(v.dtype)

    def read_after(
        self, kept: Kept, q: Tensor, k: Tensor, v: Tensor, keep: Mask | None = None
    ) -> tuple[Output, tuple[Tensor, ...]]:
        """Evaluate the recurrence of the streams of `project` behind others.

        Args:
            kept: What this function returned for the tokens before; None for none.
            q, k, v: As in `project`.
            keep: ``[b t]``, False for padding; None if there is none.

        Returns:
            The output ``[b t h v]`` in the dtype of `v`, and what is kept now, whose shapes are the
            same after any number of tokens.
        """
        own, past = self._split(kept)
        record = self.record(q, k, v, keep, past=past)
        before = None if own is None else self.from_cache(own, record, past)
        o, state = evaluate(record, before)
        tokens = self._with_inputs(record, q, k, keep, None)
        after = *self.to_cache(record.settle(state)), *self._past_after(past, tokens)
        return self.read(o).to(v.dtype), after

    def read_in_pages(
        self,
        kept: tuple[Tensor, ...],
        pages: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Mask | None = None,
        *,
        begins: bool = False,
    ) -> Output:
        """Do what `read_after` does where what is kept lies in pages, and stays there.

        Args:
            kept: What `read_after` returned, of all n pages: tensors ``[n …]``, which are written.
            pages: ``[b]``, the number of each sequence's page.
            q, k, v: As in `project`.
            keep: ``[b t]``, False for padding; None if there is none.
            begins: Whether no tokens are before these, so that the pages hold nothing of them yet.

        Returns:
            The output ``[b t h v]`` in the dtype of `v`.
        """
        if not self.keeps_states:
            o, after = self.read_after(None if begins else load(kept, pages), q, k, v, keep)
            store(kept, pages, after)
            return o
        own, pasts = self._split(kept)
        assert own is not None
        past = () if begins else load(pasts, pages)
        record = self.record(q, k, v, keep, past=past)
        state = self.from_cache(own, record, past)
        o = begin(record, state, pages) if begins else advance(record, state, pages)
        tokens = self._with_inputs(record, q, k, keep, None)
        store(pasts, pages, self._past_after(past, tokens))
        return self.read(o).to(v.dtype)

    @property
    def keeps_states(self) -> bool:
        """Whether what the cache keeps of a state are the tensors that the recurrence has."""
        return True

    def kept_before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return what `read_after` would have returned of no tokens before these."""
        record = self.record(q, k, v)
        own = self.to_cache(record.settle(record.initial_state()))
        reader = self.reader
        return own if reader is None else (*own, *reader.empty(reader.inputs_of(q, k)))

    def _split(self, kept: Kept) -> tuple[Kept, Past]:
        """What is kept of a state, and for `reader`; nothing of what is not there."""
        if self.reader is None or kept is None:
            return kept, ()
        return kept[: -self.reader.parts], kept[-self.reader.parts :]

    def _with_inputs(
        self,
        record: Recurrence,
        q: Tensor,
        k: Tensor,
        keep: Mask | None,
        segments: Segments | None,
    ) -> BranchTokens:
        """The record, with what `reader` reads of its tokens if there is one."""
        if self.reader is None:
            return record
        return ProjectedTokens(record, self.reader.inputs_of(q, k), keep, segments)

    def _past_after(self, past: Past, tokens: BranchTokens) -> Past:
        """What is kept for `reader` behind these tokens."""
        if self.reader is None or isinstance(tokens, Recurrence):
            return ()
        return self.reader.after(past or self.reader.empty(tokens.inputs), tokens)

    def _advance(self, memory: StateLayer, tokens: BranchTokens) -> Output:
        o, memory.state = self._evaluate(memory.state, tokens)
        return o

    def _after(self, kept: Kept, tokens: BranchTokens) -> Kept:
        """What the cache keeps after `tokens`, if it has `kept` before."""
        return self._evaluate(kept, tokens)[1]

    def _evaluate(self, kept: Kept, tokens: BranchTokens) -> tuple[Output, tuple[Tensor, ...]]:
        """The outputs, and what the cache keeps then: what is for `reader` last."""
        own, past = self._split(kept)
        record = tokens if isinstance(tokens, Recurrence) else tokens.record
        before = None if own is None else self.from_cache(own, record, past)
        o, state = evaluate(record, before, self.method)
        return o, (*self.to_cache(state), *self._past_after(past, tokens))

    def read(self, o: Output) -> Output:
        """Compute the layer's output from the recurrence's."""
        return o

    def to_cache(self, state: State) -> tuple[Tensor, ...]:
        """Return the tensors that the cache keeps of a recurrence's state."""
        return state_parts(state)

    def from_cache(self, kept: tuple[Tensor, ...], record: Any, past: Past) -> State:
        """Return the state before `record` from the tensors that the cache has kept, also for
        `reader`."""
        del record, past
        return pack_state(kept)

    def cached_tokens(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Mask]:
        """Return the tokens that the cache still has as they were, oldest first.

        Returns:
            Their keys ``[b g s k]`` and values ``[b g s v]``, and ``[b s]`` which of them are
            there. A branch without a window has none.
        """
        b, groups = len(kept[0]), self.attention.kv_heads
        keys, values = (
            kept[0].new_zeros(b, groups, 0, width)
            for width in (self.attention.head_dim, self.attention.value_dim)
        )
        return keys, values, torch.zeros(b, 0, dtype=torch.bool, device=keys.device)

    def softmax_queries(self, q: Tensor) -> Tensor:
        """Scale queries so that their scores, divided by √d, are those of the model's softmax."""
        factor = self.attention.scaling * self.attention.head_dim**0.5
        return q if abs(factor - 1) < 1e-9 else upcast(q) * factor


class WindowedBranch(LinearBranch):
    """LoLCATs' branch: `WindowedLinear` with learnt φ and γ.

    The cache keeps the last w - 1 keys and values of the key heads as they are, and (S ‖ z) in
    float32. φ of a cached key is computed when the key leaves the window: `Mapped`.
    """

    def __init__(self, attention: AttentionLayer, config: LinearAttentionConfig) -> None:
        super().__init__(attention, config)
        heads, key_heads, columns = attention.heads, attention.kv_heads, config.columns(attention)
        self.key_repeats = heads // key_heads if config.per_query_head else 1
        self.phi_q = config.phi(heads, attention.head_dim, columns)
        self.phi_k = config.phi(key_heads * self.key_repeats, attention.head_dim, columns)
        self.mix = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.mix, START)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> WindowedLinear:
        k, v = (
            s.repeat_interleave(self.key_repeats, dim=2) if self.key_repeats > 1 else s
            for s in (k, v)
        )
        return self.windowed(q, k, v, Mapped(self.phi_q, q), Mapped(self.phi_k, k))

    def windowed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        fq: Tensor | Mapped,
        fk: Tensor | Mapped,
        log_scale: Tensor | LogScale | None = None,
    ) -> WindowedLinear:
        """Return the record of these streams and features."""
        config, mix = self.config, upcast(self.mix).sigmoid().view(1, 1, -1, 1)
        return WindowedLinear(
            self.softmax_queries(q),
            k,
            v,
            fq,
            fk,
            mix,
            config.window,
            config.shared,
            self.attention.softcap,
            log_scale,
            config.sinks,
        )

    @property
    def keeps_states(self) -> bool:
        return self.key_repeats == 1

    def to_cache(self, state: State) -> tuple[Tensor, ...]:
        keys, values, _, memory, age = state
        if self.key_repeats > 1:
            # of the copies that query heads have of a key head, one
            keys, values = (s[:, :: self.key_repeats].contiguous() for s in (keys, values))
        return keys, values, memory, age

    def from_cache(self, kept: tuple[Tensor, ...], record: Any, past: Past) -> State:
        keys, values, memory, age = kept
        if self.key_repeats > 1:
            keys, values = (s.repeat_interleave(self.key_repeats, dim=1) for s in (keys, values))
        return keys, values, keys[..., :0], memory, age

    def cached_tokens(self, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Mask]:
        keys, values, _, age, *_ = kept
        return keys, values, age < FORGOTTEN
