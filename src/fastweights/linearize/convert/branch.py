"""What takes softmax's place in a layer: a module of its own, from the layer's q, k, v to a
recurrence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastweights.kernels.native.windowed import Learned, Window, learned_step
from fastweights.layers import precise
from fastweights.linearize.convert.cache import StateLayer
from fastweights.linearize.convert.sites import Site
from fastweights.methods import evaluate
from fastweights.recurrence import Recurrence, State, WindowedLinear
from fastweights.recurrence.base import one_or_all, without_autocast
from fastweights.shapes import Mask, Output, Segments

if TYPE_CHECKING:
    from fastweights.linearize.convert.analog import Analog

START = -2.1972
"""m of γ = σ(m): γ = 0.1 (LoLCATs)."""


class LinearBranch(nn.Module, ABC):
    """q, k, v of one attention → its linear counterpart; owns all the new parameters, and uses them
    only in here.
    """

    def __init__(self, site: Site, analog: Analog) -> None:
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
        with without_autocast(q.device):
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
        altered: Callable[[Recurrence], Recurrence] | None = None,
    ) -> Output:
        """o ``[b t h v]`` in v's dtype of the recurrence, or of what `altered` makes of it;
        continues from `memory`, and advances it.
        """
        plain = keep is None and segments is None and altered is None
        if plain and memory is not None and memory.state is not None:
            found = self.stepped(q, k, v, memory.state)
            if found is not None:
                o, memory.state = found
                return o.to(v.dtype)
        record = self.record(q, k, v, keep, segments)
        record = record if altered is None else altered(record)
        if memory is None:
            o, _ = evaluate(record)
            return self.read(o).to(v.dtype)
        before = None if memory.state is None else self.unpacked(memory.state, len(record))
        o, state = evaluate(record, before)
        memory.state = self.packed(state)
        return self.read(o).to(v.dtype)

    def stepped(
        self, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Output, tuple[Tensor, ...]] | None:
        """(o, what the cache keeps then) where there is a shorter way than by the record, which
        agrees.
        """
        return None

    def read(self, o: Output) -> Output:
        """What the layer makes of the recurrence's output."""
        return o

    def packed(self, state: State) -> tuple[Tensor, ...]:
        """What the cache keeps of a recurrence's state."""
        return state if isinstance(state, tuple) else (state,)

    def unpacked(self, kept: tuple[Tensor, ...], t: int) -> State:
        """The state again, for `t` more tokens."""
        return one_or_all(list(kept))


class WindowedBranch(LinearBranch):
    """LoLCATs: `WindowedLinear` with learnt φ and γ.

    The cache keeps the last w - 1 keys and values of the key heads as they are, and (S ‖ z) in
    float32. φ of a cached key is computed when the key leaves the window.
    """

    def __init__(self, site: Site, analog: Analog) -> None:
        super().__init__(site, analog)
        self.served = site.heads // site.kv_heads if analog.per_query_head else 1
        self.factor = site.scaling * site.head_dim**0.5
        self.phi_q = analog.phi(site.heads, site.head_dim, analog.columns(site))
        self.phi_k = analog.phi(site.kv_heads * self.served, site.head_dim, analog.columns(site))
        self.mix = nn.Parameter(torch.empty(site.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.phi_q.reset_parameters()
        self.phi_k.reset_parameters()
        nn.init.constant_(self.mix, START)

    def project(self, q: Tensor, k: Tensor, v: Tensor) -> WindowedLinear:
        k, v = (s.repeat_interleave(self.served, dim=2) if self.served > 1 else s for s in (k, v))
        scaled = q if abs(self.factor - 1) < 1e-9 else precise(q) * self.factor
        mix, analog = precise(self.mix).sigmoid()[None, None, :, None], self.analog
        fq, fk, cap = self.phi_q(q), self.phi_k(k), self.site.softcap
        return WindowedLinear(scaled, k, v, fq, fk, mix, analog.window, analog.shared, cap)

    def stepped(self, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, ...]) -> Any:
        analog, site, f = self.analog, self.site, self.phi_k.compiled
        if f is None or self.served > 1:
            return None
        rule = Window(analog.window, analog.shared, site.scaling, site.softcap)
        mix = precise(self.mix).sigmoid()[None, None, :, None]
        keys, values, memory, age = kept
        return learned_step(
            rule, q, k, v, mix, Learned(f, self.phi_q.W, self.phi_k.W), (keys, values, memory, age)
        )

    def packed(self, state: State) -> tuple[Tensor, ...]:
        keys, values, _, memory, age = state
        return (
            keys[:, :: self.served].contiguous(),
            values[:, :: self.served].contiguous(),
            memory,
            age,
        )

    def unpacked(self, kept: tuple[Tensor, ...], t: int) -> State:
        keys, values, memory, age = kept
        keys, values = (
            s.repeat_interleave(self.served, dim=1) if self.served > 1 else s
            for s in (keys, values)
        )
        leaving = self.phi_k(keys[:, :, :t].transpose(1, 2)).transpose(1, 2)
        features = leaving.new_zeros(*keys.shape[:3], leaving.shape[3])
        features[:, :, :t] = leaving
        return keys, values, features, memory, age
