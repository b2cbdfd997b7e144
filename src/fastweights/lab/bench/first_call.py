"""What the first call of an operation costs: in a process that has compiled nothing before."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from fastweights.lab.bench.contenders import Phase, Sizes, bind
from fastweights.lab.bench.problems import Problem

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class FirstCallRow:
    """The seconds of an operation's first calls, compilation included.

    Attributes:
        forward: Of the first forward pass.
        both: Of the first forward and backward pass after it.
    """

    op: str
    sizes: Sizes
    dtype: str
    device: str
    forward: float | None
    both: float | None
    note: str


def first_call(problem: Problem, device: torch.device, seconds: float = 120.0) -> FirstCallRow:
    """Measure the first calls of what the kernel table takes, waiting for `seconds` at most."""
    receiver, sender = _SPAWN.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as cache, _environment("TRITON_CACHE_DIR", cache):
        process = _SPAWN.Process(target=_report_first_calls, args=(problem, device, sender))
        process.start()
        sender.close()
        try:
            forward, both = receiver.recv() if receiver.poll(seconds) else (None, None)
            note = "" if both else f"not done in {seconds:g} s"
        except EOFError:
            forward, both, note = None, None, "the process ended without an answer"
        finally:
            process.kill()
            process.join()
            receiver.close()
    dtype = str(problem.dtype).removeprefix("torch.")
    return FirstCallRow(problem.name, problem.sizes, dtype, device.type, forward, both, note)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable for the processes that are started inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _report_first_calls(problem: Problem, device: torch.device, sender: Connection) -> None:
    inputs = problem.case.inputs(problem.sizes, problem.dtype, device)
    run = problem.case.implementations(inputs)[0].load()
    _wait(device)
    times = [time.perf_counter()]
    for phase in Phase:
        bind(run, inputs, phase)()
        _wait(device)
        times.append(time.perf_counter())
    sender.send((times[1] - times[0], times[2] - times[1]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
