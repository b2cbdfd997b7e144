"""The programs and the work of problems, measured by several processes.

A process either compiles kernels or interprets them: Triton decides which at its import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from fastweights.lab.bench.problems import Problem, Program, compile_for
from static.gpus import GPUS
from static.work import Work


def measure(
    problems: list[Problem], processes: int
) -> Iterator[tuple[Problem, list[Program], list[Work]]]:
    """The programs and the work of each problem on each GPU."""
    with _pool(processes, interpret=False) as compilers:
        compiled = {p: compilers.submit(_compile, p) for p in problems}
        programs = {p: future.result() for p, future in compiled.items()}
    with _pool(processes, interpret=True) as interpreters:
        counted = {p: interpreters.submit(_count, p) for p in problems}
        for problem, future in counted.items():
            yield problem, programs[problem], future.result()


@contextmanager
def _pool(processes: int, *, interpret: bool) -> Iterator[Executor]:
    """Processes that interpret kernels, or that compile them: one process cannot do both."""
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield pool


def _compile(problem: Problem) -> list[Program]:
    return [compile_for(problem, gpu.chip) for gpu in GPUS.values()]


def _count(problem: Problem) -> list[Work]:
    from static.interpret import configuration, work_of

    known: dict[tuple, Work] = {}
    found = []
    for gpu in GPUS.values():
        key = configuration(problem, gpu.chip)
        if key not in known:
            known[key] = work_of(problem, gpu.chip)
        found.append(known[key])
    return found
