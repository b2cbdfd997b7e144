"""Learning rates against the formulas as they were first written, to the last bit: stored runs are
gone on with.
"""

from __future__ import annotations

import math

import pytest

from fastweights.training.loop.identity import to_json_value
from fastweights.training.loop.schedules import (
    Constant,
    Cosine,
    CosineAnnealing,
    CosineDecay,
    DecayShape,
    Linear,
    LinearDecay,
    Schedule,
    SquareRootDecay,
    WarmupStableDecay,
    read_schedule,
)

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


# Warm-up, stable phase, decay


def falling(shape: str, n: int, total: int) -> float:
    """MiniCPM section 4 and Hägele et al., section 3: update n of a decay of `total`."""
    return {
        "LinearDecay": 1 - n / total,
        "SquareRootDecay": 1 - (n / total) ** 0.5,
        "CosineDecay": 0.5 * (1 + math.cos(math.pi * n / total)),
    }[shape]


@pytest.mark.parametrize("shape", [LinearDecay(), SquareRootDecay(), CosineDecay()])
@pytest.mark.parametrize("decay", [0.0, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("steps", [1, 2, 7, 50, 301])
def test_the_rate_rises_stays_and_falls(shape: DecayShape, decay: float, steps: int) -> None:
    schedule = WarmupStableDecay(warmup=4, decay=decay, shape=shape)
    last = round(decay * steps)
    for step in range(steps):
        expected = min(1.0, (step + 1) / 5)
        if step >= steps - last:
            expected *= falling(type(shape).__name__, step - (steps - last), last)
        assert schedule.factor(step, steps) == pytest.approx(expected, rel=1e-12)
        assert 0 < schedule.factor(step, steps) <= 1
    assert (schedule.factor(steps - 1, steps) < min(1.0, steps / 5)) == (last > 1)


@pytest.mark.parametrize("steps", [40, 50, 301])
def test_what_comes_before_the_decay_knows_no_end(steps: int) -> None:
    schedule = WarmupStableDecay(warmup=4)
    open_ended = [Constant(warmup=4).factor(step, 1) for step in range(steps)]
    rates = [schedule.factor(step, steps) for step in range(steps)]
    stable = schedule.stable(steps)
    assert stable == steps - round(0.2 * steps)
    assert rates[: stable + 1] == open_ended[: stable + 1]
    assert rates[stable + 1] < open_ended[stable + 1]


SCHEDULES = (
    Cosine(3, 0.02),
    Linear(7),
    Constant(2),
    *(WarmupStableDecay(5, 0.25, shape) for shape in (SquareRootDecay(), CosineDecay())),
)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_a_schedule_is_read_from_its_record(schedule: Schedule) -> None:
    record = to_json_value(schedule)
    assert read_schedule(record) == schedule
    fewer = {"type": type(schedule).__name__}
    assert read_schedule(fewer) == type(schedule)()


@pytest.mark.parametrize(
    "record",
    [
        *(None, 3, "Cosine", [], {}, {"type": "Unknown"}, {"type": "SquareRootDecay"}),
        *({"type": "Cosine", "warmup": -1}, {"type": "Cosine", "other": 1}),
    ],
)
def test_what_is_no_schedule_is_none(record: object) -> None:
    assert read_schedule(record) is None
