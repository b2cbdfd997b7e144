"""A sequence's state in a layer as a page of bytes, which is what an engine keeps for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fastweights.mixer import MixerState
from fastweights.recurrence import State
from fastweights.recurrence.streams import state_parts

ALIGNMENT = 64
"""Every part of a page, and every page, begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class PagePart:
    """A tensor in a page.

    Attributes:
        shape: That of one sequence, without the batch.
        dtype: Its dtype.
        begin: The byte of the page where it begins.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, pages: Tensor) -> Tensor:
        """The tensors ``[n …]`` in ``pages [n bytes]``, where they lie."""
        part = pages[:, self.begin : self.begin + self.nbytes].view(self.dtype)
        return part.unflatten(1, self.shape) if self.shape else part[:, 0]


@dataclass(frozen=True)
class PageLayout:
    """Where the tensors of a state stand in a page.

    Attributes:
        parts: One for each tensor, in their order.
    """

    parts: tuple[PagePart, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PageLayout:
        """For tensors ``[b …]`` of these shapes and dtypes; they may be on the meta device."""
        parts: list[PagePart] = []
        begin = 0
        for tensor in tensors:
            parts.append(PagePart(tuple(tensor.shape[1:]), tensor.dtype, begin))
            begin = _aligned(begin + parts[-1].nbytes)
        return cls(tuple(parts))

    @property
    def nbytes(self) -> int:
        """The bytes of a page."""
        return _aligned(self.parts[-1].begin + self.parts[-1].nbytes) if self.parts else 0

    def of_pages(self, pages: Tensor) -> tuple[Tensor, ...]:
        """The tensors ``[n …]`` of all pages ``[n bytes]``, where they lie."""
        return tuple(part.of(pages) for part in self.parts)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class StateForm:
    """What a `MixerState` is made of, beside the numbers.

    Attributes:
        memory: How many tensors its memory is; None for one that stands alone.
        tails: The names of its convolutions.
    """

    memory: int | None
    tails: tuple[str, ...]

    @classmethod
    def of(cls, state: MixerState) -> StateForm:
        """That of `state`."""
        memory = len(state.memory) if isinstance(state.memory, tuple) else None
        return cls(memory, tuple(state.tails))

    @property
    def parts(self) -> int:
        """How many tensors its memory is, alone or not: the first of a page."""
        return 1 if self.memory is None else self.memory

    def tensors(self, state: MixerState) -> list[Tensor]:
        """The tensors of a state of this form."""
        tails = (state.tails[name] for name in self.tails)
        return [*state_parts(state.memory), *tails, state.position]

    def state(self, tensors: Sequence[Tensor]) -> MixerState:
        """The state of these tensors."""
        *tails, position = tensors[self.parts :]
        named = dict(zip(self.tails, tails, strict=True))
        return MixerState(self.memory_of(tensors[: self.parts]), named, position)

    def memory_of(self, tensors: Sequence[Tensor]) -> State:
        """The memory of its tensors."""
        return tensors[0] if self.memory is None else tuple(tensors)
