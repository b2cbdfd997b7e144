"""The base class of all executed theorems."""

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
class TheoryFinding(ABC):
    """A statement of a paper, the numbers it gave on some input, and whether they support it.

    Attributes:
        source: Where the paper makes the statement.
        statement: The statement.
    """

    source: ClassVar[str]
    statement: ClassVar[str]

    @property
    @abstractmethod
    def verdict(self) -> bool:
        """Whether the numbers agree with the statement."""

    @abstractmethod
    def figures(self) -> list[dict[str, object]]:
        """Return the numbers, a row per case."""

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Draw the numbers."""


def equal(difference: float, scale: float = 1.0) -> bool:
    """Whether `difference` is within float64's rounding of numbers as large as `scale`."""
    return difference <= ROUNDING * torch.finfo(torch.float64).eps * max(scale, 1.0)


def largest(x: Tensor) -> float:
    """Return max |x|, or 0 for an empty tensor."""
    return float(x.abs().max()) if x.numel() else 0.0
