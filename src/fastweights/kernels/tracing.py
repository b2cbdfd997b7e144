"""What torch.compile is told about functions that it cannot trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def assume_constant_result(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which imports the compiler to set a mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
