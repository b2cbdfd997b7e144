"""Features φ of a stream, made when they are read: a kernel that makes them itself never does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.recurrence.streams import disable_autocast, lazy_property

LEAST_FEATURE = -20.0
"""The log of the least feature: products of q and k, and the squares of these, have room in
float32 where all features are as small.
"""


def softmax(x: Tensor) -> Tensor:
    """Over the last axis."""
    return x.softmax(-1)


def elu_plus_one(x: Tensor) -> Tensor:
    """1 + ELU(x) > 0, the feature map of linear attention (DSF eq. 16), with the digits of e^x, at
    least `LEAST_FEATURE`.
    """
    return F.relu(x) + x.clamp(LEAST_FEATURE, 0).exp()


class FeatureMap(nn.Module, ABC):
    """φ of ``x [b t h w]``: (f(x W), f(-x W)), or what a map of another kind makes of x W.

    Attributes:
        W: ``[h·n w 1]``
        size: 2n, the features of one head; n of another kind
    """

    W: nn.Parameter
    size: int

    @staticmethod
    @abstractmethod
    def activate(x: Tensor, /) -> Tensor:
        """The function f, or that of the other kind."""


class ScaledMap(FeatureMap):
    """φ(x) = softmax(x W + b), whose logarithm is relative to log Σ e^(x W + b).

    Attributes:
        b: ``[h·n]``
    """

    b: nn.Parameter

    @abstractmethod
    def log_scale(self, x: Tensor) -> Tensor:
        """What φ(x) is relative to, ``[b t h 1]``."""

    @abstractmethod
    def scores_at(self, x: Tensor, position: int) -> Tensor:
        """x W + b ``[b t h n]`` of x as it was before rotary positions turned it at one."""


@dataclass(frozen=True, eq=False)
class Mapped:
    """φ of a stream that nobody has read yet.

    Attributes:
        map: φ
        stream: ``[b t h w]``, q or k
        position: Where a single token is that φ reads as it was before rotary positions, of keys
            the one that leaves the window; None for φ of streams as they are
    """

    map: FeatureMap
    stream: Tensor
    position: int | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether the features would: the stream does, or a parameter of φ."""
        return any(x.requires_grad for x in (self.stream, *self.map.parameters()))

    @property
    def tensor(self) -> Tensor:
        """The features ``[b t h f]``, made once with gradients and once without."""
        return self._with_gradients if torch.is_grad_enabled() else self._without_gradients

    @lazy_property
    def _with_gradients(self) -> Tensor:
        return self._make()

    @lazy_property
    def _without_gradients(self) -> Tensor:
        return self._make()

    def of(self, stream: Tensor) -> Tensor:
        """The features of another stream."""
        return replace(self, stream=stream).tensor

    def _make(self) -> Tensor:
        with disable_autocast(self.stream.device):
            if self.position is not None and isinstance(self.map, ScaledMap):
                return self.map.activate(self.map.scores_at(self.stream, self.position))
            return self.map(self.stream)

    @lazy_property
    def shape(self) -> tuple[int, int, int, int]:
        b, t, h, _ = self.stream.shape
        return b, t, h, self.map.size

    def __len__(self) -> int:
        return self.stream.shape[1]

    def __getitem__(self, span: slice) -> Mapped:
        return replace(self, stream=self.stream[:, span])

    def split(self, size: int) -> list[Mapped]:
        """Pieces of `size` tokens."""
        return [replace(self, stream=piece) for piece in self.stream.split(size, dim=1)]


@dataclass(frozen=True, eq=False)
class LogScale(Mapped):
    """What φ of a stream is relative to, ``[b t h 1]``, that nobody has read yet."""

    map: ScaledMap

    def _make(self) -> Tensor:
        with disable_autocast(self.stream.device):
            if self.position is None:
                return self.map.log_scale(self.stream)
            return self.map.scores_at(self.stream, self.position).logsumexp(-1, keepdim=True)

    @lazy_property
    def shape(self) -> tuple[int, int, int, int]:
        b, t, h, _ = self.stream.shape
        return b, t, h, 1


def features(stream: Tensor | Mapped) -> Tensor:
    """The features, or the scale, made now if they are not there."""
    return stream.tensor if isinstance(stream, Mapped) else stream
