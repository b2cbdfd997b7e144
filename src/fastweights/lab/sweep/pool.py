"""Where a sweep's runs are computed: in this process, in child processes, or on a Ray cluster."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fastweights.environment import require_package
from fastweights.lab.sweep.plan import SweepRun
from fastweights.lab.sweep.trainer import Point, Row, fit
from fastweights.ranges import POSITIVE_INTEGER
from fastweights.training.loop.json_lines import append_row, finite
from fastweights.training.loop.processes import Alone, Processes


@dataclass(frozen=True)
class RunFailure:
    """A run that ended with an error, and its traceback.

    Attributes:
        run: The run that failed.
        trace: The traceback.
    """

    run: SweepRun
    trace: str


Results = Iterator[Row | RunFailure]


class Pool(ABC):
    """A place where runs are computed, such as this process or a cluster."""

    @abstractmethod
    def results(self, runs: Sequence[SweepRun], folder: Path, device: str) -> Results:
        """Compute all runs and yield their results in the order in which they end.

        Args:
            runs: The runs.
            folder: A folder; each evaluation is appended to its ``logs/KEY.jsonl`` at once, and
                ``unfinished/KEY.safetensors`` is the state of a long run, which goes on from it.
            device: The device to train on, as PyTorch names it.
        """


@dataclass(frozen=True)
class InProcess(Pool):
    """A pool that computes one run after the other in this process."""

    def results(self, runs: Sequence[SweepRun], folder: Path, device: str) -> Results:
        threads = torch.get_num_threads()
        try:
            yield from (work(run, folder, device) for run in runs)
        finally:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Local(Pool):
    """A pool of processes on this machine, one thread each.

    Attributes:
        workers: Number of processes; None for as many as the machine has cores.

    Raises:
        TrainingError: If `workers` is below 1.
    """

    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None:
            POSITIVE_INTEGER.require(workers=self.workers)

    def results(self, runs: Sequence[SweepRun], folder: Path, device: str) -> Results:
        count = min(self.workers or os.cpu_count() or 1, max(1, len(runs)))
        context = multiprocessing.get_context("spawn")
        with _ending(ProcessPoolExecutor(count, context, initializer=_prepare)) as executor:
            futures = [executor.submit(work, run, folder, device) for run in runs]
            for future in as_completed(futures):
                yield future.result()


@dataclass(frozen=True)
class Ray(Pool):
    """A pool on a Ray cluster, one core per run.

    Attributes:
        address: The cluster's address; None for one on this machine, started and stopped with the
            sweep.

    Raises:
        ValueError: If Ray is not installed.
    """

    address: str | None = None

    def __post_init__(self) -> None:
        require_package("ray", "a sweep on a cluster", "or leave out --ray")

    def results(self, runs: Sequence[SweepRun], folder: Path, device: str) -> Results:
        ray = importlib.import_module("ray")
        ray.init(address=self.address, include_dashboard=False, log_to_driver=False)
        try:
            remote = ray.remote(num_cpus=1, num_gpus=0 if device == "cpu" else 1)(work)
            left = [remote.remote(run, folder, device) for run in runs]
            while left:
                (done,), left = ray.wait(left, num_returns=1)
                yield ray.get(done)
        finally:
            ray.shutdown()


@dataclass(frozen=True)
class AllProcesses(Pool):
    """A pool whose runs are each trained by all processes that this one, the first of them, was
    launched with; the others `follow`. A run that fails ends the sweep.

    Attributes:
        processes: The processes.
    """

    processes: Processes

    def results(self, runs: Sequence[SweepRun], folder: Path, device: str) -> Iterator[Row]:
        for run in runs:
            unfinished = _unfinished(folder, run)
            self.processes.hand_out((run, unfinished))
            yield fit(run, _log(folder, run), self.processes, unfinished)


def follow(processes: Processes) -> None:
    """Train what the first process trains, until its block of `leading` ends."""
    while (handed := processes.hand_out(None)) is not None:
        run, unfinished = handed
        fit(run, processes=processes, unfinished=unfinished)


@contextmanager
def leading(processes: Processes) -> Iterator[None]:
    """Let the other processes, which `follow` this one, end with the block."""
    try:
        yield
    except BaseException:
        with processes.first_then_others():
            raise
    processes.hand_out(None)


def work(run: SweepRun, folder: Path, device: str) -> Row | RunFailure:
    """Compute one run and return its row or, if it raises an error, a `RunFailure`."""
    torch.set_num_threads(1)
    try:
        processes = Alone(torch.device(device))
        return fit(run, _log(folder, run), processes, _unfinished(folder, run))
    except Exception:
        return RunFailure(run, traceback.format_exc())


def _unfinished(folder: Path, run: SweepRun) -> Path:
    return folder / "unfinished" / f"{run.key}.safetensors"


def _log(folder: Path, run: SweepRun) -> Callable[[Point], None]:
    """What appends every evaluation to a new log of the run."""
    log = folder / "logs" / f"{run.key}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    return lambda point: append_row(log, finite(asdict(point)))


@contextmanager
def _ending(executor: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """An executor whose processes end with the block, whatever they are doing."""
    others = set(multiprocessing.active_children())
    try:
        yield executor
    finally:
        children = set(multiprocessing.active_children()) - others
        executor.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.terminate()


def _prepare() -> None:
    """In a new process: leave interrupts to the parent, and end when it does, even if it is
    killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
