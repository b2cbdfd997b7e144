"""What every executed theorem is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from matplotlib.axes import Axes
from torch import Tensor

ROUNDING = 1e4
"""Two numbers are equal when they differ by less than so many units of float64's last
place: 2e-12.
"""


@dataclass(frozen=True, eq=False)
class Finding(ABC):
    """A statement of a paper, the numbers it came to on some input, and whether they bear
    it out.
    """

    source: ClassVar[str]
    statement: ClassVar[str]

    @property
    @abstractmethod
    def verdict(self) -> bool:
        """Whether the numbers agree with the statement."""

    @abstractmethod
    def figures(self) -> list[dict[str, object]]:
        """The numbers, a row per case."""

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """The numbers as a picture."""


def equal(difference: float, scale: float = 1.0) -> bool:
    """Whether `difference` is no more than rounding in float64 of numbers as large as `scale`."""
    return difference <= ROUNDING * torch.finfo(torch.float64).eps * max(scale, 1.0)


def largest(x: Tensor) -> float:
    """max |x|, 0 for no numbers."""
    return float(x.abs().max()) if x.numel() else 0.0
