"""What the rules have in common that are made of another rule."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from fastweights.recurrence.base import Evaluation, Recurrence, S, tensor_fields
from fastweights.recurrence.streams import lazy_property
from fastweights.shapes import Mask, Output


class Composed(Recurrence[S]):
    """A rule that is evaluated by evaluating others, in whatever way."""

    @abstractmethod
    def evaluate_with(self, evaluate: Evaluation, state: S) -> tuple[Output, Any]:
        """(o, state) by `evaluate` of the records that this one is made of."""

    def step(self, state: S) -> tuple[Output, S]:
        return self.evaluate_with(lambda rule, before: rule.step(before), state)

    def chunk(self, state: S) -> tuple[Output, S]:
        return self.evaluate_with(lambda rule, before: rule.chunk(before), state)


@dataclass(frozen=True, eq=False)
class Wrapper(Recurrence[S]):
    """A rule around an inner one, which holds the streams of both.

    Attributes:
        inner: the record whose state is scaled, signed or read in another way
    """

    inner: Recurrence

    @lazy_property
    def streams(self) -> dict[str, Tensor]:
        """The inner record's and its own."""
        return {**self.inner.streams, **tensor_fields(self)}

    @property
    def values(self) -> int:
        return self.inner.values

    def keep(self, mask: Mask) -> Self:
        return replace(self, inner=self.inner.keep(mask))

    def restart(self, starts: Mask) -> Self:
        return replace(self, inner=self.inner.restart(starts))

    @property
    def innermost(self) -> Recurrence:
        return self.inner.innermost

    @property
    def reader(self) -> Recurrence:
        return self.inner.reader

    def surviving_state(self) -> Tensor | None:
        """The inner record's: how a state is read and scaled does not change what decays."""
        return self.inner.surviving_state()

    def step_operations(self, context: int) -> int:
        return self.inner.step_operations(context)

    def chunk_operations(self, context: int, size: int) -> int:
        return self.inner.chunk_operations(context, size)
