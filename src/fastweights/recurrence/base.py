"""What every recurrence is: a frozen record of streams with one equation, evaluated in several
ways.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

import torch
from torch import Tensor

from fastweights.recurrence.effects import Effect, tensors_mapped_by
from fastweights.recurrence.mapped import Mapped, features
from fastweights.recurrence.streams import (
    ShapeError,
    State,
    broadcast_lengths,
    find_segment_starts,
    heads_first,
    lazy_property,
    mask_stream,
    pack_state,
    state_parts,
)
from fastweights.shapes import Map, Mask, Output, Segments

if TYPE_CHECKING:
    from fastweights.recurrence.ltv import LTV

S = TypeVar("S", bound=State)

Evaluation = Callable[["Recurrence", Any], tuple[Tensor, Any]]
"""(o, final state) of a record and the state before its first token."""

CHUNK = 64
"""Tokens that are computed in parallel where nobody says how many."""


class NoFiniteFormError(TypeError):
    """The rule has no finite-dimensional linear form (DSF Lemma 1)."""


@dataclass(frozen=True, eq=False)
class Recurrence(ABC, Generic[S]):
    """The per-token streams ``[b t h ·]`` of one fast-weight rule, whose state is an `S`.

    A rule is stated in `step` (the paper's equation, for one token) and in `chunk` (all tokens of
    the record at once). The rest are views of the same streams: as a map, as a linear system, with
    padding and documents, in operations and numbers.

    Attributes:
        reads: the streams by which a token reads the state; all others say what it writes
    """

    reads: ClassVar[tuple[str, ...]] = ("q",)

    @lazy_property
    def streams(self) -> dict[str, Tensor]:
        """The tensors among the fields, by name."""
        return tensor_fields(self)

    @lazy_property
    def shape(self) -> tuple[int, int, int]:
        """(b, t, h) after broadcasting."""
        return broadcast_lengths({name: s.shape for name, s in self.streams.items()})

    @property
    def device(self) -> torch.device:
        return next(iter(self.streams.values())).device

    @lazy_property
    def accumulator(self) -> torch.dtype:
        """The dtype of states and inner products: that of the streams, but at least float32."""
        dtype = torch.float32
        for stream in self.streams.values():
            dtype = torch.promote_types(dtype, stream.dtype)
        return dtype

    @lazy_property
    def output(self) -> torch.dtype:
        """The dtype of o: that of q and v together."""
        dtype = torch.promote_types(self.streams["q"].dtype, self.streams["v"].dtype)
        return torch.promote_types(dtype, torch.complex64) if self.accumulator.is_complex else dtype

    def __len__(self) -> int:
        return self.shape[1]

    def __getitem__(self, span: slice) -> Self:
        """The record of the tokens in `span`; what is constant in time stays so."""
        timed = self._fields_over_time().items()
        return replace(
            self,
            **{n: part[:, span] if isinstance(part, Tensor) else part[span] for n, part in timed},
        )

    def split(self, size: int = CHUNK) -> Iterator[Self]:
        """The record in pieces of `size` tokens; unlike slices, they cost autograd no more than the
        whole.
        """
        timed = self._fields_over_time()
        cut = (
            part.split(size, dim=1) if isinstance(part, Tensor) else part.split(size)
            for part in timed.values()
        )
        for pieces in zip(*cut, strict=True):
            yield replace(self, **dict(zip(timed, pieces, strict=True)))

    def _fields_over_time(self) -> dict[str, Tensor | Recurrence | Mapped]:
        """The streams, and the records this one is made of, that have a part for every token."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: part for name, part in named.items() if _tokens(part) == len(self)}

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the state's tensors, batch first."""

    def initial_state(self) -> S:
        """The state before the first token: zeros."""
        zeros = [
            torch.zeros(s, dtype=self.accumulator, device=self.device) for s in self.state_shapes
        ]
        return cast(S, pack_state(zeros))

    def settle(self, state: S) -> S:
        """`state` in the shapes that it has after any number of tokens: in a window that is not
        full yet, forgotten tokens stand for those to come.

        Raises:
            NoFiniteFormError: if there are none, as the state grows with every token
        """
        return state

    def adopt(self, state: State) -> S:
        """`state` in this record's dtype and batch.

        Raises:
            ShapeError: for tensors of other shapes, or more or fewer of them
        """
        parts = state_parts(state)
        shapes = tuple(tuple(part.shape) for part in parts)
        if shapes == self.state_shapes and all(part.dtype == self.accumulator for part in parts):
            return cast(S, state)
        try:
            expanded = [p.expand(s) for p, s in zip(parts, self.state_shapes, strict=True)]
        except (RuntimeError, ValueError):
            raise ShapeError(
                f"{type(self).__name__} here has state shapes {list(self.state_shapes)}, got"
                f" {list(shapes)}"
            ) from None
        return cast(S, pack_state([part.to(self.accumulator) for part in expanded]))

    def empty_output(self) -> Output:
        """The output of a record without tokens."""
        b, _, h = self.shape
        return torch.zeros(b, 0, h, self.values, dtype=self.output, device=self.device)

    @property
    @abstractmethod
    def values(self) -> int:
        """The value width v."""

    @abstractmethod
    def step(self, state: S) -> tuple[Output, S]:
        """The rule for a record of one token: the definition, and the oracle of every other
        form.
        """

    @abstractmethod
    def chunk(self, state: S) -> tuple[Output, S]:
        """All tokens of the record at once, in parallel (quadratic in its length)."""

    @abstractmethod
    def attention_map(self) -> Map:
        """``P [b h t s]`` with ``o_t = Σ_s P_ts v_s`` from the empty state (MetaLA eq. 18)."""

    @abstractmethod
    def ltv(self) -> LTV:
        """The rule as a linear time-varying system (DSF eq. 11)."""

    @abstractmethod
    def keep(self, mask: Mask) -> Self:
        """The same record with identity steps where `mask` is False (padding)."""

    def segments(self, ids: Segments) -> Self:
        """The same record with an empty state wherever `ids` changes (packed documents)."""
        check_mask(self, ids, "segment ids")
        return self.restart(find_segment_starts(ids))

    @abstractmethod
    def restart(self, starts: Mask) -> Self:
        """The same record with an empty state before every token where `starts` is True, be it
        the first.
        """

    def effect(self, evaluate: Evaluation) -> Effect[S]:
        """What the record's tokens do to whatever state is before them, in a size that does not
        depend on their number.

        Args:
            evaluate: how to evaluate this record or one that it is made of

        Raises:
            NoFiniteFormError: of a rule that has no such form, or states none
        """
        del evaluate
        raise NoFiniteFormError(
            f"what tokens do to the state of a {type(self).__name__} is not known; state it in"
            f" {type(self).__name__}.effect, or evaluate the rule by HeadSharded(group), which"
            " needs none"
        )

    def map_streams(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The record with `f` of every stream, features made: a view of some heads, say.

        Streams come in the same order at every call.
        """
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{n: _map_part(part, f) for n, part in named.items()})

    def map_written(self, f: Callable[[Tensor], Tensor]) -> Self:
        """The record with `f` of every stream that says what a token writes, in the same order at
        every call.
        """
        written = [name for name in self.__dataclass_fields__ if name not in self.reads]
        changed: dict[str, Any] = {}
        for name in written:
            part = getattr(self, name)
            if isinstance(part, Tensor):
                changed[name] = f(part)
            elif isinstance(part, Recurrence):
                changed[name] = part.map_written(f)
        return replace(self, **changed)

    def by_heads(self) -> tuple[Recurrence, ...]:
        """The records of its heads: itself, unless it is made of groups of heads."""
        return (self,)

    def map_groups(self, f: Callable[[Any], Recurrence]) -> Recurrence:
        """`f` of this record, or of each of its groups of heads."""
        return f(self)

    @property
    def innermost(self) -> Recurrence:
        """The rule that this record is composed around: itself, unless it wraps another."""
        return self

    @property
    def reader(self) -> Recurrence:
        """The record whose equation says how o is read: itself, unless it wraps another."""
        return self

    def normalisers(self) -> Tensor | None:
        """η ``[b t h 1]``, what each output is divided by (DSF eq. 15, 18); None if by nothing."""
        return None

    def surviving_state(self) -> Tensor | None:
        """The last token's A_t on a state of ones, nothing written; None if tokens are kept as
        they are.
        """
        return None

    def state_size(self, context: int) -> int:
        """Numbers in the state after `context` tokens; complex ones count twice."""
        del context
        return (2 if self.accumulator.is_complex else 1) * sum(map(math.prod, self.state_shapes))

    def step_operations(self, context: int) -> int:
        """Operations of the memory for one token of a sequence, after `context` others."""
        raise self._operations_unknown("step_operations")

    def chunk_operations(self, context: int, size: int) -> int:
        """Operations of the memory per token of `context`, forward, in chunks of `size`."""
        raise self._operations_unknown("chunk_operations")

    def _operations_unknown(self, method: str) -> TypeError:
        name = type(self).__name__
        return TypeError(f"the operations of a {name} are not known; state them in {name}.{method}")

    @property
    def operation_sizes(self) -> tuple[int, int, int]:
        """(heads, key width, value width): what operations are counted in."""
        return self.shape[2], self.streams["q"].shape[-1], self.values


def read_by_chunks(record: Recurrence) -> Tensor:
    """The record's output from the empty state, in memory linear in its length."""
    state, found = record.initial_state(), [record.empty_output()]
    for piece in record.split():
        o, state = piece.chunk(state)
        found.append(o)
    return torch.cat(found, 1)


def tensor_fields(record: Recurrence) -> dict[str, Tensor]:
    """The tensors among a record's own fields, by name."""
    named = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def written_streams(record: Recurrence) -> list[Tensor]:
    """The streams that say what a token writes, in the order of `map_written`."""
    return tensors_mapped_by(record.map_written)


def _map_part(part: Any, f: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, Recurrence):
        return part.map_streams(f)
    return f(features(part)) if isinstance(part, (Tensor, Mapped)) else part


def _tokens(part: object) -> int | None:
    """The length of a stream or record in time; None for other fields."""
    if isinstance(part, Tensor):
        return part.shape[1]
    return len(part) if isinstance(part, (Recurrence, Mapped)) else None


def expand_time(recurrence: Recurrence, stream: Tensor) -> Tensor:
    """`stream` heads first, in the accumulator's dtype, with the time axis spelled out."""
    return heads_first(stream, recurrence.accumulator).expand(-1, -1, recurrence.shape[1], -1)


def decay_factors(recurrence: Recurrence, log_decay: Tensor | None) -> Tensor:
    """α ``[b t h 1|k]`` of log α; 1 where there is no decay."""
    if log_decay is None:
        log_decay = torch.zeros(1, 1, 1, 1, device=recurrence.device)
    return log_decay.to(recurrence.accumulator).exp().expand(*recurrence.shape, -1)


def check_mask(recurrence: Recurrence, mask: Tensor, name: str) -> None:
    """Raise unless `mask` is ``[b t]`` of this record."""
    b, t, _ = recurrence.shape
    if mask.dim() != 2 or mask.shape[1] != t or (mask.shape[0] not in (1, b) and b != 1):
        raise ShapeError(f"{name} has shape {list(mask.shape)}, must be [batch, time] = [{b}, {t}]")


def add_resets(recurrence: Recurrence, log_decay: Tensor | None, starts: Mask) -> Tensor:
    """`log_decay` with −inf where `starts` is True."""
    if log_decay is None:
        log_decay = torch.zeros(1, 1, 1, 1, dtype=recurrence.accumulator, device=recurrence.device)
    return mask_stream(log_decay, ~starts, -torch.inf)
