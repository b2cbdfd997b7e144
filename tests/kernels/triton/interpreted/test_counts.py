"""What the interpreter counts of a small kernel is what its text says."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.kernels.triton.chips import CHIPS
from fastweights.kernels.triton.device import decay
from fastweights.kernels.triton.launch import launch
from fastweights.kernels.triton.streams import Strided
from fastweights.lab.bench.contenders import Sizes
from fastweights.lab.bench.disassembly import EARLY
from fastweights.lab.bench.problems import Problem
from small_kernels import square

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
from static import interpret
from static.counts import counting
from static.work import CountedLaunch, Counts


def run(dtype: torch.dtype, length: int) -> CountedLaunch:
    x = torch.randn(1, length, 1, 32).to(dtype) / 8
    streams = Strided.of(x), Strided.of(torch.empty_like(x))
    with counting() as launches:
        launch(square, (-(-length // 16),), *streams, length, width=32, C=16)
    (found,) = launches
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [16, 40])
def test_counts_of_a_small_kernel(dtype: torch.dtype, length: int) -> None:
    """The tile is read once more from the cache, and written once; two products of 16 x 16 x 32."""
    chunks, stream = -(-length // 16), length * 32 * dtype.itemsize
    products = chunks * 2 * 2 * 16 * 16 * 32
    half = dtype is torch.bfloat16
    name, grid, counts, passed = run(dtype, length)
    assert (name, grid, passed) == ("square", (chunks,), {})
    assert counts == Counts(
        loaded=stream,
        stored=stream,
        touched=counts.touched,
        half_products=products if half else 0,
        tf32_products=0 if half else 3 * products,
        special=chunks * 16 * 16,
    )
    assert 2 * stream <= counts.touched <= 2 * stream + 64, "a stream need not begin with a sector"


def test_long_sequences_are_counted_at_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of five chunks, from one and two of them and from all."""
    problem = Problem("decay scalar", Sizes(2, 160, 3, 16, 24), torch.float32)
    monkeypatch.setattr(interpret, "LENGTHS", (32, 64))
    extended = interpret.work_of(problem, CHIPS[90])
    monkeypatch.setattr(interpret, "LENGTHS", (80, 160))
    whole = interpret.work_of(problem, CHIPS[90])
    for found, wanted in zip(extended, whole, strict=True):
        assert [launch.name for launch in found] == [launch.name for launch in wanted]
        for a, b in zip(found, wanted, strict=True):
            assert a.counts == pytest.approx(b.counts, rel=0.02), a.name
    assert len(whole.backward) > 1
    assert interpret.configuration(problem, CHIPS[90]) == interpret.configuration(
        problem, CHIPS[90]
    )


def test_passes_of_loops_and_early_ends_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five chunks in each of six heads, from one and two of them; the keys are a single block,
    and no chunk is steep.
    """
    monkeypatch.setattr(interpret, "LENGTHS", (32, 64))
    problem = Problem("decay tied", Sizes(2, 160, 3, 16, 16), torch.float32)
    launches = interpret.work_of(problem, CHIPS[90]).forward
    forward = {launch.name: launch.passed for launch in launches}
    assert forward["states"][line_of(decay.states, "for i in range(begin")] == 30
    assert forward["outputs"][line_of(decay.outputs, "for first in range(0, sizes.K")] == 30
    assert forward["steep_scores"] == {EARLY: 30}


def line_of(kernel: Any, start: str) -> str:
    """Of the statement in a kernel's source, as in "decay.py:87"."""
    path = Path(inspect.getfile(kernel.fn))
    lines, first = inspect.getsourcelines(kernel.fn)
    return f"{path.name}:{first + [line.strip().startswith(start) for line in lines].index(True)}"


def test_counting_ends_with_the_block() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    before = dict(vars(InterpreterBuilder))
    run(torch.float32, 16)
    assert dict(vars(InterpreterBuilder)) == before
