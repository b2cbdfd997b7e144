"""Training beside a program that keeps a core busy, by how torch's threads wait; writes JSON.

    python benchmarks/busy_core.py --out benchmarks/results/busy_core.json

A process per setting makes updates of the same model, one process at a time, alone and beside a
loop that does nothing, in turns. "fastweights" is what `Loop.run` does: threads spin until they
queue for cores, and then sleep; the others are settings of the environment. Of the updates `alone`
and `beside` the loop there are the median and the fastest tenth in milliseconds, the milliseconds
of processor time that all threads took, and how many milliseconds of every second threads waited
for a core; `slower` is the mean update beside the loop over the median alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

SETTINGS: dict[str, dict[str, str]] = {
    "torch's own": {},
    "fastweights": {},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "OMP_WAIT_POLICY=active": {"OMP_WAIT_POLICY": "active"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
SWITCHES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


class Update(NamedTuple):
    """Seconds of an update: that passed, of the processor, and that threads waited for one."""

    wall: float
    cpu: float
    queued: float


def work(batch: int, watches: bool) -> None:
    """Make updates for the seconds that every line of the input says, and write their times."""
    import torch

    from fastweights.runs.cores import watched_cores
    from fastweights.runs.loop import Loop
    from fastweights.runs.processes import join_processes
    from fastweights.train import AdamW, Architecture, Text, TrainConfig
    from fastweights.train.loop import LanguageModelStage

    config = TrainConfig(
        text=Text(("shakespeare",)),
        model=Architecture(({"name": "metala"},), layers=4, width=256),
        optimizer=AdamW(),
        length=256,
        batch=batch,
    )
    processes = join_processes(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        stage = LanguageModelStage(config, Path(folder), processes)
        stage.prepare(Path(folder))
        loop = Loop(stage, config, processes)
        loop.update()
        print("ready", flush=True)
        with watched_cores() as look:
            for line in sys.stdin:
                found = time_updates(loop.update, look if watches else bool, float(line))
                print(json.dumps(found), flush=True)


def time_updates(
    update: Callable[[], object], look: Callable[[], object], seconds: float
) -> list[Update]:
    from fastweights.runs.cores import queued_seconds

    found, end = list[Update](), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter(), time.process_time(), queued_seconds() or 0
        update()
        look()
        stop = time.perf_counter(), time.process_time(), queued_seconds() or 0
        found.append(Update(*(after - before for before, after in zip(start, stop, strict=True))))
    return found


class Worker:
    """A process with a setting, which waits until it is to work."""

    def __init__(self, name: str, batch: int) -> None:
        left = {name: value for name, value in os.environ.items() if name not in SWITCHES}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--batch", str(batch), "--work", name],
            env=left | SETTINGS[name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        self.alone, self.beside = list[Update](), list[Update]()

    def time_updates(self, seconds: float) -> list[Update]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return [Update(*times) for times in json.loads(self._answer())]

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def finish(self) -> dict[str, Any]:
        """End the process, and say what it measured."""
        self.process.communicate()
        alone = statistics.median(update.wall for update in self.alone)
        beside = statistics.mean(update.wall for update in self.beside)
        return {
            "alone": summary(self.alone),
            "beside": summary(self.beside),
            "slower": beside / alone,
        }


def summary(updates: list[Update]) -> dict[str, float]:
    walls = sorted(update.wall for update in updates)
    return {
        "updates": len(updates),
        "median": 1e3 * statistics.median(walls),
        "fastest_tenth": 1e3 * walls[len(walls) // 10],
        "mean": 1e3 * statistics.mean(walls),
        "cpu": 1e3 * statistics.median(update.cpu for update in updates),
        "queued_per_second": 1e3 * sum(update.queued for update in updates) / sum(walls),
    }


@contextmanager
def busy_core() -> Iterator[None]:
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--work", choices=SETTINGS)
    chosen = parser.parse_args()
    if chosen.work:
        work(chosen.batch, watches=chosen.work == "fastweights")
        return
    workers = {name: Worker(name, chosen.batch) for name in SETTINGS}
    for _ in range(chosen.rounds):
        for worker in workers.values():
            worker.alone += worker.time_updates(chosen.seconds)
        with busy_core():
            for worker in workers.values():
                worker.beside += worker.time_updates(chosen.seconds)
    settings = {name: worker.finish() for name, worker in workers.items()}

    from fastweights.lab.bench.machine import commit, versions

    about = {"commit": commit(), "versions": versions(), "cores": os.cpu_count()}
    found = {**about, "batch": chosen.batch, "settings": settings}
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
