"""Tensors as kernels read them: a pointer and the distances between batches, tokens and heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of streams that kernels read; they accumulate in float32."""


class Strided(NamedTuple):
    """A stream ``[b t h ·]`` whose last axis lies side by side in memory.

    A kernel takes it as one argument: `data` is its pointer there, the rest are numbers of
    elements, 0 along an axis that is shared.
    """

    data: Tensor
    batch: int
    time: int
    head: int

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """``[b t h ·]`` as it lies in memory."""
        return cls(x, x.stride(0), x.stride(1), x.stride(2))

    @classmethod
    def or_none(cls, x: Tensor | None) -> Strided | None:
        """None where there is no stream: kernels are compiled without it."""
        return None if x is None else cls.of(x)


def side_by_side(x: Tensor) -> Tensor:
    """`x` with the last axis side by side in memory, as it is wherever it already lies so."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
