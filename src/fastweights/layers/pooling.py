"""One vector of a sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastweights.shapes import Embedded, Mask


def _mean(x: Embedded, keep: Mask) -> Tensor:
    return x.masked_fill(~keep[..., None], 0).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


def _first(x: Embedded, keep: Mask) -> Tensor:
    return x[torch.arange(len(x), device=x.device), keep.int().argmax(1)]


def _last(x: Embedded, keep: Mask) -> Tensor:
    return _first(x.flip(1), keep.flip(1))


POOLINGS: dict[str, Callable[[Embedded, Mask], Tensor]] = {
    "mean": _mean,
    "first": _first,
    "last": _last,
}
"""Ways to make one vector ``[b d]`` of a sequence ``x [b t d]``, by name; ``keep [b t]`` is False
for padding.
"""
