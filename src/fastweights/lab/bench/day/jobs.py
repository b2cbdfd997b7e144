"""Work in processes of its own, so that a kernel that hangs or crashes costs one group of rows.

A job is the tasks of one family of kernels. Its process has a CUDA context of its own; where that
is lost, or the process is, another goes on with the job's next task.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

import torch

from fastweights.lab.bench.day.rows import EndRow
from fastweights.lab.bench.timing import Failure

_FORKS = multiprocessing.get_context("forkserver")
START = 60.0
"""Seconds in which a process must have begun."""

LOST = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "illegal memory access")
"""After an error that says one of these, nothing runs in the process's context."""


@dataclass(frozen=True)
class RowGroup:
    """One group of rows.

    Attributes:
        run: yields the rows as they come; pickled on its way to the process
        share: of the time after which a task is given up, how many times as much it has
    """

    group: str
    run: Callable[[], Iterable[object]]
    share: float = 1.0


@dataclass(frozen=True)
class Job:
    """Tasks that share a process."""

    family: str
    tasks: tuple[RowGroup, ...]

    @classmethod
    def alone(
        cls, family: str, group: str, run: Callable[[], Iterable[object]], share: float = 1.0
    ) -> Job:
        """Return a job of one task."""
        return cls(family, (RowGroup(group, run, share),))


class _Begun:
    """What a process says before a task."""


@dataclass(frozen=True)
class Sitting:
    """What all jobs of a call share.

    Attributes:
        post: takes a group and a row as they come
        end: when everything is given up, by `time.monotonic`
        patience: seconds after which a task is
        log: the file to which processes print
    """

    post: Callable[[str, object], None]
    end: float
    patience: float
    log: Path

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end


def run_jobs(jobs: Iterable[Job], at_once: int, sitting: Sitting) -> None:
    """Run jobs, `at_once` at a time; every task that began ends in an `EndRow`."""
    _FORKS.set_forkserver_preload(["fastweights.lab.bench.day.stages"])
    waiting, running = [job for job in jobs if job.tasks], list[_Running]()
    try:
        while running or (waiting and not sitting.over):
            while waiting and len(running) < at_once and not sitting.over:
                running.append(_Running(waiting.pop(0), sitting, at_once))
            _attend(running)
            running = [one for one in running if not one.finished]
    finally:
        for one in running:
            one.kill()


def _attend(running: Sequence[_Running]) -> None:
    """Wait until something is said, or until the first is due, and deal with it."""
    due = min(one.due for one in running) - time.monotonic()
    said = wait([one.receiver for one in running], max(0.0, due))
    for one in running:
        if one.receiver in said:
            one.listen()
        elif time.monotonic() >= one.due:
            one.give_up()


@dataclass
class _Running:
    """A job, and the process that does it now."""

    job: Job
    sitting: Sitting
    at_once: int
    left: list[RowGroup] = field(init=False)
    finished: bool = False

    def __post_init__(self) -> None:
        self.left = list(self.job.tasks)
        self._start()

    def _start(self) -> None:
        self.receiver, sender = _FORKS.Pipe(duplex=False)
        threads = max(1, (os.cpu_count() or 1) // self.at_once)
        work = (tuple(self.left), sender, self.sitting.end, self.sitting.log, threads)
        self.process: BaseProcess = _FORKS.Process(target=_work, args=work)
        self.process.start()
        sender.close()
        self.since, self.begun = time.monotonic(), False

    @property
    def due(self) -> float:
        patience = self.sitting.patience * self.left[0].share if self.begun else START
        return min(self.sitting.end, self.since + patience)

    def listen(self) -> None:
        try:
            group, row = self.receiver.recv()
        except EOFError:
            self._bury()
            return
        if isinstance(row, _Begun):
            self.since, self.begun = time.monotonic(), True
            return
        self.sitting.post(group, row)
        if isinstance(row, EndRow):
            del self.left[0]
            self.begun = False
            self.since = time.monotonic()

    def give_up(self) -> None:
        """The task has had its time."""
        if not self.left:
            self.kill()
            return
        seconds = time.monotonic() - self.since
        late = self.sitting.over
        self._next("the time was up" if late else f"no answer in {seconds:.0f} s", stop=late)

    def _bury(self) -> None:
        """The process is gone: having done everything, or not."""
        self.process.join()
        code = self.process.exitcode or 0
        if not self.left:
            self.kill()
        elif code == 0 and not self.begun:
            self._again(stop=self.sitting.over)
        else:
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            self._next(f"the process ended with {name}", stop=False)

    def _next(self, reason: str, *, stop: bool) -> None:
        self.sitting.post(self.left[0].group, EndRow(time.monotonic() - self.since, reason))
        del self.left[0]
        self._again(stop=stop or not self.left)

    def _again(self, *, stop: bool) -> None:
        """Another process for the tasks that are left."""
        self.kill()
        if not stop:
            self.finished = False
            self._start()

    def kill(self) -> None:
        """The process, and all that it has started."""
        self.finished = True
        try:
            if self.process.pid and self.process.is_alive():
                os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.join()
        self.receiver.close()


def _work(
    tasks: tuple[RowGroup, ...], sender: Connection, end: float, log: Path, threads: int
) -> None:
    """The process of a job."""
    os.setsid()
    Thread(target=_end_with_parent, daemon=True).start()
    with log.open("ab", buffering=0) as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    torch.set_num_threads(threads)
    for task in tasks:
        if time.monotonic() >= end:
            return
        sender.send((task.group, _Begun()))
        start = time.monotonic()
        reason = ""
        try:
            for row in _until(end, task.run()):
                sender.send((task.group, row))
            _settle()
        except Exception as error:
            reason = Failure.of(error).reason
        sender.send((task.group, EndRow(time.monotonic() - start, reason)))
        if any(sign in reason for sign in LOST):
            return


def _end_with_parent() -> None:
    """A session that is killed leaves nothing on the device."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(os.getpid(), signal.SIGKILL)


def _until(end: float, rows: Iterable[object]) -> Iterator[object]:
    """The rows that come in time."""
    for row in rows:
        yield row
        if time.monotonic() >= end:
            raise TimeoutError("the time was up")


def _settle() -> None:
    """Errors of the device come out in the task that made them, and memory goes back."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
