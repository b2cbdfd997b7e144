"""What every recurrence is: a frozen record of streams with one equation, evaluated in several
ways.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from fastweights.shapes import Map, Mask, Output, Segments

if TYPE_CHECKING:
    from fastweights.recurrence.ltv import LTV

State = Tensor | tuple[Tensor, ...]

T = TypeVar("T")

CHUNK = 64
"""Tokens that are computed in parallel where nobody says how many."""


class ShapeError(ValueError):
    """A stream, mask or state whose shape does not fit the others."""


class NoFiniteFormError(TypeError):
    """The rule has no finite-dimensional linear form (DSF Lemma 1)."""


class lazy_property(Generic[T]):  # noqa: N801, a decorator, named as functools.cached_property
    """A property of a record that is computed at the first reading: records do not change.

    functools.cached_property takes a lock (before Python 3.12), which torch.compile cannot trace.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, record: Any, owner: type | None = None) -> T:
        found = self.compute(record)
        if not torch.compiler.is_compiling():
            record.__dict__[self.name] = found
        return found


@dataclass(frozen=True, eq=False)
class Recurrence(ABC):
    """The per-token streams ``[b t h ·]`` of one fast-weight rule.

    Subclasses state the rule in `step` (the paper's equation, for one token) and in `chunk` (all
    tokens of the record at once), on a `State` of its own form. Everything else follows from these
    two.
    """

    @lazy_property
    def streams(self) -> dict[str, Tensor]:
        """The tensors among the fields, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    @lazy_property
    def shape(self) -> tuple[int, int, int]:
        """(b, t, h) after broadcasting."""
        return broadcast_lengths(self.streams)

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

    def _fields_over_time(self) -> dict[str, Tensor | Recurrence]:
        """The streams, and the records this one is made of, that have a part for every token."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: part for name, part in named.items() if _tokens(part) == len(self)}

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the state's tensors, batch first."""

    def initial_state(self) -> State:
        """The state before the first token: zeros."""
        return pack_state(
            [torch.zeros(s, dtype=self.accumulator, device=self.device) for s in self.state_shapes]
        )

    def adopt(self, state: State) -> State:
        """`state` in this record's dtype and batch, or a ShapeError."""
        parts = state if isinstance(state, tuple) else (state,)
        shapes = tuple(tuple(part.shape) for part in parts)
        if shapes == self.state_shapes and all(part.dtype == self.accumulator for part in parts):
            return state
        try:
            expanded = [p.expand(s) for p, s in zip(parts, self.state_shapes, strict=True)]
        except (RuntimeError, ValueError):
            raise ShapeError(
                f"{type(self).__name__} here has state shapes {list(self.state_shapes)}, got"
                f" {list(shapes)}"
            ) from None
        return pack_state([part.to(self.accumulator) for part in expanded])

    def empty_output(self) -> Output:
        """The output of a record without tokens."""
        b, _, h = self.shape
        return torch.zeros(b, 0, h, self.values, dtype=self.output, device=self.device)

    @property
    @abstractmethod
    def values(self) -> int:
        """The value width v."""

    @abstractmethod
    def step(self, state: Any) -> tuple[Output, State]:
        """The rule for a record of one token: the definition, and the oracle of every other
        form.
        """

    @abstractmethod
    def chunk(self, state: Any) -> tuple[Output, State]:
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

    @abstractmethod
    def segments(self, ids: Segments) -> Self:
        """The same record with an empty state wherever `ids` changes (packed documents)."""


def _tokens(part: object) -> int | None:
    """The length of a stream or record in time; None for other fields."""
    if isinstance(part, Tensor):
        return part.shape[1]
    return len(part) if isinstance(part, Recurrence) else None


def broadcast_lengths(streams: dict[str, Tensor]) -> tuple[int, int, int]:
    """(b, t, h) of ``[b t h ·]`` streams, or a ShapeError that names the one that does not fit."""
    lengths = [1, 1, 1]
    for name, stream in streams.items():
        shape = stream.shape
        if len(shape) != 4:
            raise ShapeError(
                f"{name} has shape {list(shape)}; streams are [batch, time, heads, width]: "
                "add the missing axes with length 1"
            )
        for axis in range(3):
            if lengths[axis] == 1:
                lengths[axis] = shape[axis]
            elif shape[axis] not in (1, lengths[axis]):
                shapes = ", ".join(f"{n} {list(s.shape)}" for n, s in streams.items())
                raise ShapeError(
                    f"streams must agree, or have length 1, in batch, time and heads; got {shapes}"
                )
    return lengths[0], lengths[1], lengths[2]


def require_width(name: str, stream: Tensor | None, *allowed: int) -> None:
    """Raise unless the last axis of `stream` has one of the `allowed` lengths."""
    if stream is not None and stream.shape[-1] not in allowed:
        widths = " or ".join(str(width) for width in dict.fromkeys(allowed))
        raise ShapeError(f"{name} has width {stream.shape[-1]}, must be {widths}")


def heads_first(stream: Tensor, dtype: torch.dtype) -> Tensor:
    """``[b t h ·]`` → ``[b h t ·]`` in `dtype`: the layout in which chunks are matrices."""
    return stream.to(dtype).transpose(1, 2)


def expand_time(recurrence: Recurrence, stream: Tensor) -> Tensor:
    """`stream` heads first, in the accumulator's dtype, with the time axis spelled out."""
    return heads_first(stream, recurrence.accumulator).expand(-1, -1, len(recurrence), -1)


def decay_factors(recurrence: Recurrence, log_decay: Tensor | None) -> Tensor:
    """α ``[b t h 1|k]`` of log α; 1 where there is no decay."""
    if log_decay is None:
        log_decay = torch.zeros(1, 1, 1, 1, device=recurrence.device)
    return log_decay.to(recurrence.accumulator).exp().expand(*recurrence.shape, -1)


def mask_stream(stream: Tensor, mask: Mask, value: float = 0.0) -> Tensor:
    """`stream` with `value` where ``mask [b t]`` is False."""
    return torch.where(mask[..., None, None], stream, value)


def check_mask(recurrence: Recurrence, mask: Tensor, name: str) -> None:
    b, t, _ = recurrence.shape
    if mask.dim() != 2 or mask.shape[1] != t or (mask.shape[0] not in (1, b) and b != 1):
        raise ShapeError(f"{name} has shape {list(mask.shape)}, must be [batch, time] = [{b}, {t}]")


def find_segment_starts(ids: Segments) -> Mask:
    """True at the first token of every segment but the first, which continues the given state."""
    first = torch.zeros_like(ids[:, :1], dtype=torch.bool)
    return torch.cat([first, ids[:, 1:] != ids[:, :-1]], dim=1)


def add_resets(recurrence: Recurrence, log_decay: Tensor | None, ids: Segments) -> Tensor:
    """`log_decay` with −inf at the start of every segment but the first."""
    if log_decay is None:
        log_decay = torch.zeros(1, 1, 1, 1, dtype=recurrence.accumulator, device=recurrence.device)
    return mask_stream(log_decay, ~find_segment_starts(ids), -torch.inf)


def reciprocal_or_zero(n: Tensor) -> Tensor:
    """1 / n, and 0 where a row has no weight at all (n = 0)."""
    empty = n == 0
    return torch.where(empty, 0, 1 / torch.where(empty, 1, n))


def pack_state(parts: list[Tensor]) -> State:
    """A state of one tensor is that tensor; of several, their tuple."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def disable_autocast(device: torch.device) -> AbstractContextManager[object]:
    """The streams say in what precision they are read; autocast would round the products inside,
    and so the state.
    """
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
