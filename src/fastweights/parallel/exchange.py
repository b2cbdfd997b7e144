"""What processes send each other: bytes of tensors, in one collective, with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F


class Message(NamedTuple):
    """One collective, as one process takes part in it.

    Attributes:
        name: ``all_gather`` or ``all_to_all``
        sent: bytes that this process sends to others, each of them counted once
    """

    name: str
    sent: int


_LISTENERS: list[list[Message]] = []


@contextmanager
def record_messages() -> Iterator[list[Message]]:
    """A list that takes every message of this process inside the block, those of a backward
    included.
    """
    messages = list[Message]()
    _LISTENERS.append(messages)
    try:
        yield messages
    finally:
        _LISTENERS.remove(messages)


def _note(name: str, sent: int) -> None:
    for messages in _LISTENERS:
        messages.append(Message(name, sent))


def gather(group: ProcessGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each of `tensors` of all processes, ``[p …]`` in the order of their numbers.

    Every process gives tensors of the same shapes. Backward, each process gets the sum of the
    gradients that the others have of its own.
    """
    return list(_Gather.apply(group, *tensors))


def exchange(group: ProcessGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of each of `tensors` ``[p …]`` the part ``[i …]`` goes to process i; the result ``[p …]``
    holds what came from each of them.
    """
    return list(_Exchange.apply(group, *tensors))


def tie(tensors: Sequence[Tensor], gathered: Sequence[Tensor]) -> list[Tensor]:
    """`tensors`, whose backward is followed by that of `gathered` on every process, for a
    collective in which only some take part never ends.
    """
    return list(_Tie.apply(len(tensors), *tensors, *gathered))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        found = _all_gather(group, tensors)
        ctx.mark_non_differentiable(*_integers(found))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *_sum_back(ctx.group, gradients)


def _sum_back(group: ProcessGroup, gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The sum over processes of the parts of `gradients` that are this one's."""
    received = iter(_all_to_all(group, [g for g in gradients if _is_differentiable(g)]))
    return [next(received).sum(0) if _is_differentiable(g) else None for g in gradients]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        found = _all_to_all(group, tensors)
        ctx.mark_non_differentiable(*_integers(found))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        received = iter(_all_to_all(ctx.group, [g for g in gradients if _is_differentiable(g)]))
        return None, *(next(received) if _is_differentiable(g) else None for g in gradients)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.others = len(tensors) - count
        tied = tuple(tensor.view_as(tensor) for tensor in tensors[:count])
        ctx.mark_non_differentiable(*_integers(tied))
        return tied

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = (g if _is_differentiable(g) else None for g in gradients)
        return None, *found, *[None] * ctx.others


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _integers(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not _is_differentiable(tensor)]


def _all_gather(group: ProcessGroup, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    count = distributed.get_world_size(group)
    sent = _pack([tensor[None] for tensor in tensors])[0]
    received = sent.new_empty(count, len(sent))
    distributed.all_gather(list(received.unbind()), sent, group=group)
    _note("all_gather", len(sent) * (count - 1))
    return _unpack(received, [(tensor.shape, tensor.dtype) for tensor in tensors])


def _all_to_all(group: ProcessGroup, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of tensors ``[p …]``."""
    sent = _pack(tensors)
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    _note("all_to_all", sent.shape[1] * (len(sent) - 1))
    return _unpack(received, [(tensor.shape[1:], tensor.dtype) for tensor in tensors])


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors ``[p …]`` as bytes ``[p n]``, each padded so that it can be read as any dtype."""
    return torch.cat([_bytes(tensor) for tensor in tensors], 1)


WORD = 16
"""Bytes of the widest number."""


def _bytes(tensor: Tensor) -> Tensor:
    raw = _raw(tensor.detach().contiguous())
    return F.pad(raw, (0, -raw.shape[1] % WORD))


def _raw(tensor: Tensor) -> Tensor:
    """The memory ``[p n]`` of a contiguous tensor ``[p …]``."""
    if not tensor.numel():
        return tensor.new_empty(len(tensor), 0, dtype=torch.uint8)
    return tensor.view(len(tensor), -1).view(torch.uint8)


def _unpack(
    received: Tensor, forms: Sequence[tuple[torch.Size, torch.dtype]]
) -> tuple[Tensor, ...]:
    """The tensors ``[p …]`` of these shapes and dtypes in bytes ``[p n]``."""
    found, begin = list[Tensor](), 0
    for shape, dtype in forms:
        size = shape.numel() * dtype.itemsize
        numbers = received.new_empty(len(received), *shape, dtype=dtype)
        _raw(numbers).copy_(received[:, begin : begin + size])
        found.append(numbers)
        begin += size + -size % WORD
    return tuple(found)
