"""What processes send each other: bytes of tensors, in one collective, with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from fastweights.recurrence.derivatives import refuse_further, transform_here

Form = tuple[torch.Size, torch.dtype]
"""The shape and dtype of one process's part of a tensor."""


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
    _refuse_transforms()
    return list(_Gather.apply(group, *tensors))


def exchange(group: ProcessGroup, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of each of `tensors` ``[p …]`` the part ``[i …]`` goes to process i; the result ``[p …]``
    holds what came from each of them.
    """
    _refuse_transforms()
    return list(_Exchange.apply(group, *tensors))


def tie(tensors: Sequence[Tensor], gathered: Sequence[Tensor]) -> list[Tensor]:
    """`tensors`, whose backward is followed by that of `gathered` on every process, for a
    collective in which only some take part never ends.
    """
    return list(_Tie.apply(len(tensors), *tensors, *gathered))


def _refuse_transforms() -> None:
    """Raise where torch would look into what one process alone does not compute."""
    transform = transform_here()
    if transform is not None:
        raise NotImplementedError(
            f"processes exchange tensors here, and {transform}; use a method of one process, or"
            " backward()"
        )


_refuses_further = refuse_further(
    "what processes exchange", "differentiate twice in one process, by another method"
)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        found = _all_gather(group, tensors)
        ctx.mark_non_differentiable(*_integers(found))
        return found

    @staticmethod
    @_refuses_further
    def backward(ctx: Any, *gradients: Any) -> Any:
        received = iter(_all_to_all(ctx.group, [g for g in gradients if _is_differentiable(g)]))
        return None, *(next(received).sum(0) if _is_differentiable(g) else None for g in gradients)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        found = _all_to_all(group, tensors)
        ctx.mark_non_differentiable(*_integers(found))
        return found

    @staticmethod
    @_refuses_further
    def backward(ctx: Any, *gradients: Any) -> Any:
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
    def backward(ctx: Any, *gradients: Any) -> Any:
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


WORD = 16
"""Bytes of the widest number: where each tensor begins, so that it can be read as any dtype."""


def _places(tensors: Sequence[Form]) -> list[slice]:
    """Where each tensor lies in a row of bytes."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in tensors]
    begins = accumulate((size + -size % WORD for size in sizes), initial=0)
    return [slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=False)]


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors ``[p …]`` as bytes ``[p n]``."""
    forms = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
    places = _places(forms)
    packed = tensors[0].new_zeros(
        len(tensors[0]), places[-1].stop + -places[-1].stop % WORD, dtype=torch.uint8
    )
    for tensor, form, place in zip(tensors, forms, places, strict=True):
        _numbers(packed[:, place], form).copy_(tensor.detach())
    return packed


def _unpack(packed: Tensor, forms: Sequence[Form]) -> tuple[Tensor, ...]:
    """The tensors ``[p …]`` of these forms in bytes ``[p n]``."""
    places = zip(forms, _places(forms), strict=True)
    return tuple(_numbers(packed[:, place], form).clone() for form, place in places)


def _numbers(raw: Tensor, form: Form) -> Tensor:
    """Bytes ``[p n]`` as numbers ``[p …]``."""
    shape, dtype = form
    if not shape.numel():
        return raw.new_empty(len(raw), *shape, dtype=dtype)
    return raw.view(dtype).unflatten(1, shape) if shape else raw.view(dtype).squeeze(1)
