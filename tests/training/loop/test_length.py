"""Runs that become longer, or shorter, after they began."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fastweights.train import (
    CheckpointError,
    Constant,
    Cosine,
    Linear,
    LinearDecay,
    LoRA,
    Schedule,
    TrainConfig,
    WarmupStableDecay,
    train,
)
from fastweights.training.language.existing import ExistingModel
from fastweights.training.loop.length import change_end
from killable_runs import end_of, launch_two, stop_after, tiny

RESULTS = ("model", "adapter")


def open_ended(folder: Path, steps: int, **changes) -> TrainConfig:
    return tiny(folder, schedule=Constant(warmup=3), steps=steps, **changes)


def with_decay(folder: Path, steps: int, decay: float = 0.34, **changes) -> TrainConfig:
    """The last third falls: of 6 steps 5 and 6, the first of which is still made at the peak."""
    return tiny(folder, schedule=WarmupStableDecay(3, decay, LinearDecay()), steps=steps, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("length")
    train(open_ended(folder, 6), folder / "at-once", cpu=True)
    train(tiny(folder), folder / "cosine", cpu=True)
    train(with_decay(folder, 6), folder / "with-decay", cpu=True)
    return folder


def test_a_longer_run_is_the_one_that_was_asked_for_at_once(folder, tmp_path):
    train(open_ended(folder, 3), tmp_path / "out", cpu=True)
    assert (tmp_path / "out" / "model").exists()
    assert train(open_ended(folder, 6), tmp_path / "out", cpu=True).complete
    assert end_of(tmp_path / "out") == end_of(folder / "at-once")


def test_a_stopped_run_becomes_longer_and_shorter(folder, tmp_path):
    train(open_ended(folder, 1000), tmp_path / "out", cpu=True, stop=stop_after(2))
    assert train(open_ended(folder, 6), tmp_path / "out", cpu=True).complete
    assert end_of(tmp_path / "out") == end_of(folder / "at-once")


@pytest.mark.long
def test_adapters_go_on_too(folder, tmp_path):
    model = ExistingModel(str(folder / "cosine"), LoRA(2))
    train(open_ended(folder, 6, model=model), tmp_path / "once", cpu=True)
    train(open_ended(folder, 3, model=model), tmp_path / "twice", cpu=True)
    train(open_ended(folder, 6, model=model), tmp_path / "twice", cpu=True)
    assert end_of(tmp_path / "twice") == end_of(tmp_path / "once")


@pytest.mark.slow
def test_two_processes_go_on(folder, tmp_path):
    launch_two(_train, open_ended(folder, 3), tmp_path / "out")
    launch_two(_train, open_ended(folder, 6), tmp_path / "out")
    (rows, _), (expected, _) = end_of(tmp_path / "out"), end_of(folder / "at-once")
    for ours, theirs in zip(rows, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def _train(config: TrainConfig, out: Path) -> None:
    train(config, out, cpu=True)


@pytest.mark.parametrize("steps", [3, 9])
@pytest.mark.parametrize("schedule", [tiny, Linear])
def test_rates_that_depend_on_the_steps_say_what_to_do(folder, tmp_path, steps, schedule):
    config = tiny(folder) if schedule is tiny else tiny(folder, schedule=Linear(1))
    out = folder / "cosine"
    if schedule is Linear:
        out = tmp_path / "linear"
        train(config, out, cpu=True)
    before = end_of(out)
    message = (
        rf"a run of 6 steps, which cannot become {steps}: .* --from {out} --steps {steps} --out"
        " FOLDER.* --schedule constant"
    )
    with pytest.raises(CheckpointError, match=message):
        train(replace(config, steps=steps), out, cpu=True)
    assert end_of(out) == before


# A stable phase and its decay


@pytest.mark.parametrize("asked", [100, 12])
def test_a_run_in_its_stable_phase_gets_another_end(folder, tmp_path, asked):
    out = tmp_path / "out"
    train(with_decay(folder, asked), out, cpu=True, stop=stop_after(3))
    assert train(with_decay(folder, 6), out, cpu=True).complete
    assert end_of(out) == end_of(folder / "with-decay")


@pytest.mark.parametrize(
    "schedule", [WarmupStableDecay(3, 0.0), Constant(3)], ids=["no decay yet", "constant"]
)
def test_a_complete_run_without_decay_gets_it(folder, tmp_path, schedule: Schedule):
    out = tmp_path / "out"
    assert train(tiny(folder, schedule=schedule, steps=3), out, cpu=True).complete
    assert train(with_decay(folder, 6), out, cpu=True).complete
    assert end_of(out) == end_of(folder / "with-decay")


@pytest.mark.parametrize(("steps", "decay"), [(12, 0.34), (6, 0.0), (6, 0.5), (5, 0.34)])
def test_a_run_in_its_decay_says_what_to_do(folder, steps, decay):
    before = end_of(folder / "with-decay")
    message = (
        rf"a run of 6 steps, which cannot become {steps}: step [56] of the 6 that it has made would"
        rf" have had another learning rate \(WarmupStableDecay schedule\); .* --from .* --steps"
        rf" {steps} --out FOLDER.* --schedule wsd"
    )
    with pytest.raises(CheckpointError, match=message):
        train(with_decay(folder, steps, decay), folder / "with-decay", cpu=True)
    assert end_of(folder / "with-decay") == before


def test_a_schedule_that_differs_in_what_was_made_is_refused(folder):
    message = r"step 1 of the 6 .* \(Constant and Cosine schedule\)"
    with pytest.raises(CheckpointError, match=message):
        train(tiny(folder, schedule=Cosine(warmup=1)), folder / "at-once", cpu=True)


def test_fewer_steps_than_made_are_refused(folder):
    before = end_of(folder / "at-once")
    with pytest.raises(CheckpointError, match="has made 6 steps, and 5 are fewer; ask for 6 or"):
        train(open_ended(folder, 5), folder / "at-once", cpu=True)
    assert end_of(folder / "at-once") == before


def test_another_run_keeps_its_number(folder):
    with pytest.raises(CheckpointError, match=r"another run \(steps was 6, is 9; seed was 0, is 1"):
        train(open_ended(folder, 9, seed=1), folder / "at-once", cpu=True)
    assert json.loads((folder / "at-once" / "run.json").read_text())["steps"] == 6


def test_nothing_happens_where_nothing_changes(folder, tmp_path):
    before = end_of(folder / "at-once")
    change_end(folder / "at-once", open_ended(folder, 6), RESULTS)
    change_end(tmp_path / "not-there", open_ended(folder, 6), RESULTS)
    assert end_of(folder / "at-once") == before
    assert not (tmp_path / "not-there").exists()


def test_a_kill_between_removal_and_record_loses_nothing(folder, tmp_path, monkeypatch):
    train(open_ended(folder, 3), tmp_path / "out", cpu=True)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fastweights.training.loop.length.write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            train(open_ended(folder, 6), tmp_path / "out", cpu=True)
    assert not (tmp_path / "out" / "model").exists()
    assert train(open_ended(folder, 3), tmp_path / "out", cpu=True).complete
    assert (tmp_path / "out" / "model").exists()
    train(open_ended(folder, 6), tmp_path / "out", cpu=True)
    assert end_of(tmp_path / "out") == end_of(folder / "at-once")
