"""The general rule that writes and erases: a diagonal plus a low rank, with keys of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.recurrence.base import decay_factors, expand_time
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.matrix import MatrixRule
from fastweights.recurrence.products import decay_products
from fastweights.recurrence.streams import heads_first, mask_stream, require_width
from fastweights.recurrence.transition import RankOneTransition
from fastweights.shapes import Keys, LogDecay, Map, Mask, Output, Values


@dataclass(frozen=True, eq=False)
class DPLR(MatrixRule[Tensor]):
    """Diagonal plus low rank: what one key reads is erased along another, beside what is written.

    S_t = diag(α_t) S_{t-1} + w_tᵀ v_t - b_tᵀ (a_t X_t) ;  o_t = q_t S_t

    X_t = diag(α_t) S_{t-1}, or S_{t-1} if `before`. `Delta` is its case w = b = βk, a = k. Others:

    - GDN-2 (2605.22791): w = b = k, a = β ⊙ k, v gated;
    - Comba (2506.02475): w = b = βk, a = d k, and a query q - D a;
    - PGDN (2604.21100): w = b = β (k ⊙ M), a = k;
    - RWKV-7 (2503.14456): w = k, a = κ̂, b = κ̂ ⊙ η, `before`;
    - fla's DPLR and IPLR (Gated DeltaNet, 2412.06464, and after): all free, `before`.

    The state is ``[b h k v]``; it stays bounded where diag(α) - bᵀ a has a norm of at most 1.

    Attributes:
        q: ``[b t h k]``
        w: ``[b t h k]``, what v is written under
        v: ``[b t h v]``
        a: ``[b t h k]``, what reads the state for what is erased
        b: ``[b t h k]``, what that is erased along; None for w, which takes less time
        log_decay: log α_t ≤ 0: None, ``[b t h 1]`` or ``[b t h k]``; −inf empties the state
        before: whether a reads the state before it decays
    """

    writes: ClassVar[tuple[str, ...]] = ("w", "b")

    q: Keys
    w: Keys
    v: Values
    a: Keys
    b: Keys | None
    log_decay: LogDecay | None = None
    before: bool = False

    def __post_init__(self) -> None:
        _ = self.shape
        width = self.q.shape[-1]
        for name in ("w", "a", "b"):
            require_width(name, self.streams.get(name), width)
        require_width("log_decay", self.log_decay, 1, width)

    @property
    def reads_undecayed(self) -> bool:
        """Whether it matters that a reads before the decay: there is one."""
        return self.before and self.log_decay is not None

    def step(self, state: Tensor) -> tuple[Output, Tensor]:
        q, w, v, a = (heads_first(s, state.dtype) for s in (self.q, self.w, self.v, self.a))
        b = w if self.b is None else heads_first(self.b, state.dtype)
        decayed = state
        if self.log_decay is not None:
            decayed = heads_first(self.log_decay, state.dtype).exp().mT * state
        erased = a @ (state if self.before else decayed)
        if self.b is None:
            state = decayed + w.mT * (v - erased)
        else:
            state = decayed + w.mT * v - b.mT * erased
        return (q @ state).transpose(1, 2).to(self.output), state

    def chunk(self, state: Tensor) -> tuple[Output, Tensor]:
        """The rule is `Decay` that writes v under w and -r under b, where the erased r_t = a_t X_t
        solves a unit lower triangular system: (I + strict P(a, b)) r = ã S_0 + strict P(a, w) v.
        Where b = w, all that is written is u = v - r: (I + strict P(a, w)) u = v - ã S_0.
        """
        p, (b, _, h) = self._products(), self.shape
        values = expand_time(self, self.v).expand(b, h, -1, -1)
        written = self._written(p, values, p.erasing @ state)
        o = self._sum(p.reading @ written) + p.query @ state
        kept = state if p.carry is None else p.carry * state
        return o.transpose(1, 2).to(self.output), kept + self._sum(p.keys.mT @ written)

    def attention_map(self) -> Map:
        b, t, h = self.shape
        p = self._products()
        # for unit values, column s is all that v_s leads to be written
        identity = torch.eye(t, dtype=self.accumulator, device=self.device).expand(b, h, t, t)
        return self._sum(p.reading @ self._written(p, identity, torch.zeros_like(identity)))

    def _sum(self, parts: Tensor) -> Tensor:
        """Over the keys."""
        return parts[0] if self.b is None else parts.sum(0)

    def _products(self) -> _ErasingProducts:
        b, t, h = self.shape
        named = (self.q, self.a, self.w, *([] if self.b is None else [self.b]))
        q, a, *keys = (expand_time(self, s).expand(b, h, t, -1) for s in named)
        log_decay = None if self.log_decay is None else expand_time(self, self.log_decay)
        # what reads before the decay reads one token earlier
        earlier = a.roll(-1, -2) if self.reads_undecayed else a
        # queries [2 …] with keys [n 1 …]: inner[i] is P(q, key i) and P(a, key i)
        inner, query, key, carry = decay_products(
            torch.stack([q, earlier]), torch.stack(keys)[:, None], log_decay
        )
        erased, erasing = inner[:, 1].tril(-1), query[1]
        if self.reads_undecayed:
            # back to its own row; the first token reads S_0 as it is
            erased = F.pad(inner[:, 1, ..., :-1, :], (0, 0, 1, 0))
            erasing = torch.cat([a[..., :1, :], erasing[..., :-1, :]], -2)
        return _ErasingProducts(inner[:, 0], erased, query[0], erasing, key[:, 0], carry)

    def _written(self, p: _ErasingProducts, values: Tensor, read: Tensor) -> Tensor:
        """What is written under each key, of `values` and what a has `read` of S_0."""
        if self.b is None:
            return _solve(p.erased[0], values - read)[None]
        # under b stands -r
        by_w, by_b = p.erased
        return torch.stack([values, _solve(by_b, -(read + by_w @ values))])

    def ltv(self) -> LTV:
        q, w, a = (s.to(self.accumulator).expand(*self.shape, -1) for s in (self.q, self.w, self.a))
        b = w if self.b is None else self.b.to(self.accumulator).expand(*self.shape, -1)
        decay = decay_factors(self, self.log_decay)
        reading = a if self.before else a * decay
        return LTV(A=RankOneTransition(decay, reading, b), B=w, C=q)

    def restart(self, starts: Mask) -> Self:
        rule = super().restart(starts)
        # what reads before the decay would read the document before
        return replace(rule, a=mask_stream(rule.a, ~starts)) if self.before else rule

    def with_signs(self, signs: Tensor) -> Self:
        rule = super().with_signs(signs)
        if not self.before:
            return rule
        # a reads the state of the token before, whose sign differs by that of α_t
        turned = signs * F.pad(signs[:, :-1], (0, 0, 0, 0, 1, 0), value=1.0)
        return replace(rule, a=turned * rule.a)

    def step_operations(self, context: int) -> int:
        """As `Decay`'s, 2 for reading what is erased, 2 for erasing it along a key of its own."""
        del context
        h, k, v = self.operation_sizes
        return h * k * v * (6 + 2 * (self.b is not None) + (self.log_decay is not None))

    def chunk_operations(self, context: int, size: int) -> int:
        del context
        h, k, v = self.operation_sizes
        if self.b is None:
            return h * (size * (4 * k + 3 * v) + 6 * k * v)
        return h * (size * (8 * k + 7 * v) + 8 * k * v)


class _ErasingProducts(NamedTuple):
    """What a chunk needs of its queries, of the n keys that write (w, and b where it is another)
    and of its decays.

    Attributes:
        reading: ``[n b h t s]``, what q_t finds of what a key wrote at s ≤ t
        erased: ``[n b h t s]``, what a_t finds of it, s < t
        query, erasing: ``[b h t k]``, q and a as they read the state before the chunk
        keys: ``[n b h t k]``, the keys as they are left in the state after the chunk
        carry: ``[b h k 1]``, what is left of the state before the chunk; None without decay
    """

    reading: Tensor
    erased: Tensor
    query: Tensor
    erasing: Tensor
    keys: Tensor
    carry: Tensor | None


def _solve(system: Tensor, wanted: Tensor) -> Tensor:
    """x with (I + system) x = wanted, for a system strictly below the diagonal."""
    return torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
