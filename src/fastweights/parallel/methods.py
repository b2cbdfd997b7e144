"""Methods of evaluation for sequences that several processes hold together."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastweights.methods import Auto, Method
from fastweights.parallel.exchange import exchange, gather, tie
from fastweights.parallel.slices import Slices
from fastweights.recurrence import NoFiniteFormError, Recurrence, ShapeError, State
from fastweights.recurrence.effects import Effect
from fastweights.recurrence.streams import pack_state, state_parts


@dataclass(frozen=True)
class ShardedMethod(Method):
    """A way to evaluate a record of which every process holds a slice of time.

    The processes of `group` hold contiguous slices of the same sequences, of one length, in the
    order of their numbers, and evaluate them at the same time. Each gets the outputs of its slice,
    and all the state after the last token of the last process; the state that is passed in, alike
    on all of them, is the one before the first token of the first process.

    Gradients are those of the sum of what the processes go backward from, all of them together. Of
    what all hold alike (the initial state, streams that are constant in time, weights) each gets
    its part, and the parts' sum over the group is the gradient.

    Attributes:
        group: a ProcessGroup, or a DeviceMesh of one dimension
        method: how a process evaluates what it has
    """

    group: ProcessGroup | DeviceMesh
    method: Method = Auto()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_slices", Slices.of(self.group))

    @property
    def neighbours(self) -> Slices:
        return self.__dict__["_slices"]

    def evaluate(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        if self.neighbours.count == 1:
            return self.method.evaluate(recurrence, state)
        self.neighbours.require_equal_lengths(len(recurrence), recurrence.device)
        return self.evaluate_slice(recurrence, state)

    @abstractmethod
    def evaluate_slice(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        """Evaluate one of several slices of the same length."""


@dataclass(frozen=True)
class TimeSharded(ShardedMethod):
    """Every process evaluates its slice of time; what travels is one state and one transition.

    Each process finds what its tokens do to whatever state is before them (`Recurrence.effect`,
    which reads the slice once, from the empty state), one all-gather tells all of them, and each
    evaluates its slice from the state that follows: two passes over a slice, and bytes that do not
    depend on its length. Softmax to all tokens has no such state.

    Source: LASP-2 (2502.07563), for any rule.

    Raises:
        NoFiniteFormError: for a rule without a state of a fixed size
        ShapeError: for slices of different lengths
    """

    def evaluate_slice(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        effect = recurrence.effect(self.method.evaluate)
        return self.evaluate_after(effect, recurrence, state)

    def evaluate_after(
        self, effect: Effect[State], recurrence: Recurrence, state: State
    ) -> tuple[Tensor, State]:
        """As `evaluate_slice`, of a record whose effect is known."""
        before, after = self.neighbours.carry(effect, state)
        o, _ = self.method.evaluate(recurrence, before)
        # an empty cache is not looked at, but its backward is awaited by others
        (o,) = tie([o], state_parts(before))
        return o, after


@dataclass(frozen=True)
class HeadSharded(ShardedMethod):
    """Every process evaluates all tokens of some of the heads: one all-to-all before, one after.

    Works for every rule, softmax and one's own included. The bytes that a process sends are those
    of its streams and outputs, nearly. The number of heads is a multiple of that of processes.

    Source: Ulysses (2309.14509).

    Attributes:
        gathers_state: whether the state after the last token is gathered; it is () otherwise

    Raises:
        ShapeError: for heads that the processes cannot share, or slices of different lengths
    """

    gathers_state: bool = True

    def without_state(self) -> Self:
        return replace(self, gathers_state=False)

    def evaluate_slice(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        record = self._divide_heads(recurrence)
        cut = self._head_axes(recurrence, record)
        own = [
            self._own_part(s, 1) if has else s
            for s, has in zip(state_parts(state), cut, strict=True)
        ]
        o, after = self.method.evaluate(record, record.adopt(pack_state(own)))
        return self._restore_time(o), self._gather_state(after, cut)

    def _divide_heads(self, recurrence: Recurrence) -> Recurrence:
        """The record of all tokens of this process's heads."""
        self._require_heads(recurrence)
        streams = list[Tensor]()
        recurrence.map_streams(lambda s: streams.append(s) or s)
        timed = [len(recurrence) == 1 or s.shape[1] > 1 for s in streams]
        sent = [self._by_heads(s) for s, t in zip(streams, timed, strict=True) if t]
        received = iter(exchange(self.neighbours.group, sent))
        divided = iter(
            [
                torch.cat(next(received).unbind(), 1) if t else self._own_heads(s)
                for s, t in zip(streams, timed, strict=True)
            ]
        )
        return recurrence.map_streams(lambda _: next(divided))

    def _require_heads(self, recurrence: Recurrence) -> None:
        count, (_, _, heads) = self.neighbours.count, recurrence.shape
        found = {"the record": heads} | {n: s.shape[2] for n, s in recurrence.streams.items()}
        for name, of_it in found.items():
            shared = of_it == 1 and name != "the record"
            if of_it % count and not shared:
                raise ShapeError(
                    f"HeadSharded: {name} of a {type(recurrence).__name__} has {of_it} heads, which"
                    f" {count} processes cannot share evenly; take a number of heads that {count}"
                    f" divides, a group of fewer processes, or TimeSharded(group), which divides"
                    " time alone"
                )

    def _by_heads(self, stream: Tensor) -> Tensor:
        """``[b t h ·]`` → ``[p b t h/p ·]``, or all of it to everyone where it has one head."""
        count = self.neighbours.count
        if stream.shape[2] == 1:
            return stream.expand(count, *stream.shape)
        return torch.stack(stream.chunk(count, 2))

    def _own_heads(self, stream: Tensor) -> Tensor:
        return stream if stream.shape[2] == 1 else self._own_part(stream, 2)

    def _own_part(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.chunk(self.neighbours.count, axis)[self.neighbours.index]

    def _head_axes(self, whole: Recurrence, part: Recurrence) -> list[bool]:
        """Which tensors of the state have a part for every head, on the axis behind the batch."""
        shapes = zip(whole.state_shapes, part.state_shapes, strict=True)
        return [one != other for one, other in shapes]

    def _restore_time(self, o: Tensor) -> Tensor:
        """All tokens of some heads ``[b t h/p v]`` → some tokens of all heads."""
        sent = torch.stack(o.chunk(self.neighbours.count, 1))
        (received,) = exchange(self.neighbours.group, [sent])
        return torch.cat(received.unbind(), 2)

    def _gather_state(self, state: State, cut: list[bool]) -> State:
        if not self.gathers_state:
            return ()
        if not any(cut):
            return state
        parts = state_parts(state)
        gathered = iter(
            gather(self.neighbours.group, [s for s, has in zip(parts, cut, strict=True) if has])
        )
        whole = [
            torch.cat(next(gathered).unbind(), 1) if has else s
            for s, has in zip(parts, cut, strict=True)
        ]
        return pack_state(whole)


@dataclass(frozen=True)
class HybridSharded(HeadSharded):
    """`TimeSharded` where the rule has a state of a fixed size, `HeadSharded` for the others, such
    as the softmax layers of a hybrid.

    Source: LASP-2H (2502.07563), with heads in place of gathered keys.
    """

    def evaluate_slice(self, recurrence: Recurrence, state: State) -> tuple[Tensor, State]:
        try:
            effect = recurrence.effect(self.method.evaluate)
        except NoFiniteFormError:
            return super().evaluate_slice(recurrence, state)
        return TimeSharded(self.group, self.method).evaluate_after(effect, recurrence, state)
