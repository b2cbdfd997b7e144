"""Whether Triton is there, and the one place where kernels are launched."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastweights.kernels.triton.streams import Stream

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels, on the CPU: decided before Triton is imported."""

DEVICES = ("cuda", "meta", "cpu") if INTERPRETED else ("cuda", "meta")
"""Where the kernels' entries of the table read streams: on meta, shapes are all that is made."""


@cache
def is_installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def refuse_missing() -> str | None:
    """Why no kernel of Triton can be taken here."""
    return None if is_installed() else "Triton is not installed (pip install triton)"


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Start `kernel` once per place of the `grid`, on the device of its first tensor.

    Nothing runs on tensors without numbers, those of the meta device and of a graph that
    torch.compile traces, nor for an empty grid.
    """
    tensor = _first_tensor(arguments)
    if tensor.is_meta or isinstance(tensor, FakeTensor) or 0 in grid:
        return
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            kernel[grid](*arguments, **options)
    else:
        kernel[grid](*arguments, **options)


def _first_tensor(arguments: tuple[Any, ...]) -> Tensor:
    for argument in arguments:
        if isinstance(argument, Stream):
            return argument.data
        if isinstance(argument, Tensor):
            return argument
    raise TypeError("a kernel is launched with at least one tensor")
