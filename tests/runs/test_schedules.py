"""Learning rates against the formulas as they were first written, to the last bit: stored runs are
gone on with.
"""

from __future__ import annotations

import math

import pytest

from fastweights.runs.schedules import Constant, Cosine, CosineAnnealing, Linear, Schedule

STEPS = (1, 2, 7, 50, 301)
PEAKS = (1e-2, 3e-3, 2.5e-4)


def first_factor(schedule: Cosine | Linear, step: int, steps: int) -> float:
    """That of language models and linearizations."""
    warmup = min(schedule.warmup, steps // 5)
    warm, done = min(1.0, (step + 1) / (warmup + 1)), max(0, step - warmup) / (steps - warmup)
    if isinstance(schedule, Linear):
        return warm * (1 - done)
    return warm * (schedule.floor + (1 - schedule.floor) * (1 + math.cos(math.pi * done)) / 2)


def first_rate(
    schedule: CosineAnnealing | Constant, peak: float, step: int, steps: int, epoch: int
) -> float:
    """That of sweeps."""
    if isinstance(schedule, Constant):
        return peak
    if schedule.by_epoch:
        step, steps = step // epoch, steps // epoch
    warmup = schedule.warmup if schedule.warmup >= 1 else schedule.warmup * steps
    if step < warmup:
        return schedule.start + (peak - schedule.start) * step / warmup
    final = schedule.final * peak if schedule.relative else schedule.final
    return final + (peak - final) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


@pytest.mark.parametrize("schedule", [Cosine(), Cosine(3, 0.02), Linear(), Linear(0), Linear(7)])
def test_rates_of_training_are_what_they_were(schedule: Cosine | Linear) -> None:
    for steps in STEPS:
        for step in range(steps):
            factor = first_factor(schedule, step, steps)
            assert schedule.factor(step, steps) == factor
            for peak in PEAKS:
                assert schedule.for_epochs(4).rate(peak, step, steps) == factor * peak


@pytest.mark.parametrize(
    "schedule",
    [
        Constant(),
        CosineAnnealing(),
        CosineAnnealing(0.1),
        CosineAnnealing(5, 1e-7, 1e-5),
        CosineAnnealing(0.1, 1e-6, 0.1, relative=True),
        CosineAnnealing(0.1, final=5e-6, by_epoch=True),
        CosineAnnealing(by_epoch=True),
    ],
)
def test_rates_of_protocols_are_what_they_were(schedule: Schedule) -> None:
    for epoch, epochs in ((1, 7), (4, 6), (50, 3)):
        for step in range(epoch * epochs):
            for peak in PEAKS:
                assert schedule.for_epochs(epoch).rate(peak, step, epoch * epochs) == first_rate(
                    schedule, peak, step, epoch * epochs, epoch
                )
