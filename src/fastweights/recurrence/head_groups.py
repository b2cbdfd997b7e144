"""Heads with rules, or sizes, of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from fastweights.recurrence.base import CHUNK, Evaluation, NoFiniteFormError, Recurrence
from fastweights.recurrence.ltv import LTV
from fastweights.recurrence.streams import (
    ShapeError,
    State,
    lazy_property,
    pack_state,
    state_parts,
)
from fastweights.recurrence.wrapper import Composed
from fastweights.shapes import Map, Mask, Output


@dataclass(frozen=True, eq=False)
class HeadGroups(Composed[State]):
    """Groups of heads side by side, each a recurrence of its own, such as windows of several
    lengths: o of head i is that of head ``order[i]`` of the groups' heads one after the other.

    The state's tensors are those of the groups, one group after the other.

    Attributes:
        groups: records of the same tokens, with values of the same width
        order: where each head is among the groups' heads

    Raises:
        ShapeError: if the groups differ in batch, tokens or values, or `order` is no order of
            their heads
    """

    groups: tuple[Recurrence, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        first, *others = ((group.shape[1], group.values) for group in self.groups)
        if any(other != first for other in others):
            raise ShapeError(
                f"HeadGroups of (tokens, values) {sorted({first, *others})}; all groups have the"
                " same tokens and values of the same width"
            )
        if sorted(self.order) != list(range(self.shape[2])):
            raise ShapeError(
                f"HeadGroups(order={self.order}) of {self.shape[2]} heads; each is named once"
            )

    @lazy_property
    def streams(self) -> dict[str, Tensor]:
        """Those of the groups, by their numbers and names."""
        return {
            f"{number}.{name}": stream
            for number, group in enumerate(self.groups)
            for name, stream in group.streams.items()
        }

    @lazy_property
    def shape(self) -> tuple[int, int, int]:
        batches, lengths, heads = zip(*(group.shape for group in self.groups), strict=True)
        return max(batches), max(lengths), sum(heads)

    @lazy_property
    def output(self) -> torch.dtype:
        return self.groups[0].output

    @property
    def values(self) -> int:
        return self.groups[0].values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for group in self.groups for shape in group.state_shapes)

    def initial_state(self) -> State:
        return _joined(group.initial_state() for group in self.groups)

    def settle(self, state: State) -> State:
        parts = zip(self.groups, self.states_of(state), strict=True)
        return _joined(group.settle(part) for group, part in parts)

    def states_of(self, state: State) -> list[State]:
        """The groups' states in the state of all."""
        parts = state_parts(state)
        ends = accumulate((len(group.state_shapes) for group in self.groups), initial=0)
        return [pack_state(parts[start:end]) for start, end in pairwise(ends)]

    def adopt(self, state: State) -> State:
        parts = state_parts(state)
        if len(parts) != len(self.state_shapes):
            raise ShapeError(
                f"HeadGroups here has {len(self.state_shapes)} tensors in its state, got"
                f" {len(parts)}"
            )
        pairs = zip(self.groups, self.states_of(state), strict=True)
        return _joined(group.adopt(part) for group, part in pairs)

    def evaluate_with(self, evaluate: Evaluation, state: State) -> tuple[Output, State]:
        """(o, state) from the groups."""
        pairs = zip(self.groups, self.states_of(state), strict=True)
        outputs, states = zip(*(evaluate(group, part) for group, part in pairs), strict=True)
        return self._in_order(outputs, 2), _joined(states)

    def attention_map(self) -> Map:
        return self._in_order([group.attention_map() for group in self.groups], 1)

    def ltv(self) -> LTV:
        raise NoFiniteFormError(
            "a HeadGroups has a linear system for each group; take that of its groups, one by one"
        )

    def keep(self, mask: Mask) -> Self:
        return self.map_groups(lambda group: group.keep(mask))

    def restart(self, starts: Mask) -> Self:
        return self.map_groups(lambda group: group.restart(starts))

    def __getitem__(self, span: slice) -> Self:
        return self.map_groups(lambda group: group[span])

    def split(self, size: int = CHUNK) -> Iterator[Self]:
        for pieces in zip(*(group.split(size) for group in self.groups), strict=True):
            yield replace(self, groups=pieces)

    def map_streams(self, f: Callable[[Tensor], Tensor]) -> Self:
        return self.map_groups(lambda group: group.map_streams(f))

    def map_written(self, f: Callable[[Tensor], Tensor]) -> Self:
        return self.map_groups(lambda group: group.map_written(f))

    def state_size(self, context: int) -> int:
        return sum(group.state_size(context) for group in self.groups)

    def step_operations(self, context: int) -> int:
        return sum(group.step_operations(context) for group in self.groups)

    def chunk_operations(self, context: int, size: int) -> int:
        return sum(group.chunk_operations(context, size) for group in self.groups)

    def by_heads(self) -> tuple[Recurrence, ...]:
        return self.groups

    def map_groups(self, f: Callable[[Any], Recurrence]) -> Self:
        return replace(self, groups=tuple(map(f, self.groups)))

    def _in_order(self, by_group: Sequence[Tensor], axis: int) -> Tensor:
        joined = torch.cat(list(by_group), axis)
        order = torch.tensor(self.order, device=joined.device)
        return joined.index_select(axis, order)


def _joined(states: Any) -> State:
    return pack_state([part for state in states for part in state_parts(state)])
