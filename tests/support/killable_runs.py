"""Training in processes of their own, which may be killed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from fastweights.train import AdamW, Architecture, Cosine, Every, Text, TrainConfig, train
from fastweights.training.loop.metrics import Row
from fastweights.training.loop.report import Reading, Reporter, WorkDone
from here import timeless, write_text
from pictures import draw_pixels

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["fastweights.train", "fastweights.linearize.distill.pipeline", "peft", "pictures"]
)


def tiny(folder: Path, **changes) -> TrainConfig:
    """Six steps of a very small model on a text in `folder`, a checkpoint at every other one."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(folder)
    config = TrainConfig(
        text=Text((str(text),)),
        model=Architecture(({"name": "metala", "heads": 2},), layers=1, width=8),
        optimizer=AdamW(lr=1e-2),
        schedule=Cosine(warmup=1),
        every=Every(log=1, evaluation=3, checkpoint=2),
        steps=6,
        batch=4,
        length=16,
    )
    return replace(config, **changes)


class Heard(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes, self.rows = list[str](), list[Row]()
        self.phases, self.readings = list[WorkDone](), list[Reading]()

    def note(self, message: str) -> None:
        self.notes.append(message)

    def progress(self, row: Row) -> None:
        self.rows.append(row)

    def phase(self, phase: WorkDone) -> None:
        self.phases.append(phase)

    def reading(self, reading: Reading) -> None:
        self.readings.append(reading)


def stop_after(calls: int) -> Callable[[], bool]:
    """A `stop` that is False for so many calls, and True from then on."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


def curve(out: Path) -> list[dict]:
    """The rows of a run's curve, without the times that they took."""
    return timeless(out / "metrics.jsonl")


def end_of(out: Path) -> tuple[list[dict], dict[str, bytes]]:
    """The curve without times, and every byte of the results and of the last checkpoint's tensors,
    of a run of six steps."""
    parts = ("model", "adapter", "checkpoints/step-00000006")
    files = [path for part in parts for path in sorted((out / part).glob("*.safetensors"))]
    contents = {str(path.relative_to(out)): path.read_bytes() for path in files}
    return curve(out), contents


def sitting(config: TrainConfig, out: Path, calls: int | None = None) -> BaseProcess:
    """A process that trains; it kills itself at its call number `calls` that makes something on
    disk final.
    """
    process = FORKS.Process(target=_sit, args=(config, out, calls))
    process.start()
    return process


def _sit(config: TrainConfig, out: Path, calls: int | None) -> None:
    draw_pixels()
    if calls is not None:
        kill_at(calls)
    train(config, out, cpu=True)


def kill_at(calls: int) -> None:
    left = iter(range(calls, -1, -1))

    def mortal(function):
        def call(*args, **kwargs):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    os.fsync, os.rename, os.replace, os.unlink = map(
        mortal, (os.fsync, os.rename, os.replace, os.unlink)
    )
    shutil.rmtree = mortal(shutil.rmtree)


def launch_two(target: Callable[..., object], *given: object) -> None:
    """Call `target` in two processes, as torchrun starts them; both have to come to an end."""
    launch(2, target, *given)


def launch(count: int, target: Callable[..., object], *given: object) -> None:
    """Call `target` in processes, as torchrun starts them; all have to come to an end."""
    port = free_port()
    processes = [
        FORKS.Process(target=_join, args=(rank, count, port, target, given))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count


def free_port() -> int:
    """A port at which processes can meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def become_rank(rank: int, count: int, port: int) -> None:
    """Have the environment that torchrun gives to one of several processes."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ |= {name: str(value) for name, value in {**place, **meeting}.items()}
    draw_pixels()


def _join(rank: int, count: int, port: int, target: Callable[..., object], given: tuple) -> None:
    become_rank(rank, count, port)
    target(*given)
