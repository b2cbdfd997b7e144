"""Peak memory of a call on a CPU, such as a contender's forward and backward.

It is how much the largest resident size of a fresh process grows beyond what it holds with the
inputs drawn and the libraries' threads and tables warmed up on a short sequence. Nothing that an
earlier measurement left in an allocator counts; temporaries of C++ code, the output, its upstream
gradient and the gradients found do.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from fastweights.lab.bench.cases import find_case
from fastweights.lab.bench.contenders import Inputs, Phase, Sizes, TensorFunction, bind

_FORKS = multiprocessing.get_context("forkserver")
WARM_TOKENS = 64


@dataclass(frozen=True)
class MemoryTask:
    """A contender on a case whose memory is measured, by its names in `CASES`."""

    case: str
    contender: str
    sizes: Sizes
    dtype: torch.dtype
    phase: Phase
    threads: int

    def inputs(self, device: torch.device) -> Inputs:
        return find_case(self.case).inputs(self.sizes, self.dtype, device)

    def run(self, inputs: Inputs) -> TensorFunction:
        found = {c.name: c for c in find_case(self.case).implementations(inputs)}
        return found[self.contender].load()


def peak_bytes(task: MemoryTask, seconds: float) -> int | None:
    """Return the peak of memory beyond the inputs, in bytes.

    None if it fails or takes longer than `seconds`.
    """
    return peak_growth(partial(_ready, task), seconds)


def peak_growth(prepare: Callable[[], Callable[[], object]], seconds: float = 3600.0) -> int | None:
    """Return by how many bytes a call makes a fresh process grow, at its peak.

    None if it fails or takes longer than `seconds`.

    Args:
        prepare: Is pickled, and returns the call in the process, which has all else by then.
    """
    _FORKS.set_forkserver_preload(["fastweights.lab.bench.memory"])
    receiver, sender = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_report_growth, args=(prepare, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()
        receiver.close()


def _ready(task: MemoryTask) -> Callable[[], object]:
    torch.set_num_threads(task.threads)
    cpu = torch.device("cpu")
    short = replace(task, sizes=task.sizes._replace(t=min(task.sizes.t, WARM_TOKENS)))
    warm = short.inputs(cpu)
    bind(task.run(warm), warm, task.phase)()
    inputs = task.inputs(cpu)
    return bind(task.run(inputs), inputs, task.phase)


def _report_growth(prepare: Callable[[], Callable[[], object]], sender: Connection) -> None:
    call = prepare()
    before = _largest()
    call()
    sender.send(_largest() - before)


def _largest() -> int:
    """The largest resident size of this process so far, in bytes."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
