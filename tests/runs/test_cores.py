"""Threads sleep while cores are busy, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fastweights.runs import cores
from fastweights.runs.cores import BusyCoreWarning, CoreWatch, queued_seconds, watched_cores

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say who queues")


class Times:
    """A machine on which threads queue for `share` of every second."""

    def __init__(self) -> None:
        self.clock = self.queued = 0.0

    def pass_by(self, seconds: float, share: float) -> None:
        self.clock += seconds
        self.queued += seconds * share


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def watch(times: Times, monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreWatch]:
    monkeypatch.setattr(cores, "_uses_libgomp", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    found = CoreWatch(lambda: times.queued, lambda: times.clock)
    yield found
    found.end()


def look_after(watch: CoreWatch, times: Times, seconds: float, share: float) -> bool:
    times.pass_by(seconds, share)
    watch.look()
    return watch.is_sleeping


@LINUX
def test_threads_sleep_while_they_queue(watch: CoreWatch, times: Times) -> None:
    callers = threading.active_count()
    assert not look_after(watch, times, 2.0, 0.1)
    assert not look_after(watch, times, 0.5, 1.0)  # too soon to look
    with pytest.warns(BusyCoreWarning, match="OMP_WAIT_POLICY=passive"):
        assert look_after(watch, times, 2.0, 0.9)
    assert threading.active_count() > callers
    assert look_after(watch, times, 31.0, 0.2)
    assert not look_after(watch, times, 31.0, 0.01)


@LINUX
def test_it_is_said_once(watch: CoreWatch, times: Times) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for share in (0.9, 0.0, 0.9):
            look_after(watch, times, 31.0, share)
    assert watch.is_sleeping
    assert len(said) == 1


def test_where_threads_cannot_be_put_to_sleep_the_setting_is_named(
    watch: CoreWatch, times: Times, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_uses_libgomp", lambda: False)
    with pytest.warns(BusyCoreWarning, match="OMP_NUM_THREADS=1"):
        assert not look_after(watch, times, 2.0, 0.9)


def test_nothing_is_done_where_nobody_says_who_queues(times: Times) -> None:
    watch = CoreWatch(lambda: None, lambda: times.clock)
    assert not look_after(watch, times, 100.0, 0.9)


def test_a_system_without_these_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "_PROCESS", tmp_path)
    assert queued_seconds() is None


@LINUX
def test_queueing_is_counted() -> None:
    before = queued_seconds()
    assert before is not None
    assert before >= 0


@pytest.mark.parametrize("name", cores.CHOSEN)
def test_a_choice_of_the_user_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cores, "CoreWatch", pytest.fail)
    monkeypatch.setenv(name, "1")
    with watched_cores() as look:
        look()


def test_one_thread_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cores, "CoreWatch", pytest.fail)
    with watched_cores() as look:
        look()


SLEEP = """
import torch
from fastweights.runs.cores import _let_threads_sleep
torch.set_num_threads(2)
x = torch.linspace(-1, 1, 1 << 18).requires_grad_()
def gradient():
    y = (x.sin() * x).exp().sum()
    return torch.autograd.grad(y, x)[0]
before = gradient()
awake = _let_threads_sleep()
during = gradient()
awake.set()
assert torch.equal(before, during) and torch.equal(before, gradient())
print("same")
"""


@LINUX
def test_sleeping_threads_compute_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLEEP],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        check=False,
    )
    assert done.stdout == "same\n", done.stderr
