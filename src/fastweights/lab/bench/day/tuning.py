"""flash-linear-attention's configurations, compiled by several processes before one measures them.

Its kernels try up to 314 configurations each, a second of compilation for every one: too long for a
timing that is meant to take seconds. Which one is best is found where it is timed, by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from math import inf
from time import monotonic
from typing import Any
from unittest.mock import patch

from fastweights.kernels.triton.launch import is_installed
from fastweights.lab.bench.contenders import Phase, bind, dtype_name
from fastweights.lab.bench.day.plan import DayPlan, draw
from fastweights.lab.bench.day.rows import WarmRow
from fastweights.lab.bench.peers import FLA

SHARES = {
    "decay tied": 4,
    "decay scalar": 3,
    "mesa 30 steps": 2,
    "delta scalar": 2,
    "delta vector": 2,
    "scan real": 1,
}
"""Cases with a peer that tunes itself, and the processes that share its configurations; GLA's are
those of "decay tied"."""


def compile_peers(name: str, share: int, plan: DayPlan) -> Iterator[WarmRow]:
    """Compile one share of what the peers of a case would try."""
    problem = plan.problem(name, plan.main._replace(b=2))
    inputs, start = draw(problem, plan.place), monotonic()
    peers = [peer for peer in problem.case.gpu_peers if peer.library == FLA]
    with _compiling(share, SHARES[name]) as compiled:
        for peer in peers:
            bind(peer.load(), inputs, Phase.BOTH)()
    dtype = dtype_name(problem.dtype)
    variant, seconds = f"{FLA} {share + 1}/{SHARES[name]}", monotonic() - start
    yield WarmRow(name, problem.sizes, dtype, variant, len(compiled), seconds)


@contextmanager
def _compiling(share: int, shares: int) -> Iterator[list[object]]:
    """Inside the block configurations are compiled in place of being measured, one in `shares`;
    nothing is kept of which was best.
    """
    from triton.runtime.autotuner import Autotuner

    found, numbers = [], count()

    def compile_only(self: Any, *arguments: Any, config: Any, **options: Any) -> list[float]:
        if next(numbers) % shares != share:
            return [1.0] * 3
        try:
            options = {**options, **config.all_kwargs(), "warmup": True}
            found.append(self.fn.run(*arguments, **options))
        except Exception:  # it cannot be compiled, hence will not be chosen
            return [inf] * 3
        return [0.0] * 3

    def try_all(*arguments: Any) -> bool:
        arguments[-1]()
        return False

    with (
        patch.object(Autotuner, "_bench", compile_only),
        patch.object(Autotuner, "check_disk_cache", try_all),
    ):
        yield found


@contextmanager
def short_tuning() -> Iterator[None]:
    """Inside the block what tunes itself measures each of its many candidates for 12 ms."""
    if not is_installed():
        yield
        return
    from triton import testing

    with patch.object(testing, "do_bench", partial(testing.do_bench, warmup=3, rep=12)):
        yield
