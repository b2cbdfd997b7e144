"""What some tokens do to whatever state is before them: all that later tokens need to know of them.

An effect is as large as a state and a transition, however many tokens it is of. It is what travels
between processes that hold slices of one sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from fastweights.recurrence.streams import State, pack_state, state_parts

S = TypeVar("S")


def tensors_mapped_by(map: Callable[[Callable[[Tensor], Tensor]], object]) -> list[Tensor]:
    """The tensors that a function applies its argument to, in its order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map(note)
    return found


@dataclass(frozen=True, eq=False)
class Effect(ABC, Generic[S]):
    """A map from the state before some tokens to the one after them.

    A subclass is a frozen dataclass of tensors, tuples of them and effects, whose shapes do not
    depend on the number of tokens.
    """

    @abstractmethod
    def after(self, state: S) -> S:
        """The state after the tokens, from the one before them."""

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        """`f` of every tensor, always in the same order."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            part = getattr(self, field.name)
            if isinstance(part, Tensor):
                changed[field.name] = f(part)
            elif isinstance(part, tuple):
                changed[field.name] = tuple(map(f, part))
            elif isinstance(part, Effect):
                changed[field.name] = part.map(f)
        return replace(self, **changed)

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of `map`."""
        return tensors_mapped_by(self.map)


@dataclass(frozen=True, eq=False)
class DiagonalEffect(Effect[Tensor]):
    """S ↦ diag(kept) S + added.

    Attributes:
        kept: the product of the decays, ``[b h k 1]`` or with axes of length 1
        added: the state after the tokens from the empty one, ``[b h k v]``
    """

    kept: Tensor
    added: Tensor

    def after(self, state: Tensor) -> Tensor:
        return self.kept * state + self.added


@dataclass(frozen=True, eq=False)
class DenseEffect(Effect[Tensor]):
    """S ↦ M S + E.

    Attributes:
        transition: M, the product of the tokens' transitions, ``[b h k k]``
        added: E, the state after the tokens from the empty one, ``[b h k v]``
    """

    transition: Tensor
    added: Tensor

    def after(self, state: Tensor) -> Tensor:
        return self.transition @ state + self.added


@dataclass(frozen=True, eq=False)
class JointEffect(Effect[tuple[Tensor, Tensor]]):
    """On two matrices under the same decays.

    Attributes:
        wide: on both beside each other, ``[b h k v+w]``
    """

    wide: Effect[Tensor]

    def after(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        together, width = self.wide.after(torch.cat(state, -1)), state[0].shape[-1]
        return together[..., :width], together[..., width:]


@dataclass(frozen=True, eq=False)
class SignedEffect(Effect[State]):
    """An effect, then a sign.

    Attributes:
        inner: of the tokens with decays above 0
        sign: the product of the decays' signs, ``[b h 1 1]``
    """

    inner: Effect[Any]
    sign: Tensor

    def after(self, state: State) -> State:
        parts = state_parts(self.inner.after(state))
        return pack_state([self.sign * part for part in parts])


class Neighbours(ABC):
    """The processes that hold the same sequences, each its slice of time, as one of them sees it.

    Attributes:
        index: the number of this process, from 0 for the one that holds the first tokens
        count: the number of processes
    """

    index: int
    count: int

    @abstractmethod
    def carry(self, effect: Effect[S], state: S) -> tuple[S, S]:
        """The states before this process's tokens and after those of all processes.

        Every process calls it at the same place, with an effect of the same form.

        Args:
            effect: of this process's tokens
            state: before the first process's tokens, known to every process
        """
