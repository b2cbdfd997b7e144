"""Sweeps: runs are functions of their contents, killed sweeps go on, and what is reported is what
was measured.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastweights.cli import main
from fastweights.errors import CheckpointError
from fastweights.lab.sweep import (
    AXES,
    InProcess,
    Local,
    Pool,
    Ray,
    Row,
    RunFailure,
    SweepFolder,
    SweepModel,
    SweepPlan,
    SweepRun,
    best,
    draw,
    fit,
    read_plan,
    sweep,
    unfinished,
)
from fastweights.lab.sweep.pool import Results
from fastweights.lab.sweep.trainer import Point, batches, train, updates_per_epoch
from fastweights.lab.tasks import (
    MQAR,
    TASKS,
    Backbone,
    Batch,
    Constant,
    CosineAnnealing,
    Protocol,
    Segment,
    TokenTask,
    TrainingSettings,
)
from fastweights.lab.tasks.base import BatchShare
from fastweights.mixers import MIXERS, plugin
from fastweights.training.loop.schedules import Cosine
from tolerances import TOLERANCE


@dataclass(frozen=True)
class Copy(TokenTask):
    """The label of every token is the token."""

    vocabulary: int = 5
    length: int = 4

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        ids = torch.from_numpy(generator.integers(self.vocabulary, size=(count, self.length)))
        return Batch(ids, ids)


FIELDS = {"num_hidden_layers": 1, "mlp": None, "embedding_dropout": 0.1}
TRAINING = TrainingSettings(
    (1e-2, 3e-2), (0.1,), batch=8, steps=6, schedule=CosineAnnealing(), best=True
)
COPY = Protocol(
    (Segment(Copy(), None),),
    (Segment(Copy(), 20),),
    TRAINING,
    Backbone(FIELDS, (8, 16)),
    "this test",
)
EPOCHS = replace(
    COPY,
    train=(Segment(Copy(), 20), Segment(Copy(length=3), 9)),
    training=replace(TRAINING, steps=None, epochs=3, schedule=CosineAnnealing(by_epoch=True)),
)
LINEAR = SweepModel.of(
    {"label": "one head", "name": "linear", "mixers": [{"name": "linear", "heads": 1}]}
)


def run(protocol: Protocol = COPY, contender: SweepModel = LINEAR, **changes: object) -> SweepRun:
    return replace(
        SweepRun("copy", protocol, contender, rate=1e-2, decay=0.1, seed=0, every=2), **changes
    )


def plan(**changes: object) -> SweepPlan:
    return replace(
        SweepPlan({"copy": COPY}, (LINEAR,), rates=(1e-2, 3e-2), seeds=(0, 1, 2), every=2),
        **changes,
    )


def timeless(row: Row) -> Row:
    return replace(
        row, seconds=0.0, curve=tuple(replace(point, seconds=0.0) for point in row.curve)
    )


# order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [COPY, EPOCHS], ids=["new examples", "epochs"])
def test_processes_share_the_batches_of_one(protocol: Protocol) -> None:
    def rows(share: BatchShare) -> list[list[list[int]]]:
        some = islice(batches(protocol, 3, share), 9)
        return [sorted(batch.inputs.tolist()) for batch in some]

    shares = [rows(BatchShare(index, 2)) for index in range(2)]
    assert [sorted(first + second) for first, second in zip(*shares, strict=True)] == rows(
        BatchShare()
    )
    assert all(batch for batch in shares[0])


@pytest.mark.parametrize("shuffled", [True, False])
def test_an_epoch_has_every_example_once(shuffled: bool) -> None:
    protocol = replace(EPOCHS, training=replace(EPOCHS.training, shuffled=shuffled))
    found = list(batches(protocol, seed=1))
    assert len(found) == 3 * updates_per_epoch(protocol) == 3 * (3 + 2)
    parts = protocol.training_set(1)
    for epoch in range(3):
        first, second = found[5 * epoch : 5 * epoch + 3], found[5 * epoch + 3 : 5 * epoch + 5]
        for pieces, part in zip((first, second), parts, strict=True):
            rows = [row.tolist() for piece in pieces for row in piece.inputs]
            assert sorted(rows) == sorted(part.inputs.tolist())
            assert (rows == part.inputs.tolist()) is not shuffled
    epochs = [
        [row.tolist() for piece in found[5 * e : 5 * e + 5] for row in piece.inputs]
        for e in range(3)
    ]
    assert (epochs[0] == epochs[1]) is not shuffled


def test_new_examples_are_those_of_the_protocol() -> None:
    for step, batch in zip(range(4), batches(COPY, seed=3), strict=False):
        assert torch.equal(batch.inputs, COPY.fresh(3, step, 8).inputs)


@pytest.mark.parametrize("by_epoch", [True, False])
def test_cosine_is_pytorchs(by_epoch: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    epochs, epoch = (6, 4) if by_epoch else (24, 1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs, eta_min=0.02)
    for step in range(24):
        schedule = CosineAnnealing(final=0.02, by_epoch=by_epoch).for_epochs(epoch)
        rate = schedule.rate(0.3, step, 24)
        assert math.isclose(rate, optimizer.param_groups[0]["lr"], rel_tol=TOLERANCE[torch.float64])
        optimizer.step()
        if (step + 1) % epoch == 0:
            scheduler.step()


@pytest.mark.parametrize("warmup", [10, 0.1])
def test_warm_up_is_a_straight_line(warmup: float) -> None:
    schedule = CosineAnnealing(warmup=warmup, start=0.5, final=0.1, relative=True)
    rates = [schedule.rate(2.0, step, 100) for step in range(100)]
    assert np.allclose(rates[:11], np.linspace(0.5, 2.0, 11), rtol=TOLERANCE[torch.float64])
    middle = 0.2 + (2.0 - 0.2) / 2
    assert math.isclose(rates[55], middle, rel_tol=TOLERANCE[torch.float64])
    assert Constant().rate(2.0, 99, 100) == 2.0


# one run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [COPY, EPOCHS], ids=["steps", "epochs"])
def test_a_run_is_a_function_of_its_content(protocol: Protocol) -> None:
    points = []
    one, again = fit(run(protocol), points.append), fit(run(protocol))
    assert timeless(one) == timeless(again)
    assert one.curve == tuple(points)
    assert timeless(fit(run(protocol, seed=1))) != timeless(one)


def test_a_run_is_adamw_on_the_mean_loss_of_all_labels() -> None:
    """Written out with logits of all positions and PyTorch's plain AdamW."""
    protocol = replace(COPY, backbone=Backbone({**FIELDS, "embedding_dropout": 0.0}, (8,)))
    row = fit(run(protocol))
    torch.manual_seed(0)
    model = protocol.model("linear", mixers=[{"name": "linear", "heads": 1}]).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, weight_decay=0.1, foreach=False, fused=False
    )
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + math.cos(math.pi * step / 6)) / 2
        batch = protocol.fresh(0, step, 8)
        loss = F.cross_entropy(
            model(input_ids=batch.inputs).logits.flatten(0, 1), batch.labels.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert math.isclose(row.curve[-1].train_loss, loss.item(), rel_tol=TOLERANCE[torch.float32])
    (test,) = protocol.validation_set(0)
    with torch.no_grad():
        right = model.eval()(input_ids=test.inputs).logits.argmax(-1) == test.labels
    assert row.curve[-1].accuracy == right.double().mean().item()


def test_bfloat16_is_close_and_a_run_of_its_own() -> None:
    half = run(replace(COPY, training=replace(TRAINING, bf16=True)))
    one, again, plain = fit(half), fit(half), fit(run())
    assert half.key != run().key
    assert timeless(one) == timeless(again)
    assert one.curve[-1].train_loss != plain.curve[-1].train_loss
    assert one.curve[-1].train_loss == pytest.approx(plain.curve[-1].train_loss, rel=0.02)


def test_the_row_says_what_was_run() -> None:
    row = fit(run())
    assert (row.task, row.mixer, row.width, row.rate, row.decay, row.seed) == (
        "copy",
        "one head",
        8,
        1e-2,
        0.1,
        0,
    )
    assert row.parameters == sum(
        p.numel() for p in COPY.model("linear", mixers=LINEAR.fields["mixers"]).parameters()
    )
    assert row.state == 4 * (8 * 8 + 8) + 8
    assert [point.step for point in row.curve] == [2, 4, 6]
    assert row.steps == 6


def test_training_stops_at_the_mark() -> None:
    protocol = replace(COPY, training=replace(TRAINING, steps=400, stop=0.9, best=False))
    row = fit(run(protocol, every=1))
    assert row.solved == row.steps == row.step < 400
    assert row.curve[-1].accuracy > 0.9 >= max(point.accuracy for point in row.curve[:-1])
    assert row.accuracy > 0.5


@pytest.mark.parametrize("best_counts", [True, False])
def test_the_model_that_counts(best_counts: bool) -> None:
    """At this rate accuracy falls in the end."""
    protocol = replace(
        COPY, training=replace(TRAINING, steps=12, schedule=Constant(), best=best_counts)
    )
    row = fit(run(protocol, rate=0.5))
    accuracies = [point.accuracy for point in row.curve]
    assert max(accuracies) > accuracies[-1]
    wanted = accuracies.index(max(accuracies)) if best_counts else len(accuracies) - 1
    assert row.step == row.curve[wanted].step


def test_a_run_that_diverges_ends_there() -> None:
    protocol = replace(COPY, training=replace(TRAINING, steps=40, schedule=Constant()))
    row = fit(run(protocol, rate=1e30))
    assert row.diverged
    assert row.steps < 40
    json.dumps(row.flat(), allow_nan=False)


# keys ---------------------------------------------------------------------------------------------


def test_keys_are_of_what_decides_the_result() -> None:
    one = run()
    assert one.key == run().key
    assert replace(one, task="another name").key == one.key
    assert replace(one, contender=replace(LINEAR, label="another label")).key == one.key
    others = [
        replace(one, rate=2e-2),
        replace(one, decay=0.0),
        replace(one, seed=1),
        replace(one, every=3),
        run(contender=SweepModel.of("linear")),
        run(contender=replace(LINEAR, fields={**LINEAR.fields, "hidden_size": 16})),
        run(replace(COPY, training=replace(TRAINING, clip=1.0))),
        run(replace(COPY, training=replace(TRAINING, bf16=True))),
        run(replace(COPY, training=replace(TRAINING, schedule=Constant()))),
        run(replace(COPY, test=(Segment(Copy(), 21),))),
        run(EPOCHS),
    ]
    assert len({one.key, *(other.key for other in others)}) == len(others) + 1
    assert run(replace(COPY, training=replace(TRAINING, rates=(1.0,)))).key == one.key


# plans --------------------------------------------------------------------------------------------

TOML = """
tasks = ["mqar-small-*"]
mixers = [
    "softmax",
    {label = "wide", name = "gla", mixers = [{name = "gla", heads = 1}], mlp = "gated"},
]
widths = [16, 32]
seeds = [0, 1, 2]
[training]
epochs = 2
"""


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "plan.toml").write_text(text)
    return tmp_path / "plan.toml"


