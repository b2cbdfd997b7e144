"""Streams ``[b t h ·]``: how their axes fit, are laid out, masked and decayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.shapes import Mask, Segments

State = Tensor | tuple[Tensor, ...]

T = TypeVar("T")


class ShapeError(ValueError):
    """A stream, mask or state whose shape does not fit the others."""


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


def broadcast_lengths(shapes: Mapping[str, Sequence[int]]) -> tuple[int, int, int]:
    """(b, t, h) of the shapes ``[b t h ·]`` of streams, or a ShapeError that names the one that
    does not fit.
    """
    lengths = [1, 1, 1]
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ShapeError(
                f"{name} has shape {list(shape)}; streams are [batch, time, heads, width]: "
                "add the missing axes with length 1"
            )
        for axis in range(3):
            if lengths[axis] == 1:
                lengths[axis] = shape[axis]
            elif shape[axis] not in (1, lengths[axis]):
                found = ", ".join(f"{n} {list(s)}" for n, s in shapes.items())
                raise ShapeError(
                    f"streams must agree, or have length 1, in batch, time and heads; got {found}"
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


def pad_tokens(stream: Tensor, before: int, behind: int) -> Tensor:
    """Zeros around the tokens of ``stream [… t c]``; torch 2.8 pads none without channels."""
    if stream.shape[-1]:
        return F.pad(stream, (0, 0, before, behind))
    return stream.new_empty(*stream.shape[:-2], before + stream.shape[-2] + behind, 0)


def at_most(length: int, tokens: int) -> int:
    """How many of `length` cached tokens so many new ones can push out; all of them in graphs,
    which are of any number of tokens.
    """
    return length if isinstance(tokens, torch.SymInt) else min(length, tokens)


def with_room(x: Tensor) -> Tensor:
    """x in float32 if it is of float16, whose range sums over tokens and small features leave."""
    return x.float() if x.dtype is torch.float16 else x


def mask_stream(stream: Tensor, mask: Mask, value: float = 0.0) -> Tensor:
    """`stream` with `value` where ``mask [b t]`` is False."""
    return torch.where(mask[..., None, None], stream, value)


def find_segment_starts(ids: Segments) -> Mask:
    """True at the first token of every segment but the first, which continues the given state."""
    first = torch.zeros_like(ids[:, :1], dtype=torch.bool)
    return torch.cat([first, ids[:, 1:] != ids[:, :-1]], dim=1)


def reciprocal_or_zero(n: Tensor) -> Tensor:
    """1 / n, and 0 where a row has no weight, or so little that 1 / n is no number."""
    empty = n.abs() < torch.finfo(n.dtype).tiny
    return torch.where(empty, 0, 1 / torch.where(empty, 1, n))


def pack_state(parts: Sequence[Tensor]) -> State:
    """A state of one tensor is that tensor; of several, their tuple."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def state_parts(state: State) -> tuple[Tensor, ...]:
    """The tensors of a state."""
    return state if isinstance(state, tuple) else (state,)


def disable_autocast(device: torch.device) -> AbstractContextManager[object]:
    """The streams say in what precision they are read; autocast would round the products inside,
    and so the state.
    """
    if device.type != "meta" and torch.is_autocast_enabled(device.type):  # meta has no autocast
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
