"""Peak memory of one contender's forward and backward on a CPU.

It is how much the largest resident size of a fresh process grows beyond what it holds with the
inputs drawn and the libraries' threads and tables warmed up on a short sequence. Nothing that an
earlier measurement left in an allocator counts; temporaries of C++ code, the output, its upstream
gradient and the gradients found do.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from fastweights.lab.bench.cases import CASES
from fastweights.lab.bench.contenders import Case, Inputs, Phase, Sizes, TensorFunction, bind

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
        return _case(self.case).inputs(self.sizes, self.dtype, device)

    def run(self, inputs: Inputs) -> TensorFunction:
        found = {c.name: c for c in _case(self.case).implementations(inputs)}
        return found[self.contender].load()


def peak_bytes(task: MemoryTask, seconds: float) -> int | None:
    """Return the peak of memory beyond the inputs, in bytes.

    None if it fails or takes longer than `seconds`.
    """
    _FORKS.set_forkserver_preload(["fastweights.lab.bench.memory"])
    receiver, sender = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_report_growth, args=(task, sender))
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


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def _report_growth(task: MemoryTask, sender: Connection) -> None:
    torch.set_num_threads(task.threads)
    cpu = torch.device("cpu")
    short = replace(task, sizes=task.sizes._replace(t=min(task.sizes.t, WARM_TOKENS)))
    warm = short.inputs(cpu)
    bind(task.run(warm), warm, task.phase)()
    inputs = task.inputs(cpu)
    function = bind(task.run(inputs), inputs, task.phase)
    before = _largest()
    function()
    sender.send(_largest() - before)


def _largest() -> int:
    """The largest resident size of this process so far, in bytes."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
