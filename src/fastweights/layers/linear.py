"""Projections of channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastweights.ops.product import Product, multiply, multiply_each


class Linear(nn.Linear):
    """torch's, by the kernel that the table has for so many tokens. In float16 it also reads what a
    recurrence or norm has left in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.weight.dtype is torch.float16:
            input = input.to(torch.float16)
        return multiply(input, self.weight, self.bias)


def project_each(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Every layer of x, by one call for all weights where the layers are plain `Linear`s."""
    return project_pairs(*((layer, x) for layer in layers))


def project_pairs(*pairs: tuple[nn.Module, Tensor]) -> list[Tensor]:
    """Every layer of the tensor beside it, by one call for all weights where the layers are plain
    `Linear`s.
    """
    if torch.compiler.is_compiling() or _has_any_global_hook() or not _are_plain(pairs):
        return [layer(x) for layer, x in pairs]
    own = [(x, layer._parameters) for layer, x in pairs]
    return multiply_each(*[Product(x, p["weight"], p.get("bias")) for x, p in own])  # type: ignore[arg-type]


def _are_plain(pairs: tuple[tuple[Any, Tensor], ...]) -> bool:
    """Whether calling these layers would do no more than multiply: nobody has replaced one or its
    forward, and nobody waits for its call.
    """
    for layer, _ in pairs:
        own = layer.__dict__
        if type(layer) is not Linear or "weight" not in own["_parameters"]:
            return False
        if not is_untouched(own):
            return False
    return True


def is_untouched(own: dict[str, Any]) -> bool:
    """Whether the module of these attributes has its class's forward, and no hooks."""
    if "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    return not (own["_backward_hooks"] or own["_backward_pre_hooks"])
