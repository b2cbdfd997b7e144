"""How many layers may stay softmax: a number of them, or the bytes that a sequence may take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fastweights.linearize.distill.plan import LayerCache
from fastweights.ranges import NON_NEGATIVE_INTEGER, POSITIVE_INTEGER
from fastweights.render.units import bytes_in_words


class SoftmaxBudget(ABC):
    """What the layers that stay softmax may take."""

    @abstractmethod
    def choose(self, order: Sequence[int], caches: Sequence[LayerCache]) -> list[int]:
        """Return the layers that stay softmax, in the order of the model.

        Args:
            order: The layers that can be linear, those first that are needed most as softmax.
            caches: What every layer of the model keeps of a sequence.

        Raises:
            ValueError: If the budget cannot be met, or leaves no layer linear.
        """


@dataclass(frozen=True)
class LayerBudget(SoftmaxBudget):
    """A number of layers that stay softmax.

    Attributes:
        count: How many; at least one layer must be left that is linear.

    Raises:
        TrainingError: If it is negative.
    """

    count: int = 0

    def __post_init__(self) -> None:
        NON_NEGATIVE_INTEGER.require(softmax_layers=self.count)

    def choose(self, order: Sequence[int], caches: Sequence[LayerCache]) -> list[int]:
        if self.count >= len(order):
            raise ValueError(
                f"cannot keep {self.count} of {len(order)} layers softmax; keep 0 to"
                f" {len(order) - 1} of them"
            )
        return sorted(order[: self.count])


@dataclass(frozen=True)
class CacheBudget(SoftmaxBudget):
    """The bytes that the cache of a sequence may take.

    As many layers stay softmax as fit, in the order of their ranking, and one at least is linear.
    States and windows count as when they are full, keys and values of all tokens in the weights'
    dtype; a layer that slides counts its own window.

    Attributes:
        size: Bytes of all layers together, per sequence.
        length: The tokens after which they are counted.

    Raises:
        TrainingError: If a number is not positive.
    """

    size: int
    length: int

    def __post_init__(self) -> None:
        POSITIVE_INTEGER.require(cache_budget=self.size, cache_length=self.length)

    def choose(self, order: Sequence[int], caches: Sequence[LayerCache]) -> list[int]:
        of_layer = {cache.layer: cache for cache in caches}
        chosen = list[int]()
        # the room left with all layers linear goes to those needed most, as far as they fit in it
        left = self.size - sum(cache.after(self.length) for cache in caches)
        if left < 0:
            raise ValueError(
                f"a cache of {bytes_in_words(self.size)} per sequence cannot be met: with all"
                f" {len(order)} layers linear it takes {bytes_in_words(self.size - left)} after"
                f" {self.length:,} tokens; allow as much, or take a smaller window"
            )
        for layer in order:
            more = of_layer[layer].as_softmax(self.length) - of_layer[layer].after(self.length)
            if more <= left and len(chosen) < len(order) - 1:
                chosen.append(layer)
                left -= more
        return sorted(chosen)
