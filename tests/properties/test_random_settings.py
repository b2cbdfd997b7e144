"""What makes two runs the same, of random settings: records, keys, differences."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import optim

from fastweights.errors import CheckpointError, TrainingError
from fastweights.linearize import LinearAttentionConfig
from fastweights.linearize.convert.config import FEATURE_MAPS, RULE_PAPERS
from fastweights.ranges import (
    FRACTION,
    NON_NEGATIVE_INTEGER,
    NON_NEGATIVE_NUMBER,
    POSITIVE_INTEGER,
    POSITIVE_NUMBER,
    SEQUENCE_LENGTH,
)
from fastweights.train import (
    BPE,
    AdamW,
    Architecture,
    Bytes,
    Constant,
    Cosine,
    CosineDecay,
    Every,
    Linear,
    LinearDecay,
    Muon,
    SquareRootDecay,
    Text,
    TrainConfig,
    WarmupStableDecay,
)
from fastweights.training.loop.folder import create_run, is_run, keyed_folder
from fastweights.training.loop.identity import differences, key_of, to_json_value, to_record
from fastweights.training.loop.schedules import read_schedule
from laws import law

COUNT, WARMUP = st.integers(1, 2**40), st.integers(0, 2**20)
POSITIVE = st.floats(1e-12, 1e12)
NON_NEGATIVE = st.just(0.0) | POSITIVE
BELOW_ONE = st.floats(0, 1, exclude_max=True)
ADAMW = st.builds(
    AdamW, POSITIVE, st.tuples(BELOW_ONE, BELOW_ONE), weight_decay=NON_NEGATIVE, eps=POSITIVE
)
SHAPES = st.sampled_from([LinearDecay(), SquareRootDecay(), CosineDecay()])
SCHEDULES = st.one_of(
    st.builds(Cosine, WARMUP, NON_NEGATIVE),
    st.builds(Linear, WARMUP),
    st.builds(Constant, WARMUP),
    st.builds(WarmupStableDecay, WARMUP, BELOW_ONE, SHAPES),
)
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
MUON = st.builds(Muon, POSITIVE, BELOW_ONE, NON_NEGATIVE, st.booleans(), ADAMW)
VALUES = {
    "optimizer": ADAMW | MUON if hasattr(optim, "Muon") else ADAMW,
    "schedule": SCHEDULES,
    "text": st.builds(
        Text,
        st.lists(WORDS, min_size=1, max_size=3).map(tuple),
        st.lists(WORDS, max_size=2).map(tuple),
        st.just(Bytes()) | st.builds(BPE, st.integers(258, 999)),
        boundaries=st.booleans(),
        field=st.none() | WORDS,
        held_out=st.integers(2, 2**40),
    ),
    "model": st.builds(
        Architecture,
        st.lists(st.dictionaries(WORDS, WORDS | st.integers() | st.booleans()), min_size=1).map(
            tuple
        ),
        COUNT,
        COUNT,
    ),
    "every": st.builds(Every, COUNT, COUNT, COUNT),
    "steps": COUNT,
    "batch": COUNT,
    "length": st.integers(2, 2**40),
    "clip": st.none() | POSITIVE,
    "seed": WARMUP,
    "bf16": st.booleans(),
    "z_loss": NON_NEGATIVE,
}
CONFIGS = st.builds(TrainConfig, **VALUES)


def possible(record: type, *values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Records of those values that fit each other."""

    def build(chosen: tuple[Any, ...]) -> Any:
        try:
            return record(*chosen)
        except ValueError:
            return None

    return st.tuples(*values).map(build).filter(lambda built: built is not None)


ANALOGS = possible(
    LinearAttentionConfig,
    st.sampled_from(sorted(FEATURE_MAPS)),
    st.none() | COUNT,
    st.integers(0, 2**30),
    st.booleans(),
    st.booleans(),
    st.sampled_from(sorted(RULE_PAPERS)),
)
ANY = st.one_of(CONFIGS, ADAMW, SCHEDULES, ANALOGS)


