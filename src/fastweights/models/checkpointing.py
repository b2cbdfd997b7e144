"""Activation checkpointing of blocks that are handed states and hand them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Checkpoint = Callable[..., Any]
"""Calls a function with arguments, and once more in the backward."""


def carry_states(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` for tensors inside states: with ``use_reentrant=True`` torch's follows only
    those that are arguments and results by themselves.
    """

    def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        leaves, structure = pytree.tree_flatten(arguments)
        results: list[pytree.TreeSpec] = []
        reentrant: list[bool] = []

        def flat(*leaves: Any) -> tuple[Any, ...]:
            reentrant.append(not torch.is_grad_enabled())
            found, result = pytree.tree_flatten(function(*pytree.tree_unflatten(leaves, structure)))
            results.append(result)
            return tuple(found)

        found = checkpoint(flat, *leaves, **options)
        if reentrant[0]:
            _refuse_further(found)
        return pytree.tree_unflatten(found, results[0])

    return run


def _refuse_further(outputs: tuple[Any, ...]) -> None:
    """Raise where the gradients of these are to have gradients, which torch would leave out."""
    for output in outputs:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(_require_first)


def _require_first(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "activation checkpointing with use_reentrant=True has no gradients of gradients; enable"
            ' it by {"use_reentrant": False}'
        )
