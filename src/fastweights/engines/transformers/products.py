"""The linear layers of patched models: torch's own, which stay what they are and multiply as ours.

No model is changed, so that copies, pickles, adapters and whatever wraps a layer know torch's class
alone. What is replaced is its forward, which asks whether the layer is one of a patched model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fastweights.engines.transformers.substitute import MARK, Switch
from fastweights.ops import multiply

_covered: WeakSet[nn.Module] = WeakSet()
"""Models that have run while they were patched, and their plain linear layers."""


def cover_layers(theirs: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """The forward of a model, at whose first call its plain linear layers become covered."""

    @functools.wraps(theirs)
    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if switch.on and not torch.compiler.is_compiling() and self not in _covered:
            _covered.add(self)
            _covered.update(part for part in self.modules() if type(part) is nn.Linear)
        return theirs(self, *arguments, **named)

    return forward


def multiply_covered(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of `nn.Linear`: ours for covered layers, theirs for all others."""

    @functools.wraps(theirs)
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or self not in _covered:
            return theirs(self, input)
        return multiply(input, self.weight, self.bias)

    setattr(forward, MARK, "nn.Linear")
    return forward


def uncover_all() -> None:
    """Models become covered again when they are called and still patched."""
    _covered.clear()
