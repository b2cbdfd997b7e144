"""What takes softmax's place in a layer: a module of its own, from the layer's q, k, v to a
recurrence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastweights.layers import upcast
from fastweights.linearize.convert.cache import StateLayer
from fastweights.linearize.convert.sites import AttentionLayer
from fastweights.methods import evaluate
from fastweights.recurrence import Recurrence, State, WindowedLinear
from fastweights.recurrence.mapped import Mapped
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
        record = self.record(q, k, v, keep, segments)
        record = record if replacement is None else replacement(record)
        if memory is None:
            o, _ = evaluate(record)
            return self.read(o).to(v.dtype)
        before = None if memory.state is None else self.from_cache(memory.state)
        o, state = evaluate(record, before)
        memory.state = self.to_cache(state)
        return self.read(o).to(v.dtype)

    def read(self, o: Output) -> Output:
        """What the layer makes of the recurrence's output."""
        return o

    def to_cache(self, state: State) -> tuple[Tensor, ...]:
        """What the cache keeps of a recurrence's state."""
        return state if isinstance(state, tuple) else (state,)

    def from_cache(self, kept: tuple[Tensor, ...]) -> State:
        """The state again."""
        return pack_state(list(kept))


class WindowedBranch(LinearBranch):
    """LoLCATs: `WindowedLinear` with learnt φ and γ.

    The cache keeps the last w - 1 keys and values of the key heads as they are, and (S ‖ z) in
    float32. φ of a cached key is computed when the key leaves the window: `Mapped`.
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
        mix, analog = upcast(self.mix).sigmoid().view(1, 1, -1, 1), self.analog
        fq, fk = Mapped(self.phi_q, q), Mapped(self.phi_k, k)
        window, shared, cap = analog.window, analog.shared, self.site.softcap
        return WindowedLinear(scaled, k, v, fq, fk, mix, window, shared, cap)

    def to_cache(self, state: State) -> tuple[Tensor, ...]:
        keys, values, _, memory, age = state
        if self.key_repeats > 1:
            keys, values = (s[:, :: self.key_repeats].contiguous() for s in (keys, values))
        return keys, values, memory, age

    def from_cache(self, kept: tuple[Tensor, ...]) -> State:
        keys, values, memory, age = kept
        if self.key_repeats > 1:
            keys, values = (s.repeat_interleave(self.key_repeats, dim=1) for s in (keys, values))
        return keys, values, keys[..., :0], memory, age