def stored(value: Any) -> Any:
    """The record as it comes back from a file."""
    return json.loads(json.dumps(to_record(value)))


@law(calls=500, value=ANY)
def test_a_value_is_its_record(value: Any) -> None:
    assert list(differences(stored(value), value)) == []
    assert key_of(value) == key_of(replace(value))
    assert len(key_of(value)) == 16


@law(calls=500, one=CONFIGS, other=CONFIGS)
def test_what_differs_is_named_from_either_side(one: TrainConfig, other: TrainConfig) -> None:
    forth = {line.split(" was ")[0] for line in differences(stored(one), other)}
    back = {line.split(" was ")[0] for line in differences(stored(other), one)}
    changed = {field.name for field in fields(one) if _part(one, field) != _part(other, field)}
    assert {path.split(".")[0] for path in forth} == {p.split(".")[0] for p in back} == changed
    assert (key_of(one) == key_of(other)) == (not changed)


def _part(value: Any, field: Any) -> Any:
    return json.loads(json.dumps(to_json_value(getattr(value, field.name))))


@pytest.mark.long
@law(calls=200, few=8, one=CONFIGS, other=CONFIGS)
def test_a_folder_is_of_one_run(one: TrainConfig, other: TrainConfig) -> None:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        assert not is_run(out, one)
        create_run(out, one)
        assert is_run(out, one)
        if any(differences(stored(one), other)):
            with pytest.raises(CheckpointError, match="holds another run"):
                is_run(out, other)
        assert keyed_folder(out / "many", one) == keyed_folder(out / "many", one)


@law(calls=300, schedule=SCHEDULES, steps=st.integers(1, 10**6), place=BELOW_ONE)
def test_rates_are_between_nothing_and_the_peak(schedule: Any, steps: int, place: float) -> None:
    factor = schedule.factor(int(place * steps), steps)
    top = max(1.0, getattr(schedule, "floor", 1.0))
    assert 0 <= factor <= top * (1 + 1e-12)
    assert read_schedule(to_json_value(schedule)) == schedule


NUMBERS = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
RANGES = st.sampled_from(
    [
        *(FRACTION, NON_NEGATIVE_INTEGER, NON_NEGATIVE_NUMBER),
        *(POSITIVE_INTEGER, POSITIVE_NUMBER, SEQUENCE_LENGTH),
    ]
)


@law(calls=300, value=NUMBERS, allowed=RANGES)
def test_a_range_takes_a_number_or_says_why_not(value: Any, allowed: Any) -> None:
    if value in allowed:
        allowed.require(number=value)
        assert allowed.read(str(value)) == value
        return
    with pytest.raises(TrainingError, match=r"^number = [\s\S]*; it must be "):
        allowed.require(number=value)


@law(
    calls=400,
    name=st.sampled_from(["steps", "batch", "accumulate", "length", "clip", "seed", "z_loss"]),
    value=NUMBERS,
)
def test_settings_are_numbers_of_their_range_or_refused(name: str, value: Any) -> None:
    try:
        config = TrainConfig(**{name: value})
    except TrainingError as error:
        assert " = " in str(error), error  # noqa: PT017
        return
    assert list(differences(stored(config), config)) == []
    json.dumps(stored(config), allow_nan=False)


@dataclass(frozen=True)
class Holder:
    """A value that decides something, of any JSON."""

    content: Any = None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
)


@law(calls=300, record=JSON, value=CONFIGS)
def test_a_foreign_record_is_another_run(record: Any, value: TrainConfig) -> None:
    assert is_dataclass(value)
    assert any(differences(record, value)) or record == {}


@law(calls=200, content=JSON)
def test_any_json_decides(content: Any) -> None:
    assert list(differences(stored(Holder(content)), Holder(content))) == []
    assert key_of(Holder(content)) == key_of(Holder(json.loads(json.dumps(content))))
