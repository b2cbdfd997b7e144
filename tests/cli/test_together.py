"""The command in two processes, as torchrun starts them: one speaks for both."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from torch import distributed

from conversions import write_source
from fastweights.cli import main
from fastweights.cli.progress import Lines
from fastweights.training.language.language_model import LanguageModelStage
from killable_runs import launch_two
from killable_runs import tiny as tiny_run

pytestmark = pytest.mark.long

SMALL = ["--layers", "1", "--width", "8", "--length", "16", "--batch", "4", "--device", "cpu"]
LINEAR = ["--length", "24", "--window", "4", "--batch", "2", "--device", "cpu"]


def speak(folder: Path, arguments: list[str], before: str = "") -> None:
    """Run a command in this process; what it says, and how it ends, stay in `folder`."""
    rank = os.environ["RANK"]
    if before:
        PREPARATIONS[before](rank)
    sys.stdout, sys.stderr = (
        (folder / f"{stream}-{rank}").open("w") for stream in ("out", "error")
    )
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / f"status-{rank}").write_text(f"{status} {distributed.is_initialized()}")


def _fail_in_second(rank: str) -> None:
    if rank == "1":

        def fail(*_: object) -> None:
            raise ValueError("only here")

        LanguageModelStage.backward = fail


def _fail_in_first(rank: str) -> None:
    if rank == "0":

        def fail(*_: object) -> None:
            raise OSError("No space left on device")

        LanguageModelStage.save = fail


def _signal_in_second(rank: str) -> None:
    if rank == "1":
        first = LanguageModelStage.backward

        def backward(self, first_sequence: int, count: int, share: float, step: int):
            if step == 2:
                signal.raise_signal(signal.SIGTERM)
            return first(self, first_sequence, count, share, step)

        LanguageModelStage.backward = backward


def _interrupt_first(_: str) -> None:
    """The first process alone reports."""
    Lines.progress = lambda *_: signal.raise_signal(signal.SIGINT)


PREPARATIONS = {
    "second fails": _fail_in_second,
    "first fails": _fail_in_first,
    "second is signalled": _signal_in_second,
    "first is interrupted": _interrupt_first,
}


def said(folder: Path, stream: str) -> list[str]:
    """What both processes have said."""
    return [(folder / f"{stream}-{rank}").read_text() for rank in "01"]


def ends(folder: Path) -> list[str]:
    """The status of both, and whether their group is left behind."""
    return [(folder / f"status-{rank}").read_text() for rank in "01"]


@pytest.fixture
def data(tmp_path) -> list[str]:
    return ["--data", *tiny_run(tmp_path).text.sources]


@pytest.mark.slow
def test_one_process_trains_aloud(tmp_path, data):
    given = ["train", *data, *SMALL, "--steps", "2", "--sample", "5", "--out"]
    launch_two(speak, tmp_path, [*given, str(tmp_path / "run")])
    first, second = said(tmp_path, "out")
    assert first.count("validation  ") == first.count("model       ") - 1 == 1
    assert "a sample:" in first
    assert second == ""
    assert "fastweights:" not in "".join(said(tmp_path, "error"))
    assert ends(tmp_path) == ["0 False", "0 False"]


@pytest.mark.slow
def test_one_process_linearizes_aloud(tmp_path):
    source = write_source(tmp_path)
    given = [str(source / "model"), "--data", str(source / "text.txt"), "--transfer-steps", "2"]
    steps = ["--finetune-steps", "2", "--out", str(tmp_path / "run")]
    launch_two(speak, tmp_path, ["linearize", *given, *LINEAR, *steps])
    first, second = said(tmp_path, "out")
    assert first.count("report.html") == 1
    assert second == ""
    assert ends(tmp_path) == ["0 False", "0 False"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--window", "24"], "window = 24 reaches over every sequence"),
        (["--length", "9999"], "fewer than one sequence of 9999"),
        (["--softmax-layers", "many"], "'many' does not fit"),
        (["--softmax-layers", "3"], "cannot keep 3 of 3 layers softmax"),
        (["--batch", "3"], "batch = 3 is not divisible by devices"),
    ],
)
def test_an_error_of_all_is_said_once(tmp_path, change, message):
    source = write_source(tmp_path)
    given = [str(source / "model"), "--data", str(source / "text.txt"), *LINEAR, *change]
    launch_two(speak, tmp_path, ["linearize", *given, "--out", str(tmp_path / "run")])
    errors = "".join(said(tmp_path, "error"))
    assert errors.count(message) == 1
    assert errors.count("fastweights: ") + errors.count("error: ") == 1
    assert ends(tmp_path) == ["2 False", "2 False"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("second fails", "only here"),
        pytest.param("first fails", "No space left on device", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_one_is_said_by_it_and_ends_both(tmp_path, data, who, message):
    given = ["train", *data, *SMALL, "--steps", "4", "--out", str(tmp_path / "run")]
    launch_two(speak, tmp_path, given, who)
    errors = "".join(said(tmp_path, "error"))
    assert errors.count("fastweights: ") == errors.count(message) == 1
    assert ends(tmp_path) == ["2 False", "2 False"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "statuses"),
    [("second is signalled", {"143"}), ("first is interrupted", {"130", "143"})],
)
def test_a_signal_to_one_stops_both(tmp_path, data, who, statuses):
    given = ["train", *data, *SMALL, "--steps", "40", "--log-every", "1"]
    launch_two(speak, tmp_path, [*given, "--out", str(tmp_path / "run")], who)
    assert "".join(said(tmp_path, "out")).count("Run the same command again to resume.") == 1
    assert {end.split()[0] for end in ends(tmp_path)} == statuses
