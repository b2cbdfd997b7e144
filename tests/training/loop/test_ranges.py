"""What numbers may be, and that every record of settings holds to it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastweights import ranges
from fastweights.errors import TrainingError
from fastweights.ranges import Range
from fastweights.train import LoRA, TrainConfig, WarmupStableDecay
from fastweights.training.loop.optimizers import AdamW
from fastweights.training.loop.schedules import Constant, Cosine, CosineAnnealing, Linear, Stepwise
from fastweights.training.loop.stage import Every, Optimization

NOT_NUMBERS = ("7", None, [7], True, math.nan, math.inf, -math.inf, 1j)
EDGES = {
    "POSITIVE_INTEGER": ((1, 2**63 - 1, np.int64(3)), (0, -1, 2**63, 1.0)),
    "NON_NEGATIVE_INTEGER": ((0, 1), (-1, 2**63, 0.5)),
    "SEQUENCE_LENGTH": ((2, 10), (1, 0, -2, 2.0)),
    "POSITIVE_NUMBER": ((1e-300, 1, np.float32(0.5)), (0, -1e-9)),
    "NON_NEGATIVE_NUMBER": ((0, 1e300), (-1e-9, -1)),
    "FRACTION": ((0, 0.999), (1, -0.1)),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_range_has_its_edges(name):
    allowed, refused = EDGES[name]
    chosen: Range = getattr(ranges, name)
    assert [value for value in allowed if value not in chosen] == []
    assert [value for value in (*refused, *NOT_NUMBERS) if value in chosen] == []


def test_ranges_read_digits():
    assert ranges.POSITIVE_INTEGER.read("12") == 12
    assert ranges.POSITIVE_NUMBER.read("1e-3") == 1e-3
    for text in ("", "1.5", "-1", "nan", "1e3", "9" * 5000):
        with pytest.raises(ValueError):  # noqa: PT011 (Python's own words for some)
            ranges.POSITIVE_INTEGER.read(text)


def test_lists_are_lists_of_numbers():
    ranges.POSITIVE_NUMBER.require_all(rates=(1e-3, 1))
    with pytest.raises(TrainingError, match="rates = nan; it must be above 0 and finite"):
        ranges.POSITIVE_NUMBER.require_all(rates=[1e-3, math.nan])
    with pytest.raises(TrainingError, match=r"rates = 0.1; it must be a list of numbers"):
        ranges.POSITIVE_NUMBER.require_all(rates=0.1)


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (AdamW, {"lr": 0.0}),
        (AdamW, {"lr": -1e-3}),
        (AdamW, {"lr": math.inf}),
        (AdamW, {"lr": math.nan}),
        (AdamW, {"weight_decay": -0.1}),
        (AdamW, {"weight_decay": math.nan}),
        (AdamW, {"betas": (0.9, 1.0)}),
        (AdamW, {"eps": 0.0}),
        (Cosine, {"warmup": -1}),
        (Cosine, {"warmup": 1.5}),
        (Cosine, {"floor": math.nan}),
        (Linear, {"warmup": -1}),
        (CosineAnnealing, {"warmup": -0.1}),
        (CosineAnnealing, {"start": math.inf}),
        (CosineAnnealing, {"final": -1e-6}),
        (Stepwise, {"schedule": Constant(), "updates": 0}),
        (WarmupStableDecay, {"decay": 1.0}),
        (WarmupStableDecay, {"decay": -0.1}),
        (WarmupStableDecay, {"warmup": -1}),
        (LoRA, {"rank": 0}),
        (LoRA, {"alpha": 0.0}),
        (LoRA, {"dropout": 1.0}),
        (Optimization, {"clip": 0.0}),
        (Optimization, {"clip": -1.0}),
        (Optimization, {"clip": math.nan}),
        (Optimization, {"seed": -1}),
        (Optimization, {"seed": 2**63}),
        (Optimization, {"steps": 1.5}),
        (Optimization, {"steps": True}),
        (Optimization, {"every": Every(evaluation=-1)}),
        (Optimization, {"every": Every(checkpoint=0)}),
        *((Optimization, {name: 0}) for name in ("steps", "batch", "accumulate")),
        (Optimization, {"every": Every(log=0)}),
        (TrainConfig, {"length": 0}),
        (TrainConfig, {"length": 1.5}),
        (TrainConfig, {"z_loss": -0.1}),
    ],
)
def test_records_refuse_what_makes_no_sense(record, fields):
    with pytest.raises(TrainingError, match=f"{list(fields)[-1]}.* = .*; it must be "):
        record(**fields)


def test_no_clipping_is_none():
    assert Optimization(clip=None).clip is None
