"""Transitions of a linear time-varying system: what it does to its state at every token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.shapes import Keys, PerToken


@dataclass(frozen=True, eq=False)
class Transition(ABC):
    """The matrices A_t ``[b t h k k]`` of every token, stored as compactly as their structure
    allows."""

    @property
    @abstractmethod
    def width(self) -> int:
        """k, the number of rows of the state."""

    @abstractmethod
    def apply(self, states: Tensor) -> Tensor:
        """Return A_t S_t for ``states [b t h k v]``."""

    @abstractmethod
    def apply_adjoint(self, states: Tensor) -> Tensor:
        """Return A_tᴴ S_t for ``states [b t h k v]``, as gradients propagate."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues ``[b t h k]``, without the zeros of rows that only delay."""

    def __getitem__(self, span: slice) -> Self:
        """Return the transitions of the tokens in `span`."""
        return self._map(lambda part: part[:, span])

    def heads(self, chosen: list[int]) -> Self:
        """Return the transitions of the `chosen` heads."""
        return self._map(lambda part: part if part.shape[2] == 1 else part[:, :, chosen])

    def _map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The transitions with `f` of every tensor."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            part = getattr(self, field.name)
            if isinstance(part, Tensor):
                changed[field.name] = f(part)
            elif isinstance(part, Transition):
                changed[field.name] = part._map(f)
        return replace(self, **changed)

    def dense(self) -> Tensor:
        """Return the matrices ``[b t h k k]``."""
        like: Tensor = getattr(self, fields(self)[0].name)
        return self.apply(torch.eye(self.width, dtype=like.dtype, device=like.device))

    def after(self, earlier: Transition) -> Transition:
        """Return A_t A'_t, token by token."""
        return DenseTransition(self.apply(earlier.dense()))

    def extend(self, extra: int) -> Transition:
        """Append `extra` rows whose decay is 0."""
        return DenseTransition(self.dense()).extend(extra)


@dataclass(frozen=True, eq=False)
class DiagonalTransition(Transition):
    """diag(α_t) with ``decay [b t h k]``, or ``[b t h 1]``: a number per head times the identity.

    Attributes:
        decay: α_t.
        size: Number of rows of the state.
    """

    decay: Tensor
    size: int

    @property
    def width(self) -> int:
        return self.size

    @property
    def scalar(self) -> bool:
        return self.decay.shape[-1] == 1 and self.size > 1

    def times(self, factor: PerToken) -> Self:
        """Return the transitions times a number per token and head."""
        return replace(self, decay=factor * self.decay)

    def apply(self, states: Tensor) -> Tensor:
        return self.decay[..., None] * states

    def apply_adjoint(self, states: Tensor) -> Tensor:
        return self.decay.conj()[..., None] * states

    def dense(self) -> Tensor:
        return torch.diag_embed(self._expand())

    def eigenvalues(self) -> Tensor:
        return self._expand()

    def after(self, earlier: Transition) -> Transition:
        if isinstance(earlier, DiagonalTransition):
            return replace(self, decay=self.decay * earlier.decay)
        return super().after(earlier)

    def extend(self, extra: int) -> Transition:
        return replace(self, decay=F.pad(self._expand(), (0, extra)), size=self.size + extra)

    def _expand(self) -> Tensor:
        return self.decay.expand(*self.decay.shape[:-1], self.size)


@dataclass(frozen=True, eq=False)
class ErasingTransition(Transition):
    """(I - β_t k_tᵀ k_t) diag(α_t), the identity plus a rank-one term (DeltaNet), with real
    streams.

    Attributes:
        decay: α_t, ``[b t h 1|k]``.
        k: Keys ``[b t h k]``.
        beta: β_t, ``[b t h 1]``.
    """

    decay: Tensor
    k: Keys
    beta: PerToken

    @property
    def width(self) -> int:
        return self.k.shape[-1]

    def times(self, factor: PerToken) -> Self:
        """Return the transitions times a number per token and head."""
        return replace(self, decay=factor * self.decay)

    def apply(self, states: Tensor) -> Tensor:
        return self._erase(self.decay[..., None] * states)

    def apply_adjoint(self, states: Tensor) -> Tensor:
        return self.decay[..., None] * self._erase(states)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues.

        They are those of the similar symmetric matrix |α|^½ (I - β kᵀk) |α|^½ times the sign that
        all decays share; under one decay, α and once α (1 - β ‖k‖²).
        """
        if self.decay.shape[-1] == 1:
            kept = 1 - self.beta * self.k.square().sum(-1, keepdim=True)
            return self.decay * torch.cat([kept, torch.ones_like(self.k[..., 1:])], -1)
        decay, sign = self.decay.abs(), torch.where((self.decay < 0).any(-1, keepdim=True), -1, 1)
        scaled = decay.sqrt() * self.k
        erased = self.beta[..., None] * scaled[..., :, None] * scaled[..., None, :]
        return sign * torch.linalg.eigvalsh(torch.diag_embed(decay) - erased)

    def extend(self, extra: int) -> Transition:
        decay = self.decay.expand_as(self.k)
        return replace(self, decay=F.pad(decay, (0, extra)), k=F.pad(self.k, (0, extra)))

    def _erase(self, states: Tensor) -> Tensor:
        return states - (self.beta * self.k)[..., :, None] * (self.k[..., None, :] @ states)


@dataclass(frozen=True, eq=False)
class RankOneTransition(Transition):
    """diag(α_t) - b_tᵀ a_t, a diagonal less a rank-one term (`DPLR`), with real streams.

    Attributes:
        decay: α_t, ``[b t h 1|k]``.
        a: What reads the state that α_t multiplies, ``[b t h k]``.
        b: What that is erased along, ``[b t h k]``.
    """

    decay: Tensor
    a: Keys
    b: Keys

    @property
    def width(self) -> int:
        return self.a.shape[-1]

    def times(self, factor: PerToken) -> Self:
        """Return the transitions times a number per token and head."""
        return replace(self, decay=factor * self.decay, a=factor * self.a)

    def apply(self, states: Tensor) -> Tensor:
        erased = self.b[..., :, None] * (self.a[..., None, :] @ states)
        return self.decay[..., None] * states - erased

    def apply_adjoint(self, states: Tensor) -> Tensor:
        erased = self.a[..., :, None] * (self.b[..., None, :] @ states)
        return self.decay[..., None] * states - erased

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues: under one decay, α and once α - a·b; else those of the
        matrices, which may be complex."""
        if self.decay.shape[-1] > 1:
            return torch.linalg.eigvals(self.dense())
        kept = self.decay - (self.a * self.b).sum(-1, keepdim=True)
        return torch.cat([kept, self.decay.expand_as(self.a)[..., 1:]], -1)

    def extend(self, extra: int) -> Transition:
        decay, a, b = (F.pad(s, (0, extra)) for s in (self.decay.expand_as(self.a), self.a, self.b))
        return replace(self, decay=decay, a=a, b=b)


