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
from torch.nn import functional as F  # noqa: F401, for torch.jit.script, which reads theirs here

from fastweights.engines.transformers.substitute import MARK, Switch
from fastweights.ops import multiply

_covered: WeakSet[nn.Module] = WeakSet()
"""Models that have run while they were patched, and their large plain linear layers."""
WORTH_COVERING = 1 << 15
"""Numbers of a weight that takes longer to read than ours to begin."""


def cover_layers(theirs: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """The forward of a model, at whose first call its linear layers become covered."""

    @functools.wraps(theirs)
    def forward(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if switch.on and not torch.compiler.is_compiling() and self not in _covered:
            _covered.add(self)
            _covered.update(filter(_is_worth_it, self.modules()))
        return theirs(self, *arguments, **named)

    return forward


def _is_worth_it(module: nn.Module) -> bool:
    """Not of a subclass, as quantised layers are, which may compute something else."""
    return type(module) is nn.Linear and module.weight.numel() >= WORTH_COVERING


def multiply_covered(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of `nn.Linear`: ours for float32 and covered layers, theirs for all else."""

    @functools.wraps(theirs)
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        single = input.dtype is torch.float32 and not torch.compiler.is_compiling()
        if single and self in _covered:
            return multiply(input, self.weight, self.bias)
        return theirs(self, input)

    setattr(forward, MARK, "nn.Linear")
    return forward


def uncover_all() -> None:
    """Models become covered again when they are called and still patched."""
    _covered.clear()
