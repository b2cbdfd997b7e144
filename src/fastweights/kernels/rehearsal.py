"""Records of fake tensors, taken by the kernels that would take them on a device which may not be
there; none of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def assume_constant_result(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which imports the compiler to set a mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_device: ContextVar[str | None] = ContextVar("rehearsed", default=None)


@contextmanager
def rehearse(device: str) -> Iterator[None]:
    """Inside the block kernels are chosen as on a device of this type, and compute nothing.

    It is for fake tensors on the CPU (`torch._subclasses.FakeTensorMode`), whose sizes and dtypes
    are then those that the device's kernels make and keep for the backward.

    Args:
        device: ``"cpu"`` or ``"cuda"``
    """
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


@assume_constant_result
def rehearsed() -> str | None:
    """The type of device that is pretended; None outside of a rehearsal."""
    return _device.get()
