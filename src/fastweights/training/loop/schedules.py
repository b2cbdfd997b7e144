"""Learning-rate schedules: functions of the step alone, so that runs can be resumed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastweights.errors import TrainingError
from fastweights.ranges import (
    FRACTION,
    NON_NEGATIVE_INTEGER,
    NON_NEGATIVE_NUMBER,
    POSITIVE_INTEGER,
)


class Schedule(ABC):
    """A learning-rate schedule."""

    @abstractmethod
    def factor(self, step: int, steps: int) -> float:
        """Return the fraction of the peak learning rate for update `step` of 0 … steps - 1."""

    def rate(self, peak: float, step: int, steps: int) -> float:
        """Return the learning rate for update `step` of 0 … steps - 1."""
        return self.factor(step, steps) * peak

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

    def factor(self, step: int, steps: int) -> float:
        return min(1.0, (step + 1) / (self.warmup + 1))


class DecayShape(ABC):
    """The shape in which a learning rate falls from its peak."""

    @abstractmethod
    def factor(self, done: float) -> float:
        """Return the fraction of the peak when `done` of the decay, from 0 to 1, lies behind: 1 at
        0 and 0 at 1."""


@dataclass(frozen=True)
class LinearDecay(DecayShape):
    """1 - done."""

    def factor(self, done: float) -> float:
        return 1 - done


@dataclass(frozen=True)
class SquareRootDecay(DecayShape):
    """1 - √done (Hägele et al., 2024)."""

    def factor(self, done: float) -> float:
        return 1 - math.sqrt(done)


@dataclass(frozen=True)
class CosineDecay(DecayShape):
    """(1 + cos π done) / 2."""

    def factor(self, done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Linear warm-up, the peak learning rate, and a decay at the end (WSD; MiniCPM, Hu et al.,
    2024).

    No rate before the decay depends on how many updates there are.

    Attributes:
        warmup: Updates of the warm-up, however many follow.
        decay: The fraction of all updates, the last ones, in which the rate falls; 0 for none.
        shape: How it falls, towards zero.

    Raises:
        TrainingError: If a number lies outside of its range.
    """

    warmup: int = 50
    decay: float = 0.2
    shape: DecayShape = SquareRootDecay()

    def __post_init__(self) -> None:
        NON_NEGATIVE_INTEGER.require(warmup=self.warmup)
        FRACTION.require(decay=self.decay)

    def stable(self, steps: int) -> int:
        """Return how many of all updates come before the decay."""
        return steps - round(self.decay * steps)

    def factor(self, step: int, steps: int) -> float:
        start = self.stable(steps)
        warm = min(1.0, (step + 1) / (self.warmup + 1))
        return warm * self.shape.factor((step - start) / (steps - start)) if step > start else warm


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


def read_schedule(record: Any) -> Schedule | None:
    """Return the schedule of language models that a run's record describes, or None if it does not
    describe one."""
    try:
        found = _read(record)
    except (KeyError, TypeError, TrainingError):
        return None
    return found if isinstance(found, Schedule) else None


def _read(record: Any) -> Any:
    if not isinstance(record, dict):
        return record
    content = {name: _read(part) for name, part in record.items() if name != "type"}
    return _STORED[record["type"]](**content)


_STORED = {
    kind.__name__: kind
    for kind in (
        *(Cosine, Linear, Constant, WarmupStableDecay),
        *(LinearDecay, SquareRootDecay, CosineDecay),
    )
}


SCHEDULES: Mapping[str, type[Any]] = {
    "cosine": Cosine,
    "linear": Linear,
    "constant": Constant,
    "wsd": WarmupStableDecay,
}
"""Schedules by the names that commands and plans use."""
DECAY_SHAPES: Mapping[str, DecayShape] = {
    "sqrt": SquareRootDecay(),
    "linear": LinearDecay(),
    "cosine": CosineDecay(),
}
"""Likewise the shapes in which the rate of `WarmupStableDecay` falls."""


def _phase(step: int, steps: int, warmup: int) -> tuple[float, float]:
    """(fraction of the warm-up done, fraction of the rest done)."""
    warmup = min(warmup, steps // 5)
    return min(1.0, (step + 1) / (warmup + 1)), max(0, step - warmup) / (steps - warmup)