@dataclass(frozen=True, eq=False)
class DelayedTransition(Transition):
    """[diag(α_t) 0; I 0]: a diagonal transition of k/2 rows, followed by its state one token ago.

    Attributes:
        decay: α_t, ``[b t h 1|k/2]``, any number, resets (0) included.
        size: k.
    """

    decay: Tensor
    size: int

    @property
    def width(self) -> int:
        return self.size

    def apply(self, states: Tensor) -> Tensor:
        now, _ = states.chunk(2, -2)
        return torch.cat(
            [self.decay[..., None] * now, now.expand(*self.decay.shape[:3], -1, -1)], -2
        )

    def apply_adjoint(self, states: Tensor) -> Tensor:
        now, before = states.chunk(2, -2)
        read = self.decay.conj()[..., None] * now + before
        return torch.cat([read, torch.zeros_like(read)], -2)

    def eigenvalues(self) -> Tensor:
        return self.decay.expand(*self.decay.shape[:-1], self.size // 2)


@dataclass(frozen=True, eq=False)
class ShiftRegister(Transition):
    """A shift register of `slots` rows, whose last row is added to the f rows below, along its
    features (LoLCATs).

    Attributes:
        leaving: ``[b t h f]``, the features of what leaves at each token.
        slots: Number of rows of the register.
        moves: ``[b t 1 1]`` bool, False leaves the state as it is (padding).
        lasts: ``[b t 1 1]`` bool, False empties it (a new document).
        below: What happens to the rows below besides, f of them.
        held: Number of rows above the register, which stay.
    """

    leaving: Tensor
    slots: int
    moves: Tensor
    lasts: Tensor
    below: Transition
    held: int = 0

    @property
    def width(self) -> int:
        return self.held + self.slots + self.below.width

    def apply(self, states: Tensor) -> Tensor:
        held, slots, memory = self._rows(states)
        # the last row goes on into S, all others move by one, and the first is free for B
        memory = self.below.apply(memory) + self.leaving[..., None] * _last_row(slots)
        slots = torch.cat([torch.zeros_like(slots[..., :1, :]), slots[..., :-1, :]], -2)
        return self._apply_masks((held, slots, memory), states)

    def apply_adjoint(self, states: Tensor) -> Tensor:
        held, slots, memory = self._rows(states)
        # rows move back, and the last one reads S along the features that it was added by
        read = (self.leaving.conj()[..., None] * memory).sum(-2, keepdim=True)
        slots = torch.cat([slots[..., 1:, :].expand(*read.shape[:-2], -1, -1), read], -2)
        memory = self.below.apply_adjoint(memory)
        return self._apply_masks((held, slots[..., : self.slots, :], memory), states)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of the rows that stay and of those below, without the register's
        zeros."""
        lasts, below = self.lasts.to(self.leaving.dtype), self.below.eigenvalues()
        held = lasts.expand(*below.shape[:-1], self.held)
        return torch.cat([held, below * lasts], -1).expand(*self.leaving.shape[:-1], -1)

    def _rows(self, states: Tensor) -> tuple[Tensor, ...]:
        return states.split([self.held, self.slots, self.below.width], -2)

    def _apply_masks(self, rows: tuple[Tensor, ...], states: Tensor) -> Tensor:
        heads = self.leaving.shape[:-1]
        moved = torch.cat([part.expand(*heads, *part.shape[-2:]) for part in rows], -2)
        return torch.where(self.moves[..., None], moved, states) * self.lasts[..., None]


def _last_row(rows: Tensor) -> Tensor:
    """``[… 1 v]``, zeros if there are no rows."""
    return rows[..., -1:, :].sum(-2, keepdim=True)


@dataclass(frozen=True, eq=False)
class DenseTransition(Transition):
    """Any ``matrix [b t h k k]``, such as products of several `RankOneTransition`s."""

    matrix: Tensor

    @property
    def width(self) -> int:
        return self.matrix.shape[-1]

    def apply(self, states: Tensor) -> Tensor:
        return self.matrix @ states

    def apply_adjoint(self, states: Tensor) -> Tensor:
        return self.matrix.mH @ states

    def dense(self) -> Tensor:
        return self.matrix

    def eigenvalues(self) -> Tensor:
        return torch.linalg.eigvals(self.matrix)

    def extend(self, extra: int) -> Transition:
        return replace(self, matrix=F.pad(self.matrix, (0, extra, 0, extra)))
