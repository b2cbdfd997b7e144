"""Processes that train one model together."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
from accelerate import PartialState

from fastweights.training.loop.processes import Launched, leave_processes
from killable_runs import launch_two

pytestmark = pytest.mark.long

PATIENCE = timedelta(seconds=2)
"""How long a process waits for another in a collective."""


def take_turns(folder: Path) -> None:
    processes = Launched(PartialState(cpu=True, timeout=PATIENCE))
    with processes.first_then_others():
        if processes.is_first:
            time.sleep(2 * PATIENCE.total_seconds())
        (folder / str(processes.index)).write_text(",".join(p.name for p in folder.iterdir()))
    leave_processes()


@pytest.mark.slow
def test_others_wait_longer_than_a_collective_would(tmp_path):
    launch_two(take_turns, tmp_path)
    assert (tmp_path / "0").read_text() == ""
    assert (tmp_path / "1").read_text() == "0"