def test_a_plan_is_read(tmp_path: Path) -> None:
    found = list(read_plan(written(tmp_path, TOML)).runs())
    assert len(found) == 2 * 2 * 2 * 2 * 3
    assert {one.task for one in found} == {"mqar-small-32x4", "mqar-small-64x8"}
    assert {one.config().hidden_size for one in found} == {16, 32}
    assert {(one.protocol.training.epochs, one.protocol.training.steps) for one in found} == {
        (2, None)
    }
    wide = next(one for one in found if one.contender.label == "wide").config()
    assert (wide.mlp, wide.mixers) == ("gated", [{"name": "gla", "heads": 1}])


def test_a_plan_sizes_its_tasks(tmp_path: Path) -> None:
    task = '{label = "many pairs", name = "mqar-small-32x4", length = 128, pairs = 32}'
    schedule = '[training]\nschedule = {name = "cosine", warmup = 7}'
    plan = f'tasks = ["mqar-small-32x4", {task}]\nmixers = ["gla"]\n{schedule}'
    path = written(tmp_path, plan)
    found = {run.protocol.training.schedule for run in read_plan(path).runs()}
    assert found == {Cosine(warmup=7)}
    plain, sized = read_plan(path).tasks.values()
    assert {segment.task for segment in (*sized.train, *sized.test)} == {
        replace(cast(MQAR, plain.task), length=128, pairs=32)
    }
    assert (sized.training, sized.backbone) == (plain.training, plain.backbone)


