"""Processes that train one model together."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
from accelerate import PartialState

from fastweights.errors import LostProcessError, TrainingError
from fastweights.train import train
from fastweights.training.loop.layout import Layout
from fastweights.training.loop.processes import Launched, connected, leave_processes
from killable_runs import launch_two, tiny

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


def is_second() -> bool:
    return os.environ["RANK"] == "1"


def train_by_different_layouts(folder: Path) -> None:
    with pytest.raises(TrainingError, match=r"different settings.*shard=False.* and .*shard=True"):
        train(tiny(folder), folder / "out", cpu=True, layout=Layout(shard=is_second()))
    leave_processes()


def train_without_the_second(folder: Path) -> None:
    """It ends while the model is laid out."""
    if is_second():
        Layout.place = lambda *_: os._exit(0)
    with pytest.raises(LostProcessError, match="has ended early; if none says why"):
        train(tiny(folder), folder / "out", cpu=True)


@pytest.mark.slow
@pytest.mark.parametrize("run", [train_by_different_layouts, train_without_the_second])
def test_processes_that_cannot_train_together_say_so(run, tmp_path):
    tiny(tmp_path)  # writes the text, once
    launch_two(run, tmp_path)


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer", "has ended early"),
        ("[gloo/transport/tcp/unbound_buffer.cc:88] Timed out waiting 1000ms", "in time"),
        ("[enforce fail at gloo/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4", "otherwise"),
        ("DDP expects same model across all ranks, but Rank 0 has 3 params", "otherwise"),
    ],
)
def test_what_broken_exchanges_mean(said: str, meaning: str) -> None:
    with pytest.raises(LostProcessError, match=meaning), connected():
        raise RuntimeError(said)


@pytest.mark.parametrize(
    "said",
    ["shapes do not fit", "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: no memory"],
)
def test_other_errors_keep_their_words(said: str) -> None:
    with pytest.raises(RuntimeError) as raised, connected():
        raise RuntimeError(said)
    assert str(raised.value) == said
