"""The timing of functions, which every benchmark uses.

Contenders are called in turn, A B A B, so that whatever else the machine does affects all of them
alike. The first call of each is a warm-up; it counts only where it alone has used up the
contender's time. A sample is one call, or as many as fill a millisecond. Reported are the median
and the quantiles at 20 and 80 %.
"""

from __future__ import annotations

import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, TypeVar

import torch

Function = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """The seconds per call of a function: the median, and quantiles at 20 and 80 %."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        """Compute the median and the quantiles at 20 and 80 % of at least one sample."""
        cuts = quantiles([*samples, *samples], n=10, method="inclusive")
        return cls(median=cuts[4], low=cuts[1], high=cuts[7], runs=len(samples))

    @property
    def spread(self) -> float:
        """high - low, as a fraction of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class Failure:
    """The reason why a function could not be timed."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        lines = str(error).strip().splitlines() or ["(no message)"]
        return cls(f"{type(error).__name__}: {lines[0]}")


@dataclass(frozen=True, kw_only=True)
class TimedRow:
    """The time of one contender.

    Attributes:
        seconds: Time per call; None where it failed, which `note` explains.
        spread: (high - low) / median.
        ratio: Its time / that of the contender it is compared with.
    """

    seconds: Times | None = None
    spread: float | None = None
    ratio: float | None = None
    note: str = ""


def timed(found: Times | Failure, first: Times | Failure | None, note: str = "") -> dict[str, Any]:
    """Return the fields of a `TimedRow`, compared with `first`."""
    if isinstance(found, Failure):
        return {"note": found.reason}
    ratio = found.median / first.median if isinstance(first, Times) else None
    return {"seconds": found, "spread": found.spread, "ratio": ratio, "note": note}


@dataclass(frozen=True)
class Budget:
    """The limits of timing one contender: `seconds` after its warm-up, and at most `runs`
    samples."""

    seconds: float = 2.0
    runs: int = 15


class DeviceClock(ABC):
    """A clock for calls on one kind of device."""

    @abstractmethod
    def sample(self, function: Function, calls: int) -> float:
        """Measure the seconds per call of `calls` calls."""

    @abstractmethod
    def calls(self, first: float) -> int:
        """Return how many calls make a sample, given the seconds of the first."""


class WallClock(DeviceClock):
    """The clock for devices that have finished when a call returns: CPUs."""

    def sample(self, function: Function, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    def calls(self, first: float) -> int:
        return max(1, min(1000, math.ceil(1e-3 / max(first, 1e-9))))


class CudaClock(DeviceClock):
    """The clock for CUDA: events on the stream, with the level-2 cache flushed before every call.

    The GPU idles before a call for longer than the host takes to enqueue it, so that what is
    measured is the GPU's time: the host's is another figure.
    """

    def __init__(self, device: torch.device) -> None:
        self._dirt = torch.empty(1 << 28, dtype=torch.int8, device=device)

    def sample(self, function: Function, calls: int) -> float:
        total = 0.0
        for _ in range(calls):
            self._dirt.zero_()
            torch.cuda._sleep(8_000_000)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            function()
            after.record()
            torch.cuda.synchronize(self._dirt.device)
            total += before.elapsed_time(after) / 1e3
        return total / calls

    def calls(self, first: float) -> int:
        return 1


def clock_of(device: torch.device) -> DeviceClock:
    """Return the clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else WallClock()


@dataclass
class _Candidate:
    function: Function
    calls: int
    first: float
    samples: list[float] = field(default_factory=list)
    spent: float = 0.0

    def goes_on(self, budget: Budget) -> bool:
        return (
            self.spent < budget.seconds
            and self.first < budget.seconds
            and len(self.samples) < budget.runs
        )

    def run(self, clock: DeviceClock) -> None:
        self.samples.append(clock.sample(self.function, self.calls))
        self.spent += self.samples[-1] * self.calls


def time_in_turn(
    functions: Mapping[str, Function], clock: DeviceClock, budget: Budget
) -> dict[str, Times | Failure]:
    """Time functions in turn; one that raises an error maps to a `Failure`."""
    samples = sample_in_turn(functions, clock, budget)
    return {
        name: found if isinstance(found, Failure) else Times.of(found)
        for name, found in samples.items()
    }


def sample_in_turn(
    functions: Mapping[str, Function], clock: DeviceClock, budget: Budget
) -> dict[str, list[float] | Failure]:
    """Return the seconds per call of each function in at least one sample.

    A function that raises an error maps to a `Failure`.
    """
    gc.collect()
    found: dict[str, _Candidate | Failure] = {
        name: _warm_up(f, clock) for name, f in functions.items()
    }
    while running := [
        (n, c) for n, c in found.items() if isinstance(c, _Candidate) and c.goes_on(budget)
    ]:
        for name, contender in running:
            try:
                contender.run(clock)
            except Exception as error:
                found[name] = Failure.of(error)
    return {
        name: (c.samples or [c.first]) if isinstance(c, _Candidate) else c
        for name, c in found.items()
    }


def require_all(found: Mapping[str, T | Failure]) -> dict[str, T]:
    """Return what was found of every function.

    Raises:
        RuntimeError: If one of them failed.
    """
    for name, one in found.items():
        if isinstance(one, Failure):
            raise RuntimeError(f"{name} was not timed: {one.reason}")
    return {name: one for name, one in found.items() if not isinstance(one, Failure)}


def _warm_up(function: Function, clock: DeviceClock) -> _Candidate | Failure:
    try:
        first = clock.sample(function, 1)
        again = first if first > 0.1 else clock.sample(function, 1)
    except Exception as error:
        return Failure.of(error)
    return _Candidate(function, clock.calls(again), first)