def test_a_plan_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    plain = read_plan(path)
    path.write_bytes(PLAN.encode("utf-8-sig"))
    assert read_plan(path) == plain
    path.write_bytes(PLAN.encode("utf-16"))
    with pytest.raises(ValueError, match=r"plan.toml is not UTF-8 at byte 0; it is UTF-16"):
        read_plan(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks = [", "cannot read"),
        ('tasks = [{name = "mqar-small-32x4"}]\nmixers = ["gla"]', "a label and a name"),
        ('tasks = [{label = "a", name = "mqar-*"}]\nmixers = ["gla"]', "name one of them"),
        (
            'tasks = [{label = "a", name = "mqar-small-32x4", width = 3}]\nmixers = ["gla"]',
            "MQAR takes length, noise, pairs, power, vocabulary, not width",
        ),
        (
            'tasks = [{label = "a", name = "mqar-small-32x4", pairs = 30}]\nmixers = ["gla"]',
            "the length is even and at least 4",
        ),
        ('tasks = ["mqar-small-32x4"]', "missing: mixers"),
        ('tasks = ["nothing"]\nmixers = ["gla"]', "no task is called 'nothing'"),
        ('tasks = ["mqar-small-32x4"]\nmixers = ["gla"]\nmixer = 1', "unknown: mixer"),
        ('tasks = ["mqar-small-32x4"]\nmixers = [{name = "gla"}]', "lacks a label"),
        ('tasks = ["mqar-small-32x4"]\nmixers = [5]', "neither a name nor a table"),
        ('tasks = "mqar-small-32x4"\nmixers = ["gla"]', "tasks = .* must be a list"),
        *(
            (f'tasks = ["mqar-small-32x4"]\nmixers = ["gla"]\n{line}', message)
            for line, message in {
                "rates = [0]": "rates = 0; it must be above 0 and finite",
                "rates = [1e-3, nan]": "rates = nan; it must be above 0",
                "rates = 0.1": "rates = 0.1; it must be a list of numbers",
                "decays = [-0.1]": "decays = -0.1; it must be 0 or more",
                "seeds = [-1]": "seeds = -1; it must be 0 or more",
                "seeds = []": "give one at least",
                "widths = [0]": "widths = 0; it must be 1 or more",
                "widths = [16.5]": "widths = 16.5; it must be 1 or more",
                "every = 0": "every = 0; it must be 1 or more",
                'every = "often"': "every = 'often'; it must be 1 or more",
                "training = 3": "training = 3; it must be a table",
                "[training]\nsteps = 0": "steps = 0; it must be 1 or more",
                "[training]\nsteps = -3": "steps = -3; it must be 1 or more",
                "[training]\nbatch = 0": "batch = 0; it must be 1 or more",
                "[training]\nepochs = 1.5": "epochs = 1.5; it must be 1 or more",
                '[training]\nschedule = "cosine"': "a table with a name, one of cosine",
                '[training]\nschedule = {name = "cosine", rate = 1}': "floor, warmup, not rate",
                '[training]\nschedule = {name = "wsd", warmup = -1}': "warmup = -1; it must be 0",
                "[training]\nclip = -1": "clip = -1; it must be above 0",
                "[training]\nbetas = [0.9, 1.0]": "betas = 1.0; it must be at least 0 and below 1",
            }.items()
        ),
    ],
)
def test_a_plan_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_plan(written(tmp_path, text))


