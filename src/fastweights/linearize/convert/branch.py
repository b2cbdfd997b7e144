"""What takes softmax's place in a layer: a module of its own, from the layer's q, k, v to a
recurrence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastweights.kernels.native.windowed import LearnedFeatureMap, WindowRule, step_with_feature_map
from fastweights.layers import upcast
from fastweights.linearize.convert.cache import StateLayer
from fastweights.linearize.convert.sites import AttentionLayer
from fastweights.methods import evaluate
from fastweights.recurrence import Recurrence, State, WindowedLinear
from fastweights.recurrence.streams import disable_autocast, pack_state
from fastweights.shapes import Mask, Output, Segments

if TYPE_CHECKING:
    from fastweights.linearize.convert.analog import LinearAttentionConfig

START = -2.1972
"""m of γ = σ(m): γ = 0.1 (LoLCATs)."""


class LinearBranch(nn.Module, ABC):
    """q, k, v of one attention → its linear counterpart; owns all the new parameters, and uses them
    only in here.
    """

    def __init__(self, site: AttentionLayer, analog: LinearAttentionConfig) -> None:
        super().__init__()
        self.site, self.analog = site, analog

    @abstractmethod
    def project(self, q: Tensor, k: Tensor, v: Tensor) -> Recurrence:
        """The recurrence of q ``[b t h k]``, k ``[b t g k]`` and v ``[b t g v]``, after norms and
        RoPE.
        """

    @abstractmethod
    def reset_parameters(self) -> None:
        """The start, from which transfer begins."""

    def record(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Mask | None = None,
        segments: Segments | None = None,
    ) -> Recurrence:
        """`project` with padding and packed documents applied, in float32 or wider."""
        with disable_autocast(q.device):
            record = self.project(q, k, v)
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
        """o ``[b t h v]`` in v's dtype of the recurrence, or of what `replacement` makes of it;
        continues from `memory`, and advances it.
        """
        plain = keep is None and segments is None and replacement is None
        if plain and memory is not None and memory.state is not None:
            found = self.step_from_cache(q, k, v, memory.state)
            if found is not None:
                o, memory.state = found
                return o.to(v.dtype)
        record = self.record(q, k, v, keep, segments)
        record = record if replacement is None else replacement(record)
        if memory is None:
            o, _ = evaluate(record)
            return self.read(o).to(v.dtype)
        before = None if memory.state is None else self.from_cache(memory.state, len(record))
        o, state = evaluate(record, before)
        memory.state = self.to_cache(state)
        return self.read(o).to(v.dtype)

    def step_from_cache(
        self, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Output, tuple[Tensor, ...]] | None:
        """(o, what the cache keeps then) where there is a shorter way than by the record, which
        agrees.
        """
        return None

    def read(self, o: Output) -> Output:
        """What the layer makes of the recurrence's output."""
        return o

    def to_cache(self, state: State) -> tuple[Tensor, ...]:
        """What the cache keeps of a recurrence's state."""
        return state if isinstance(state, tuple) else (state,)

    def from_cache(self, kept: tuple[Tensor, ...], t: int) -> State:
        """The state again, for `t` more tokens."""
        return pack_state(list(kept))


class WindowedBranch(LinearBranch):
    """LoLCATs: `WindowedLinear` with learnt φ and γ.

    The cache keeps the last w - 1 keys and values of the key heads as they are, and (S ‖ z) in
    float32. φ of a cached key is computed when the key leaves the window.
    """

    def __init__(self, site: AttentionLayer, analog: LinearAttentionConfig) -> None:
        super().__init__(site, analog)
        self.key_repeats = site.heads // site.kv_heads if analog.per_query_head else 1
        self.factor = site.scaling * site.head_dim**0.5
        self.phi_q = analog.phi(site.heads, site.head_dim, analog.columns(site))
        self.phi_k = analog.phi(
            site.kv_heads * self.key_repeats, site.head_dim, analog.columns(site)
        )
        self.mix = nn.Parameter(torch.empty(site.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.phi_q.reset_parameters()
        self.phi_k.reset_parameters()
        nn.init.constant_(self.mix, START)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> WindowedLinear:
        k, v = (
            s.repeat_interleave(self.key_repeats, dim=2) if self.key_repeats > 1 else s
            for s in (k, v)
        )
        scaled = q if abs(self.factor - 1) < 1e-9 else upcast(q) * self.factor
        mix, analog = upcast(self.mix).sigmoid()[None, None, :, None], self.analog
        fq, fk, cap = self.phi_q(q), self.phi_k(k), self.site.softcap
        return WindowedLinear(scaled, k, v, fq, fk, mix, analog.window, analog.shared, cap)

    def step_from_cache(self, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...]) -> Any:
        analog, site, f = self.analog, self.site, self.phi_k.compiled
        if f is None or self.key_repeats > 1:
            return None
        rule = WindowRule(analog.window, analog.shared, site.scaling, site.softcap)
        mix = upcast(self.mix).sigmoid()[None, None, :, None]
        keys, values, memory, age = kept
        return step_with_feature_map(
            rule,
            q,
            k,
            v,
            mix,
            LearnedFeatureMap(f, self.phi_q.W, self.phi_k.W),
            (keys, values, memory, age),
        )

    def to_cache(self, state: State) -> tuple[Tensor, ...]:
        keys, values, _, memory, age = state
        return (
            keys[:, :: self.key_repeats].contiguous(),
            values[:, :: self.key_repeats].contiguous(),
            memory,
            age,
        )

    def from_cache(self, kept: tuple[Tensor, ...], t: int) -> State:
        keys, values, memory, age = kept
        keys, values = (
            s.repeat_interleave(self.key_repeats, dim=1) if self.key_repeats > 1 else s
            for s in (keys, values)
        )
        leaving = self.phi_k(keys[:, :, :t].transpose(1, 2)).transpose(1, 2)
        features = leaving.new_zeros(*keys.shape[:3], leaving.shape[3])
        features[:, :, :t] = leaving
        return keys, values, features, memory, age
