"""A sequence's state in a layer as a page of bytes, which is what an engine keeps for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fastweights.mixer import MixerState

ALIGNMENT = 64
"""Every part of a page, and every page, begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class Part:
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

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PageLayout:
        """For tensors ``[b …]`` of these shapes and dtypes; they may be on the meta device."""
        parts: list[Part] = []
        begin = 0
        for tensor in tensors:
            parts.append(Part(tuple(tensor.shape[1:]), tensor.dtype, begin))
            begin = _aligned(begin + parts[-1].nbytes)
        return cls(tuple(parts))

    @property
    def nbytes(self) -> int:
        """The bytes of a page."""
        return _aligned(self.parts[-1].begin + self.parts[-1].nbytes) if self.parts else 0

    def load(self, pages: Tensor, slots: Tensor) -> list[Tensor]:
        """The tensors ``[n …]`` of the pages with these numbers ``[n]``, copied."""
        return [part.of(pages)[slots] for part in self.parts]

    def store(self, pages: Tensor, slots: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write tensors ``[n …]`` to the pages with these numbers ``[n]``."""
        for part, tensor in zip(self.parts, tensors, strict=True):
            part.of(pages)[slots] = tensor.to(part.dtype)


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

    def tensors(self, state: MixerState) -> list[Tensor]:
        """The tensors of a state of this form."""
        memory = state.memory if isinstance(state.memory, tuple) else (state.memory,)
        return [*memory, *(state.tails[name] for name in self.tails), state.position]

    def state(self, tensors: Sequence[Tensor]) -> MixerState:
        """The state of these tensors."""
        rest: Iterator[Tensor] = iter(tensors)
        memory = tuple(next(rest) for _ in range(1 if self.memory is None else self.memory))
        tails = {name: next(rest) for name in self.tails}
        return MixerState(memory[0] if self.memory is None else memory, tails, next(rest))
