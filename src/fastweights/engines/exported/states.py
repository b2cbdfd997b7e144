"""The states of a model as a flat list of tensors, which programs take and return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.methods import Auto, Method
from fastweights.mixer import LayerState, MixerState, SumState
from fastweights.models import FastWeightsCache, FastWeightsForCausalLM
from fastweights.models.cache_names import CACHE, cache_argument
from fastweights.models.methods import use_method
from fastweights.recurrence import NoFiniteFormError, Recurrence
from fastweights.recurrence.streams import State, state_parts


class StateTensor(NamedTuple):
    """One of the tensors that a model remembers.

    Attributes:
        meaning: which one, such as ``layers.0.mixer memory 1``
        empty: it before the first token, of one sequence
        zero: whether that is zeros
        growing: the axis along which it has one entry per token, or None
        paired: whether it is complex, and so pairs of numbers on the last axis
    """

    meaning: str
    empty: Tensor
    zero: bool = True
    growing: int | None = None
    paired: bool = False

    def zeros(self, batch: int, cached: int) -> Tensor:
        """Of so many sequences, and of this length where it grows."""
        shape = [batch, *self.empty.shape[1:]]
        if self.growing is not None:
            shape[self.growing] = cached
        return self.empty.new_zeros(shape)


@dataclass(frozen=True)
class _Noting(Method):
    """Notes the states that records start from, full windows where there are any."""

    starts: list[State] = field(default_factory=list)

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        with suppress(NoFiniteFormError):
            state = recurrence.settle(state)
        self.starts.append(state)
        return Auto().evaluate(recurrence, state)


class StateLayout(ABC):
    """Which tensors a model remembers, in the order in which its programs take them.

    The first is the position ``[b]``, how many tokens are before, which all layers share.

    Attributes:
        tensors: what they are
    """

    tensors: tuple[StateTensor, ...]

    @abstractmethod
    def arguments(self, tensors: Sequence[Tensor], tokens: int) -> dict[str, Any]:
        """What the model is called with beside ids of so many tokens behind these tensors: their
        cache, by the name `CACHE`, and whatever else it has to know.
        """

    @abstractmethod
    def after(
        self, given: Mapping[str, Any], tensors: Sequence[Tensor], tokens: int
    ) -> list[Tensor]:
        """The tensors after such a call, which was `given` what `arguments` returned."""

    @abstractmethod
    def use_method(self, method: Method) -> AbstractContextManager[None]:
        """Evaluate the model's recurrences by `method`, for the length of a block."""

    def empty(self, batch: int = 1, cached: int = 0) -> list[Tensor]:
        """Zeros, the states of so many sequences before their first token.

        Args:
            batch: the number of sequences
            cached: the length of those that grow
        """
        return [known.zeros(batch, cached) for known in self.tensors]

    def restore(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Every tensor but the position, complex where the model has complex numbers.

        One that is not zero before the first token is taken as it is then wherever the position is
        0, so that zeros are the empty state of every model.
        """
        position, *parts = tensors
        for part, state in zip(parts, self.tensors[1:], strict=True):
            yield _restored(part, state, position)


class OwnStates(StateLayout):
    """Those of a model of this library."""

    def __init__(self, model: FastWeightsForCausalLM) -> None:
        """
        Args:
            model: in evaluation mode; it reads one token
        """
        self.model = model
        noting, cache = _Noting(), FastWeightsCache()
        device = model.device
        with torch.no_grad(), use_method(model, noting):
            token = torch.zeros(1, 1, dtype=torch.long, device=device)
            model(input_ids=token, use_cache=True, **cache_argument(cache))
        self._template = cache.states
        position = torch.zeros(1, dtype=torch.long, device=device)
        found = [StateTensor("position", position)]
        for mixer, (state, start) in enumerate(
            zip(_mixer_states(cache.states), noting.starts, strict=True)
        ):
            found += _tensors_of(f"mixer {mixer}", state, start)
        self.tensors = tuple(found)

    def states(self, tensors: Sequence[Tensor]) -> tuple[LayerState, ...]:
        """The states of all layers from their tensors."""
        rest = self.restore(tensors)
        return tuple(_rebuilt(state, tensors[0], rest) for state in self._template)

    def arguments(self, tensors: Sequence[Tensor], tokens: int) -> dict[str, Any]:
        cache = FastWeightsCache()
        cache.advance(self.states(tensors), 0)
        return cache_argument(cache)

    def after(
        self, given: Mapping[str, Any], tensors: Sequence[Tensor], tokens: int
    ) -> list[Tensor]:
        return tensors_of(given[CACHE].states)

    def use_method(self, method: Method) -> AbstractContextManager[None]:
        return use_method(self.model, method)


def tensors_of(states: Sequence[LayerState]) -> list[Tensor]:
    """The tensors of all layers' states, in the order of `OwnStates`; complex ones as pairs of
    numbers, on a last axis of their own.
    """
    mixers = list(_mixer_states(states))
    parts = [part for state in mixers for part in _parts(state)]
    return [mixers[0].position, *map(_as_real, parts)]


def _mixer_states(states: Sequence[LayerState]) -> Iterator[MixerState]:
    for state in states:
        if isinstance(state, SumState):
            yield from _mixer_states(state.states)
        else:
            yield state


def _parts(state: MixerState) -> list[Tensor]:
    return [*state_parts(state.memory), *state.tails.values()]


def _tensors_of(owner: str, state: MixerState, start: State) -> Iterator[StateTensor]:
    for i, (empty, one) in enumerate(
        zip(state_parts(start), state_parts(state.memory), strict=True)
    ):
        axes = [a for a, n in enumerate(empty.shape) if n != one.shape[a]]
        meaning, zero = f"{owner}, memory {i}", not bool(empty.any())
        growing = axes[0] if axes else None
        yield StateTensor(meaning, _as_real(empty), zero, growing, empty.is_complex())
    for name, tail in state.tails.items():
        yield StateTensor(f"{owner}, inputs of {name}", torch.zeros_like(tail))


def _as_real(part: Tensor) -> Tensor:
    return torch.view_as_real(part) if part.is_complex() else part


def _restored(part: Tensor, state: StateTensor, position: Tensor) -> Tensor:
    if state.paired:
        return torch.view_as_complex(part)
    if state.zero:
        return part
    first = (position == 0).view(-1, *[1] * (part.dim() - 1))
    return torch.where(first, state.empty, part)


def _rebuilt(state: LayerState, position: Tensor, rest: Iterator[Tensor]) -> LayerState:
    if isinstance(state, SumState):
        return SumState(tuple(_rebuilt(one, position, rest) for one in state.states))
    return _rebuilt_mixer(state, position, rest)


def _rebuilt_mixer(state: MixerState, position: Tensor, rest: Iterator[Tensor]) -> MixerState:
    memory: Any = state.memory
    memory = tuple(next(rest) for _ in memory) if isinstance(memory, tuple) else next(rest)
    return MixerState(memory, {name: next(rest) for name in state.tails}, position)
