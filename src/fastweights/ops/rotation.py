"""Rotary positions of heads by cosines and sines that are given: entries of the kernel table for C
and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastweights.kernels.native import abi, library
from fastweights.kernels.native.memory import empty
from fastweights.kernels.table import Kernel, select


@dataclass(frozen=True, eq=False)
class Rotation:
    """x ⊙ cosines + (-r, l) ⊙ sines, l and r being the halves of x (RoPE, Su et al., 2021).

    Attributes:
        x: ``[b t h w]``
        cosines, sines: ``[b t 1 w]``, or ``[1 t 1 w]``
    """

    x: Tensor
    cosines: Tensor
    sines: Tensor

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def streams(self) -> tuple[Tensor, Tensor, Tensor]:
        """(x, cosines, sines)"""
        return self.x, self.cosines, self.sines


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """A `Rotation` by the first kernel that takes it: ``[b t h w]``."""
    rotation = Rotation(x, cosines, sines)
    return select(rotation).compute(rotation)


def rotate_by_torch(rotation: Rotation) -> Tensor:
    """In passes over memory."""
    x, cosines, sines = rotation.streams
    left, right = x.chunk(2, -1)
    return x * cosines + torch.cat([-right, left], -1) * sines


def rotate_natively(rotation: Rotation) -> Tensor:
    """By rotation.c."""
    y = empty(*rotation.x.shape)
    library.call("fw_rotate", _call(rotation, y))
    return y


def prepare_rotation(rotation: Rotation, y: Tensor) -> Callable[[], None] | None:
    """`rotate` of streams that change where they lie, into a tensor ``[b t h w]`` that is there;
    None where C does not take it.
    """
    if select(rotation).compute is not rotate_natively:
        return None
    return library.PreparedCall("fw_rotate", _call(rotation, y))


def _call(rotation: Rotation, y: Tensor) -> abi.RotationCall:
    b, t, h, width = rotation.x.shape
    threads = library.threads(rotation.x.numel())
    return abi.RotationCall(b, t, h, width, threads, *rotation.streams, y)


def _refuses_native(rotation: Rotation) -> str | None:
    if torch.compiler.is_compiling():
        return "a compiled graph makes one kernel of torch's own operations"
    if torch.is_grad_enabled() and any(s.requires_grad for s in rotation.streams):
        return "autograd follows it"
    if rotation.x.shape[-1] % 2 or rotation.x.numel() == 0:
        return "it has no pairs of channels"
    if any(s.stride(-1) != 1 for s in rotation.streams):
        return "its channels do not lie side by side"
    return library.refuse_tensors(*rotation.streams)


ROTATION_KERNELS = [
    Kernel(
        "rotary positions (compiled)", Rotation, rotate_natively, _refuses_native, ("cpu",), True
    ),
    Kernel("rotary positions (torch)", Rotation, rotate_by_torch),
]
