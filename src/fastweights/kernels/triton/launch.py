"""Whether Triton is there, and the one place where kernels are launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastweights.kernels.rehearsal import assume_constant_result
from fastweights.kernels.triton.streams import NARROW

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on the CPU: decided before Triton is imported."""

DEVICES = ("cuda", "meta", "cpu") if INTERPRETED else ("cuda", "meta")
"""Where the kernels' entries of the table read streams: on meta, shapes are all that is made."""

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
"""Takes a kernel, its grid, its arguments and its options."""

_launcher: ContextVar[Launcher | None] = ContextVar("launcher", default=None)


@contextmanager
def launch_with(launcher: Launcher) -> Iterator[None]:
    """Inside the block `launcher` is called in place of every launch.

    That holds on any device, the meta device as well.
    """
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


@cache
def is_installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


@assume_constant_result
def refuse_missing() -> str | None:
    """Why no kernel of Triton can be taken here."""
    return None if is_installed() else "Triton is not installed (pip install triton)"


def refuse_layer(*streams: Tensor | None) -> str | None:
    """Why no kernel for an operation of layers can be taken on these streams."""
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of torch's own operations"
    for stream in streams:
        if stream is not None and stream.dtype not in NARROW:
            return f"it has a stream of {stream.dtype}"
    return refuse_missing()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start `kernel` once per place of the `grid`, on the device of its first tensor.

    Nothing runs on tensors without numbers, those of the meta device and of a graph that
    torch.compile traces, nor for an empty grid.
    """
    tensor, launcher = _first_tensor(arguments), _launcher.get()
    if 0 in grid:
        return
    if launcher is not None:
        launcher(kernel, grid, arguments, options)
        return
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            kernel[grid](*arguments, **options)
    else:
        kernel[grid](*arguments, **options)


def _first_tensor(arguments: tuple[Any, ...]) -> Tensor:
    for argument in arguments:
        while isinstance(argument, tuple) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument
    raise TypeError("a kernel is launched with at least one tensor")
