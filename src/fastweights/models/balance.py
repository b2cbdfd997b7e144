"""The loss that keeps experts equally busy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.layers import Router, upcast
from fastweights.shapes import Mask


@contextmanager
def router_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the block, gather the logits by which tokens choose their experts.

    Args:
        model: A model, some of whose layers are `Experts`.

    Yields:
        A list that every forward pass adds the ``[n experts]`` of its layers to, in their order,
        for n tokens of all sequences.

    Raises:
        ValueError: If no layer of the model has experts.
    """
    logits: list[Tensor] = []

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        logits.append(output)

    routers = [part for part in model.modules() if isinstance(part, Router)]
    if not routers:
        raise ValueError(f"no layer of this {type(model).__name__} is a mixture of experts")
    hooks = [router.W.register_forward_hook(note) for router in routers]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(logits: Sequence[Tensor], chosen: int, keep: Mask | None = None) -> Tensor:
    """E Σ_e f_e p_e, where f_e is the share of tokens that choose expert e, and p_e its mean
    probability (Switch Transformer, Fedus et al., 2021, eq. 4-6), over all layers together.

    It is `chosen` where experts are equally busy, and has a gradient by p alone.

    Args:
        logits: ``[b·t E]`` of every layer, as `router_logits` gathers them.
        chosen: How many experts a token chooses.
        keep: ``[b t]``, False for padding, which does not count; None without padding.
    """
    stacked = upcast(torch.stack(list(logits)))
    if keep is not None:
        stacked = stacked[:, keep.flatten().to(stacked.device, torch.bool)]
    p = stacked.flatten(0, 1).softmax(-1)
    f = F.one_hot(p.topk(chosen, dim=-1).indices, p.shape[-1]).sum(1).to(p.dtype).mean(0)
    return p.shape[-1] * (f * p.mean(0)).sum()