@pytest.mark.parametrize("mixer", ['"glaa"', '{label = "x", name = "gla", hidden_size = "a"}'])
def test_a_model_that_cannot_be_built_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mixer: str
) -> None:
    path = written(tmp_path, f'tasks = ["mqar-small-32x4"]\nmixers = [{mixer}]')
    assert main(["sweep", str(path), "--out", str(tmp_path / "out"), "--workers", "0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fastweights: mqar-small-32x4, ")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_pools_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="workers = 0; it must be 1 or more"):
        Local(0)
    monkeypatch.setattr("fastweights.environment.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs ray: pip install ray, or leave out --ray"):
        Ray()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": (SweepModel.of("glaa"),)}, "unknown mixer 'glaa'"),
        ({"mixers": (SweepModel("x", "linear", {"mlpp": 1}),)}, "mlpp"),
        ({"training": {"step": 3}}, "not step"),
    ],
)
def test_a_plan_that_cannot_be_run(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(plan(**changes), tmp_path, InProcess())


# sweeps -------------------------------------------------------------------------------------------


@dataclass
class Watched(Pool):
    """Runs here, and dies after so many results; what it is asked to run is noted."""

    results_left: int
    asked: list[str]

    def results(self, runs: Sequence[SweepRun], folder: Path, device: str) -> Results:
        self.asked += [one.key for one in runs]
        for result in InProcess().results(runs, folder, device):
            yield result
            self.results_left -= 1
            if self.results_left == 0:
                raise KeyboardInterrupt


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    first, second = Watched(4, []), Watched(100, [])
    with pytest.raises(KeyboardInterrupt):
        sweep(plan(), tmp_path, first)
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 4
    (tmp_path / "runs" / ".0123.json.partial").write_text("{")
    rows = sweep(plan(), tmp_path, second)
    assert len(first.asked) == 6
    assert second.asked == first.asked[4:]
    straight = sweep(plan(), tmp_path / "straight", InProcess())
    assert [timeless(row) for row in rows] == [timeless(row) for row in straight]
    assert sweep(plan(), tmp_path, Watched(0, second.asked)) == rows
    assert len(second.asked) == 2


class KilledError(Exception):
    """What a run is killed by."""


def _killed_after(evaluations: int) -> Callable[[Point], None]:
    """A listener that kills a run at the evaluation after so many others."""
    left = iter(range(evaluations))

    def listen(point: Point) -> None:
        if next(left, None) is None:
            raise KilledError(point)

    return listen


@pytest.mark.parametrize("protocol", [COPY, EPOCHS], ids=["new examples", "epochs"])
@pytest.mark.parametrize("best_counts", [True, False])
def test_a_long_run_goes_on_where_it_was_killed(
    protocol: Protocol, best_counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = replace(protocol.training, best=best_counts)
    one, file = run(replace(protocol, training=training)), tmp_path / "state.safetensors"
    whole = train(one)
    monkeypatch.setattr(unfinished, "INTERVAL", 0.0)
    with pytest.raises(KilledError):
        train(one, _killed_after(2), unfinished=file)
    monkeypatch.setattr(unfinished, "INTERVAL", 1e9)
    heard = list[Point]()
    resumed = train(one, heard.append, unfinished=file)
    assert timeless(resumed.row()) == timeless(whole.row())
    assert heard == list(resumed.row().curve)
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    assert not file.exists()


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    file.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"state.safetensors is damaged .* remove it"):
        train(run(), unfinished=file)


def test_a_larger_plan_takes_over_what_it_has_in_common(tmp_path: Path) -> None:
    sweep(plan(), tmp_path, InProcess())
    pool = Watched(100, [])
    assert len(sweep(plan(seeds=(0, 1, 2, 3)), tmp_path, pool)) == 8
    assert len(pool.asked) == 2


def test_rows_are_written_as_json_and_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = sweep(plan(), tmp_path, InProcess())
    assert json.loads((tmp_path / "rows.json").read_text()) == [row.flat() for row in rows]
    assert parquet.read_table(tmp_path / "rows.parquet").to_pylist() == [row.flat() for row in rows]


def test_evaluations_are_logged_as_they_come(tmp_path: Path) -> None:
    (row,) = sweep(plan(rates=(1e-2,), seeds=(0,)), tmp_path, InProcess())
    assert SweepFolder(tmp_path).points(run()) == list(row.curve)


@dataclass(frozen=True)
class Broken(Copy):
    """Cannot be drawn."""

    def draw(self, generator: np.random.Generator, count: int) -> Batch:
        raise RuntimeError("no examples today")


def test_a_run_that_fails_does_not_end_the_sweep(tmp_path: Path) -> None:
    broken = replace(COPY, train=(Segment(Broken(), None),))
    tasks = {"broken": broken, "copy": COPY}
    seen: list[Row | RunFailure] = []
    rows = sweep(plan(tasks=tasks, seeds=(0,)), tmp_path, InProcess(), listener=seen.append)
    assert [row.task for row in rows] == ["copy", "copy"]
    assert [type(result) for result in seen] == [RunFailure, RunFailure, Row, Row]
    traces = [path.read_text() for path in (tmp_path / "failed").iterdir()]
    assert len(traces) == 2
    assert all("no examples today" in trace for trace in traces)
    again = Watched(100, [])
    sweep(plan(tasks=tasks, seeds=(0,)), tmp_path, again)
    assert len(again.asked) == 2


def test_a_sweep_without_a_listener_tells_of_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(COPY, train=(Segment(Broken(), None),))
    small = plan(tasks={"broken": broken, "copy": COPY}, rates=(1e-2,), seeds=(0,))
    (row,) = sweep(small, tmp_path, InProcess())
    failed, done = capsys.readouterr().err.splitlines()
    assert failed.startswith("1/2  ")
    assert failed.endswith("failed: RuntimeError: no examples today")
    assert done.startswith(f"2/2  {row.mixer}, copy, lr 0.01, seed 0: accuracy {row.accuracy:.3f}")
    sweep(small, tmp_path / "quiet", InProcess(), listener=lambda result: None)
    assert not capsys.readouterr().err


# summary and figures ------------------------------------------------------------------------------


def row(
    mixer: str, width: int, rate: float, seed: int, accuracy: float, solved: int | None = None
) -> Row:
    return Row(
        key=f"{mixer}{width}{rate}{seed}", task="t", mixer=mixer, width=width, parameters=1,
        state=4 * width, rate=rate, decay=0.1, seed=seed, accuracy=accuracy, macro=0.0, loss=0.0,
        step=1, solved=solved, steps=1, diverged=False, seconds=1.0, curve=(),
    )  # fmt: skip


ROWS = [
    row("a", 8, 1e-3, 0, 0.2),
    row("a", 8, 1e-3, 1, 0.9, solved=300),
    row("a", 8, 1e-2, 0, 0.6, solved=100),
    row("a", 8, 1e-2, 1, 0.8, solved=200),
    row("a", 16, 1e-2, 0, 0.7),
    row("b", 8, 1e-2, 0, 0.1),
    row("b", 8, 1e-2, 1, 0.3, solved=50),
    row("b", 8, 1e-2, 2, 0.5),
]


def test_the_best_rate_is_that_of_the_best_mean() -> None:
    """Not that of the best seed."""
    first, second, third = best(ROWS)
    assert (first.mixer, first.width, first.rate, first.accuracies) == ("a", 8, 1e-2, (0.6, 0.8))
    assert math.isclose(first.mean, 0.7)
    assert math.isclose(first.deviation, math.sqrt(0.02))
    assert first.solved == 150
    assert first.seconds == 4
    assert (second.width, second.deviation) == (16, 0)
    assert (third.mixer, third.median, third.solved) == ("b", 0.3, None)


def test_figures_show_means_and_the_whole_spread() -> None:
    (panel,) = draw(ROWS, AXES["width"]).axes
    lines = {line.get_label(): line.get_xydata() for line in panel.lines}
    assert np.allclose(lines["a"], [[8, 0.7], [16, 0.7]])
    assert np.allclose(lines["b"], [[8, 0.3]])
    (panel,) = draw(ROWS, AXES["rate"]).axes
    rates = {line.get_label(): line.get_xydata() for line in panel.lines}
    assert np.allclose(rates["b"], [[1e-2, 0.3]])
    assert [name for name, axis in AXES.items() if axis.separates(ROWS)] == [
        "width",
        "state",
        "rate",
    ]
    assert not AXES["width"].separates(ROWS[:4])


# mixers from a user's file ------------------------------------------------------------------------

MIXER = '''
from fastweights.mixers import LinearAttention


class Mine(LinearAttention):
    """A mixer of a user's own."""
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None) -> str:  # noqa: ARG001
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "mymixer.py").write_text(MIXER)
    monkeypatch.chdir(tmp_path)
    return "mypkg.mymixer:Mine"


def test_a_users_mixer_has_the_name_that_it_is_called_by(mine: str) -> None:
    assert plugin(mine) == mine == plugin(mine)
    assert MIXERS[mine].__name__ == "Mine"


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    "path", ["mypkg", "mypkg.none:Mine", "mypkg.mymixer:None_", "math:pi", "json:loads", ":M"]
)
def test_what_is_no_mixer(path: str) -> None:
    with pytest.raises(ValueError, match=r"as a mixer|names no class"):
        plugin(path)


def test_an_unknown_name_with_a_colon_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="plugin"):
        COPY.config("mypkg.other:Mine")


PLAN = """
tasks = ["mqar-small-32x4"]
mixers = ["linear"]
rates = [1e-2]
widths = [8, 16]
every = 4
[training]
steps = 4
batch = 4
"""


@pytest.mark.long
def test_the_command_runs_a_plan_with_a_users_mixer(
    mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--workers", "0", "--device", "cpu"]
    command = ["--debug", "sweep", str(written(tmp_path, PLAN)), "--mixer", mine, *here]
    assert main(command) == 0
    out = tmp_path / "runs" / "sweeps" / "plan"
    rows = json.loads((out / "rows.json").read_text())
    assert [(one["mixer"], one["width"]) for one in rows] == [
        (m, w) for m in ("linear", mine) for w in (8, 16)
    ]
    assert (out / "width.png").exists()
    assert "4 runs, 0 of them done before" in capsys.readouterr().out
    assert main(command) == 0
    assert "4 runs, 4 of them done before" in capsys.readouterr().out


# real processes -----------------------------------------------------------------------------------

SIXTY = """
tasks = ["mqar-small-32x4"]
mixers = ["linear", "metala"]
rates = [1e-3, 3e-3, 1e-2]
widths = [8, 16]
seeds = [0, 1, 2, 3, 4]
every = 10
[training]
steps = 20
batch = 8
"""


@pytest.mark.slow
def test_sixty_runs_are_killed_and_resumed(tmp_path: Path) -> None:
    """The parent is killed, so that nothing of it can tidy up; its workers end with it."""
    command = [sys.executable, "-m", "fastweights.cli", "sweep", str(written(tmp_path, SIXTY))]
    command += ["--device", "cpu"]
    command += ["--workers", "2", "--out", str(tmp_path / "out")]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    runs = tmp_path / "out" / "runs"
    while not runs.exists() or len(list(runs.glob("*.json"))) < 20:
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    session_ends(parent.pid)
    kept = {path: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert 20 <= len(kept) < 60
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert (
        len(list(runs.glob("*.json")))
        == len(json.loads((tmp_path / "out" / "rows.json").read_text()))
        == 60
    )
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def session_ends(leader: int) -> None:
    """Waits until no process of the session that `leader` began is left."""
    for _ in range(600):
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(leader, signal.SIGKILL)
    pytest.fail("workers outlived their parent by a minute")


@pytest.mark.slow
def test_ray_gives_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    one = plan(
        tasks={"mqar-small-32x4": TASKS["mqar-small-32x4"]},
        mixers=(SweepModel.of("linear"),),
        widths=(8,),
    )
    one = replace(one, training={"steps": 4, "batch": 4}, seeds=(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = sweep(one, tmp_path / "ray", Ray())
    assert [timeless(row) for row in rows] == [
        timeless(row) for row in sweep(one, tmp_path / "here", InProcess())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mqar-small-32x4", "mqar-small-64x8"])
def test_softmax_solves_the_small_protocols(task: str, tmp_path: Path) -> None:
    one = plan(
        tasks={task: TASKS[task]},
        mixers=(SweepModel.of("softmax"),),
        rates=(3e-3,),
        seeds=(0,),
        every=100,
    )
    (row,) = sweep(one, tmp_path, InProcess())
    assert row.accuracy > 0.98
