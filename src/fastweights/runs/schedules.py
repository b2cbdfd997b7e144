"""Learning-rate schedules: functions of the step alone, so that runs can be resumed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from fastweights.runs.ranges import NON_NEGATIVE_INTEGER, NON_NEGATIVE_NUMBER, POSITIVE_INTEGER


class Schedule(ABC):
    """A learning-rate schedule."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the fraction of the peak learning rate for update `step` of 0 … steps - 1."""

    def rate(self, peak: float, step: int, steps: int) -> float:
        """Return the learning rate for update `step` of 0 … steps - 1."""
        return self.factor(step, steps) * peak

    @property
    def is_open_ended(self) -> bool:
        """Whether no rate depends on how many updates there are, so that their number may change
        during training."""
        return False

    def for_epochs(self, updates: int) -> Schedule:
        """Return this schedule for a training whose epochs have `updates` updates."""
        return self


@dataclass(frozen=True)
class Cosine(Schedule):
    """Linear warm-up, then half a cosine.

    Attributes:
        warmup: Updates of the warm-up, which takes a fifth of all updates at most.
        floor: The last learning rate, as a fraction of the peak.

    Raises:
        TrainingError: If a number lies outside of its range.
    """

    warmup: int = 50
    floor: float = 0.1

    def __post_init__(self) -> None:
        NON_NEGATIVE_INTEGER.require(warmup=self.warmup)
        NON_NEGATIVE_NUMBER.require(floor=self.floor)

    def factor(self, step: int, steps: int) -> float:
        warm, done = _phase(step, steps, self.warmup)
        return warm * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True)
class Linear(Schedule):
    """Linear warm-up, then a straight line towards zero.

    Attributes:
        warmup: Updates of the warm-up, which takes a fifth of all updates at most.

    Raises:
        TrainingError: If the warm-up is no whole number, or negative.
    """

    warmup: int = 50

    def __post_init__(self) -> None:
        NON_NEGATIVE_INTEGER.require(warmup=self.warmup)

    def factor(self, step: int, steps: int) -> float:
        warm, done = _phase(step, steps, self.warmup)
        return warm * (1 - done)


@dataclass(frozen=True)
class Constant(Schedule):
    """Linear warm-up, then the peak learning rate throughout.

    Attributes:
        warmup: Updates of the warm-up, however many follow.

    Raises:
        TrainingError: If it is no whole number of 0 or more.
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        NON_NEGATIVE_INTEGER.require(warmup=self.warmup)

    @property
    def is_open_ended(self) -> bool:
        return True

    def factor(self, step: int, steps: int) -> float:
        return min(1.0, (step + 1) / (self.warmup + 1))


@dataclass(frozen=True)
class CosineAnnealing(Schedule):
    """Linear warm-up from the rate `start`, then half a cosine to the rate `final`, as published
    protocols state it.

    Attributes:
        warmup: Number of updates or, below 1, a fraction of all updates.
        start: The first learning rate.
        final: The last learning rate.
        relative: Whether `final` is a fraction of the peak instead of a rate.
        by_epoch: Whether the rate changes between epochs only.

    Raises:
        TrainingError: If a number lies outside of its range.
    """

    warmup: float = 0
    start: float = 0.0
    final: float = 0.0
    relative: bool = False
    by_epoch: bool = False

    def __post_init__(self) -> None:
        NON_NEGATIVE_NUMBER.require(warmup=self.warmup, start=self.start, final=self.final)

    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate for a peak of 1, since `start` and `final` are not fractions."""
        return self.rate(1.0, step, steps)

    def rate(self, peak: float, step: int, steps: int) -> float:
        warmup = self.warmup if self.warmup >= 1 else self.warmup * steps
        if step < warmup:
            return self.start + (peak - self.start) * step / warmup
        final = self.final * peak if self.relative else self.final
        angle = math.pi * (step - warmup) / (steps - warmup)
        return final + (peak - final) * (1 + math.cos(angle)) / 2

    def for_epochs(self, updates: int) -> Schedule:
        return Stepwise(self, updates) if self.by_epoch else self


@dataclass(frozen=True)
class Stepwise(Schedule):
    """Another schedule whose rate changes only after every `updates` updates.

    Attributes:
        schedule: The other schedule.
        updates: Updates between changes of the rate.

    Raises:
        TrainingError: If a number lies outside of its range.
    """

    schedule: Schedule
    updates: int

    def __post_init__(self) -> None:
        POSITIVE_INTEGER.require(updates=self.updates)

    def factor(self, step: int, steps: int) -> float:
        return self.rate(1.0, step, steps)

    def rate(self, peak: float, step: int, steps: int) -> float:
        return self.schedule.rate(peak, step // self.updates, steps // self.updates)


def _phase(step: int, steps: int, warmup: int) -> tuple[float, float]:
    """(fraction of the warm-up done, fraction of the rest done)."""
    warmup = min(warmup, steps // 5)
    return min(1.0, (step + 1) / (warmup + 1)), max(0, step - warmup) / (steps - warmup)
