"""Metrics that also go to trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastweights.train import train
from fastweights.training.loop.report import Reporter, Reporters, Summary
from fastweights.training.loop.tracking import TRACKERS, Tracker, track
from killable_runs import Heard, launch_two, stop_after, tiny


class Curve:
    """What Accelerate's trackers have."""

    def __init__(self, out: Path) -> None:
        self.out, self.rows, self.finished = out, list[tuple[int, dict]](), 0

    def log(self, values: dict, step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def summary(out: Path, step: int = 0) -> Summary:
    return Summary(out, "cpu", 1, 2, 3, 4, 5, step, 6)


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> list[Curve]:
    """The curves of a tracker ``json``, for which no package is missing."""
    made: list[Curve] = []

    def start(summary: Summary) -> Curve:
        made.append(Curve(summary.out))
        return made[-1]

    monkeypatch.setitem(TRACKERS, "json", start)  # type: ignore[arg-type]
    return made


def test_every_training_has_its_curve(curves, tmp_path):
    with track(["json"], Reporter()) as watch:
        for stage in ("transfer", "finetune"):
            watch.begin(summary(tmp_path / stage))
            watch.progress({"step": 1, "loss": 2.0})
        assert [curve.finished for curve in curves] == [1, 0]
    assert [curve.out.name for curve in curves] == ["transfer", "finetune"]
    assert [curve.rows for curve in curves] == [[(1, {"loss": 2.0})]] * 2
    assert [curve.finished for curve in curves] == [1, 1]


def test_the_curve_is_that_of_the_run(curves, tmp_path):
    shown = Heard()
    with track(["json"], shown) as watch:
        train(tiny(tmp_path), tmp_path / "out", cpu=True, reporter=watch)
    written = [
        json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().split("\n")[:-1]
    ]
    assert [{"step": step, **row} for step, row in curves[0].rows] == written
    assert [row["step"] for row in shown.rows] == [row["step"] for row in written]


def test_a_resumed_run_repeats_no_step(curves, tmp_path):
    for stop in (stop_after(3), lambda: False):
        with track(["json"], Reporter()) as watch:
            train(tiny(tmp_path), tmp_path / "out", cpu=True, reporter=watch, stop=stop)
    steps = [step for curve in curves for step, _ in curve.rows]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("failing", ["start", "log", "finish"])
def test_a_failure_is_a_note_and_no_end(tmp_path, failing):
    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    def start(summary: Summary) -> Curve:
        curve = Curve(summary.out)
        if failing == "start":
            fail()
        setattr(curve, failing, fail)
        return curve

    shown = Heard()
    tracker = Tracker("service", start, shown.note)
    result = train(tiny(tmp_path), tmp_path / "out", cpu=True, reporter=Reporters((tracker, shown)))
    tracker.close()
    assert result.complete
    assert [note for note in shown.notes if "service" in note] == [
        "service fails, and the training goes on without it: no network"
    ]
    assert [row["step"] for row in shown.rows] == [1, 2, 3, 4, 5, 6]


def test_a_missing_package_is_named_before_anything_begins(monkeypatch):
    monkeypatch.setattr("fastweights.environment.find_spec", lambda name: None)
    message = "tracking by wandb needs wandb: pip install wandb, or leave it out"
    with pytest.raises(ValueError, match=message), track(["wandb"], Reporter()):
        pass


@pytest.mark.slow
def test_of_several_processes_one_tracks(tmp_path):
    launch_two(_track_two, tmp_path)
    curves = json.loads((tmp_path / "curves-0.json").read_text())
    assert [step for step, _ in curves[0]] == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "curves-1.json").read_text()) == []


def _track_two(folder: Path) -> None:
    import os

    curves: list[Curve] = []
    tracker = Tracker("mine", lambda s: curves.append(Curve(s.out)) or curves[-1], print)
    train(tiny(folder), folder / "out", cpu=True, reporter=tracker)
    rows = [curve.rows for curve in curves]
    (folder / f"curves-{os.environ['RANK']}.json").write_text(json.dumps(rows))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_continues_a_curve_without_doubled_steps(tmp_path):
    """Killed after step 5, it goes on from the checkpoint of step 4."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    join_processes_alone()
    for first, last in ((0, 5), (4, 6)):
        with track(["tensorboard"], Reporter()) as watch:
            watch.begin(summary(tmp_path, first))
            for step in range(first + 1, last + 1):
                watch.progress({"step": step, "loss": 10.0 * first + step})
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["loss"]
    points = [(event.step, event.value) for event in found.Scalars("loss")]
    assert points == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 45), (6, 46)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_wandb_works_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    join_processes_alone()
    shown = Heard()
    (tmp_path / "run.json").write_text('{"type": "TrainConfig"}')
    for first in (0, 4):
        with track(["wandb"], shown) as watch:
            watch.begin(summary(tmp_path, first))
            watch.progress({"step": first + 1, "loss": 2.0})
    assert shown.notes == []
    key = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert {path.name[-len(key) :] for path in tmp_path.glob("wandb/offline-run-*")} == {key}


def join_processes_alone() -> Any:
    from fastweights.training.loop.processes import join_processes

    return join_processes()
