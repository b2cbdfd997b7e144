"""What makes two runs the same, now and in folders of earlier versions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastweights.lab.reproduce import CLAIMS
from fastweights.lab.reproduce.conversion import Conversions
from fastweights.lab.reproduce.published import Destroyed, with_second_softmax
from fastweights.lab.reproduce.run import Ledger
from fastweights.lab.reproduce.text import SMALL
from fastweights.lab.sweep.folder import SweepFolder
from fastweights.lab.sweep.plan import SweepModel, SweepPlan, SweepRun
from fastweights.lab.tasks import TASKS, Images
from fastweights.linearize.distill.fit import Fit
from fastweights.mixers import MIXERS, plugin
from fastweights.runs import identity
from fastweights.runs.errors import CheckpointError
from fastweights.runs.folder import create_run, is_run, keyed_folder
from fastweights.runs.identity import (
    VERSION,
    current_path,
    differences,
    former_key,
    former_repr,
    key_of,
    to_record,
)
from fastweights.text.corpus import Text
from fastweights.text.tokenizers import ExistingTokenizer
from fastweights.train.architectures import Architecture, PresetArchitecture
from fastweights.train.loop import Every, TrainConfig


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


# records ------------------------------------------------------------------------------------------


def test_a_record_is_of_its_value() -> None:
    record = through_json(to_record(CONFIG))
    assert record["identity"] == VERSION
    assert record["inner"]["type"] == "Inner"
    assert list(differences(record, CONFIG)) == []


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


def test_renamed_types_and_modules_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Renamed:
        rate: float = 0.1
        names: tuple[str, ...] = ("a", "b")

    @dataclass(frozen=True)
    class Path:
        mixer: str

    monkeypatch.setattr(identity, "FIRST_NAMES", {"Renamed": "Inner"})
    monkeypatch.setattr(identity, "FIRST_MODULES", {"pkg.lab.": "pkg."})
    assert list(differences(to_record(Inner(0.3)), Renamed(0.3))) == []
    assert key_of(Renamed(0.3)) == key_of(Inner(0.3))
    assert list(differences(to_record(Path("pkg.own:Class")), Path("pkg.lab.own:Class"))) == []
    assert key_of(Path("pkg.own:Class")) == key_of(Path("pkg.lab.own:Class"))
    assert current_path("pkg.own:Class") == "pkg.lab.own:Class"


def test_a_later_field_is_no_part_of_version_0(monkeypatch: pytest.MonkeyPatch) -> None:
    before, later = former_key(Config(3)), grown()
    later.__qualname__ = "Config"
    assert former_key(later(3)) != before
    monkeypatch.setattr(identity, "LATER_FIELDS", {"Config": ("bf16",)})
    assert former_key(later(3)) == before
    assert former_key(later(3, bf16=True)) != before


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


# version 0 ----------------------------------------------------------------------------------------

TRAIN = {
    "type": "TrainConfig",
    "text": {"type": "Text", "sources": ["shakespeare"], "validation": [],
             "tokenization": {"type": "Bytes"}},
    "model": {"type": "Architecture", "mixers": [{"name": "metala"}], "layers": 2, "width": 64},
    "optimizer": {"type": "AdamW", "lr": 0.003, "betas": [0.9, 0.95], "weight_decay": 0.1,
                  "eps": 1e-08},
    "schedule": {"type": "Cosine", "warmup": 50, "floor": 0.1},
    "every": {"type": "Every", "log": 10, "evaluation": 100, "checkpoint": 50},
    "steps": 600, "batch": 4, "length": 64, "accumulate": 1, "clip": 1.0, "bf16": False, "seed": 0,
}  # fmt: skip
TRAIN_CONFIG = TrainConfig(
    model=Architecture(({"name": "metala"},), 2, 64),
    every=Every(checkpoint=50),
    steps=600,
    batch=4,
    length=64,
)
FIT = {
    "type": "Fit", "steps": 20, "batch": 4, "accumulate": 1,
    "optimizer": {"type": "AdamW", "lr": 0.01, "betas": [0.9, 0.999], "weight_decay": 0.0,
                  "eps": 1e-08},
    "schedule": {"type": "Linear", "warmup": 0}, "clip": 1.0,
    "every": {"type": "Every", "log": 10, "evaluation": 100, "checkpoint": 20}, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        (TRAIN, TRAIN_CONFIG),
        (
            {
                **TRAIN,
                "model": {"type": "Named", "name": "llama"},
                "text": {**TRAIN["text"], "tokenization": {"type": "Pretrained", "source": "t"}},
            },
            replace(
                TRAIN_CONFIG,
                model=PresetArchitecture("llama"),
                text=Text(tokenization=ExistingTokenizer("t")),
            ),
        ),
        (FIT, Fit(steps=20, batch=4, every=Every(checkpoint=20))),
    ],
)
def test_folders_of_version_0_are_found_again(stored: Any, value: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    create_run(out, value)
    assert is_run(out, value)
    (out / "run.json").write_text(json.dumps(stored))
    assert is_run(out, value)
    with pytest.raises(CheckpointError, match=r"seed was 0, is 7"):
        is_run(out, replace(value, seed=7))


def plan(steps: int) -> SweepPlan:
    return SweepPlan(
        {"mqar-small-32x4": TASKS["mqar-small-32x4"]},
        tuple(SweepModel(name, name) for name in ("softmax", "metala", "deltanet")),
        rates=(3e-3,),
        seeds=(0, 1),
        training={"steps": steps},
        every=10,
    )


SWEEP = {
    20: ("b9953d4647a2fb29", "13fba810d03560bb", "18dbbb2ab98d297f", "d5d4ed953b9f23d8",
         "f9e650966e50d3df", "7b9d33fa07c08d30"),
    150: ("e469c90dd107f7fb", "286fed95ceb28856", "ca285c02b9787209", "a17afffbe23a5335"),
}  # fmt: skip
ROW = {
    "key": "ca285c02b9787209", "task": "mqar-small-32x4", "mixer": "metala", "width": 64,
    "parameters": 50240, "state": 5648, "rate": 0.003, "decay": 0.1, "seed": 0, "accuracy": 0.22,
    "macro": 0.22, "loss": 2.95, "step": 150, "solved": None, "steps": 150, "diverged": False,
    "seconds": 5.8, "curve": [],
}  # fmt: skip


@pytest.mark.parametrize("steps", SWEEP)
def test_runs_of_a_sweep_have_their_former_keys(steps: int) -> None:
    runs = list(plan(steps).runs())[: len(SWEEP[steps])]
    assert [run.former_key for run in runs] == list(SWEEP[steps])
    assert len({run.key for run in runs} | set(SWEEP[steps])) == 2 * len(runs)


def test_a_mixer_in_a_module_that_moved_has_its_former_key() -> None:
    mixer = "fastweights.lab.reproduce.published:Destroyed"
    protocol = with_second_softmax(TASKS["lra-listops"])
    run = SweepRun("x", protocol, SweepModel(mixer, mixer), 1e-3, 0.1, 0)
    assert run.former_key == "bd9ac91a9dedf212"


def test_a_mixer_is_found_under_the_module_of_version_0() -> None:
    name = plugin("fastweights.reproduce.published:Destroyed")
    assert name == "fastweights.reproduce.published:Destroyed"
    assert MIXERS[name] is Destroyed


def test_rows_of_version_0_are_found_again_and_new_ones_bear_their_settings(
    tmp_path: Path,
) -> None:
    run, folder = list(plan(150).runs())[2], SweepFolder(tmp_path)
    assert folder.row(run) is None
    (tmp_path / "runs" / "ca285c02b9787209.json").write_text(json.dumps(ROW))
    row = folder.row(run)
    assert row is not None
    assert (row.key, row.steps) == (run.key, 150)
    folder.keep(run, row)
    path = tmp_path / "runs" / f"{run.key}.json"
    assert folder.row(run) == row
    assert json.loads(path.read_text())["run"]["rate"] == 3e-3
    path.write_text(path.read_text().replace('"clip": null', '"clip": 1.0'))
    with pytest.raises(ValueError, match=r"training.clip was 1.0, is None"):
        folder.row(run)


def experiment() -> Conversions:
    found = CLAIMS["lolcats-table1"].cpu.experiment
    assert isinstance(found, Conversions)
    return found


def test_trials_of_version_0_are_found_again(tmp_path: Path) -> None:
    trial, other = CLAIMS["lolcats-table1"].cpu.experiment.trials()[:2]
    line = {"trial": former_repr(trial), "name": "a", "minutes": 0.3, "commit": None}
    (tmp_path / "trials.jsonl").write_text(json.dumps({**line, "measures": []}) + "\n")
    found = Ledger(tmp_path).find(trial)
    assert found is not None
    assert found.name == "a"
    assert Ledger(tmp_path).find(other) is None


@pytest.mark.parametrize(
    ("folder", "value"),
    [
        ("models/6359bc69f7f8a5ba", lambda: experiment().teacher),
        ("tokenizers/838cf2145a3c3ca2", lambda: SMALL.text),
    ],
)
def test_what_claims_share_is_found_under_its_former_key(
    folder: str, value: Any, tmp_path: Path
) -> None:
    there = tmp_path / folder
    assert former_key(value()) == there.name
    assert keyed_folder(there.parent, value()).name == key_of(value())
    there.mkdir()
    assert keyed_folder(there.parent, value()) == there


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_trial_has_a_record_and_a_key_of_its_own(claim: str) -> None:
    for size in CLAIMS[claim].sizes.values():
        trials = size.experiment.trials()
        assert len({key_of(trial) for trial in trials}) == len(trials)
        assert not any(list(differences(through_json(to_record(t)), t)) for t in trials[:3])
