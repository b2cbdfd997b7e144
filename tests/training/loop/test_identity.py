"""What makes two runs the same."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastweights.errors import CheckpointError
from fastweights.lab.reproduce import CLAIMS
from fastweights.lab.tasks import Images
from fastweights.training.loop.folder import keyed_folder
from fastweights.training.loop.identity import (
    VERSION,
    differences,
    key_of,
    to_record,
)


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    names: tuple[str, ...] = ("a", "b")


@dataclass(frozen=True)
class Config:
    steps: int
    inner: Inner = Inner()
    fields: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Inner, ...] = ()


def grown() -> type[Any]:
    """`Config` as a later version has it."""

    @dataclass(frozen=True)
    class Config:
        steps: int
        inner: Inner = Inner()
        fields: dict[str, Any] = field(default_factory=dict)
        parts: tuple[Inner, ...] = ()
        bf16: bool = False

    return Config


def through_json(value: object) -> Any:
    return json.loads(json.dumps(value))


CONFIG = Config(3, Inner(0.2), {"heads": 2}, (Inner(), Inner(0.5)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Config(4, CONFIG.inner, CONFIG.fields, CONFIG.parts), "steps was 3, is 4"),
        (Config(3, Inner(0.1), CONFIG.fields, CONFIG.parts), "inner.rate was 0.2, is 0.1"),
        (Config(3, CONFIG.inner, {"heads": 1}, CONFIG.parts), "fields.heads was 2, is 1"),
        (Config(3, CONFIG.inner, {}, CONFIG.parts), "fields.heads was 2, is None"),
        (Config(3, CONFIG.inner, CONFIG.fields, (Inner(), Inner())), "parts.1.rate was 0.5, is 0"),
        (Config(3, CONFIG.inner, CONFIG.fields), "parts was [{"),
        (Inner(), "type was Config, is Inner"),
    ],
)
def test_a_changed_value_is_named(other: object, named: str) -> None:
    assert any(named in line for line in differences(through_json(to_record(CONFIG)), other))


def test_a_new_field_with_a_default_orphans_nothing() -> None:
    record, later = through_json(to_record(Config(3))), grown()
    assert list(differences(record, later(3))) == []
    assert key_of(later(3)) == key_of(Config(3))
    assert list(differences(record, later(3, bf16=True))) == ["bf16 was False, is True"]
    assert key_of(later(3, bf16=True)) != key_of(Config(3))


def test_what_a_newer_version_wrote_is_named() -> None:
    record = through_json(to_record(grown()(3, bf16=True)))
    assert list(differences(record, Config(3))) == ["bf16 was True, is unknown"]
    newer = {**to_record(Config(3)), "identity": VERSION + 1}
    assert list(differences(newer, Config(3))) == [
        f"identity was of version {VERSION + 1}, is of {VERSION}"
    ]


def test_keys_differ_where_values_do_and_equal_numbers_have_one() -> None:
    values = [Config(3), Config(4), Config(3, Inner(0.2)), Config(3, parts=(Inner(),)), Inner()]
    assert len({key_of(value) for value in values}) == len(values)
    assert key_of(Config(3, Inner(1.0))) == key_of(Config(3, Inner(1)))
    assert key_of(Config(3, fields={"a": 1, "b": 2})) == key_of(Config(3, fields={"b": 2, "a": 1}))


def test_arrays_are_told_apart_by_their_numbers_shapes_and_dtypes() -> None:
    zeros = np.zeros((2, 3), np.uint8)
    other = zeros.copy()
    other[1, 2] = 1
    arrays = [zeros, other, zeros.reshape(3, 2), zeros.astype(np.int8), zeros[:0]]
    configs = [Config(3, fields={"pixels": array}) for array in arrays]
    assert len({key_of(config) for config in configs}) == len(configs)
    assert key_of(Images(zeros, other[0])) == key_of(Images(zeros.copy(), other[0].copy()))
    stored = json.loads(json.dumps(to_record(Images(zeros, other[1]))))
    assert not list(differences(stored, Images(zeros.copy(), other[1])))
    (changed,) = differences(stored, Images(other, other[1]))
    assert changed.startswith("pixels was")


def test_what_json_has_not_is_refused() -> None:
    with pytest.raises(TypeError, match="a set"):
        key_of(Config(3, fields={"heads": {1, 2}}))


def test_a_changed_default_does_not_pass_for_the_same(tmp_path: Path) -> None:
    models = tmp_path / "models"
    folder = keyed_folder(models, Config(3))
    assert keyed_folder(models, Config(3)) == folder
    names = tmp_path / "models.jsonl"
    assert len(names.read_text().splitlines()) == 1
    names.write_text(names.read_text().replace("0.1", "0.7"))
    with pytest.raises(CheckpointError, match=r"inner.rate was 0.7, is 0.1"):
        keyed_folder(models, Config(3))


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_trial_has_a_record_and_a_key_of_its_own(claim: str) -> None:
    for size in CLAIMS[claim].sizes.values():
        trials = size.experiment.trials()
        assert len({key_of(trial) for trial in trials}) == len(trials)
        assert not any(list(differences(through_json(to_record(t)), t)) for t in trials[:3])
