"""Floors and rooflines are what rates and counts say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fastweights.lab.bench.disassembly import Code
from fastweights.lab.bench.offline import Compiled, Launch
from fastweights.lab.bench.problems import CHANNELS, MAIN, PROBLEMS, SMALL, Problem, Program

KERNEL = Compiled(
    name="outputs",
    capability=90,
    warps=8,
    stages=2,
    registers=128,
    spill_stores=0,
    spill_loads=0,
    shared_memory=65536,
    products=3,
    scalar_products=0,
    transposed_products=0,
    code=Code.read(
        """
        //## File "/src/device/decay.py", line 7
        /*0000*/ @!P0 EXIT ;
        /*0010*/ MOV R1, R2 ;
.L_x_0:
        /*0020*/ HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0030*/ @P0 BRA `(.L_x_0) ;
        /*0040*/ EXIT ;
"""
    ),
    seconds=0.5,
)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from static import rows

    return rows


def test_the_floor_is_the_longest_of_four_times(rows: ModuleType) -> None:
    from static.gpus import GPUS
    from static.work import CountedLaunch, Counts, Work

    h200 = GPUS["H200"]
    counts = [
        Counts(0.5 * h200.bandwidth, 0.5 * h200.bandwidth, 1e9, 0.0, 0.0, 0.0),
        Counts(0.0, 0.0, 0.0, h200.half_products, h200.tf32_products, 1e6),
        Counts(8.0, 8.0, 16.0, 0.0, 0.0, 3 * h200.special),
    ]
    grid = (1320,)
    launches = [Launch(KERNEL, grid)] * 3
    counted = [CountedLaunch("outputs", grid, one, {}) for one in counts]
    program = Program("decay (Triton)", [], launches[:1], launches[1:])
    found = rows.rows_of(
        Problem("decay scalar", MAIN), "H200", program, Work(counted[:1], counted[1:])
    )
    assert [row.floor for row in found] == pytest.approx([1, 1, 2, 3, 5])
    assert [type(row).__name__ for row in found] == [
        *("LaunchRow", "PhaseRow"),
        *("LaunchRow", "LaunchRow", "PhaseRow"),
    ]
    assert found[0].waves == 1320 / (132 * 2), "registers and memory leave room for two blocks"
    assert found[-1].compilation == 0.5, "a kernel is compiled once"
    issued = h200.issue / KERNEL.warps  # by all programs: 2 instructions in every pass of the loop
    passed = {"decay.py:7": (4 * issued - 3 * 1320) / 2}
    work = Work([counted[0]._replace(passed=passed)], [])
    program = Program("decay (Triton)", [], launches[:1], [])
    row, phase, _ = rows.rows_of(Problem("decay scalar", MAIN), "H200", program, work)
    assert (row.issue, row.floor, phase.issue, phase.memory) == pytest.approx((4, 4, 4, 1))
    few = counted[1]._replace(grid=(66,))
    work = Work([], [few])
    program = Program("decay (Triton)", [], [], [Launch(KERNEL, (66,))])
    assert rows.rows_of(Problem("decay scalar", MAIN), "H200", program, work)[1].floor == (
        pytest.approx(4)
    ), "half of the multiprocessors take twice as long"


def test_a_launch_that_was_not_compiled_is_an_error(rows: ModuleType) -> None:
    from static.work import CountedLaunch, Counts, Work

    program = Program("decay (Triton)", [], [Launch(KERNEL, (1,))], [])
    work = Work([CountedLaunch("states", (1,), Counts(0, 0, 0, 0, 0, 0), {})], [])
    with pytest.raises(ValueError, match="outputs was compiled where states was counted"):
        rows.rows_of(Problem("decay scalar", MAIN), "H200", program, work)


@pytest.mark.parametrize(
    ("problem", "forward", "backward"),
    [
        (Problem("decay scalar", MAIN), 0.125, 0.218),
        (Problem("delta scalar", MAIN), 0.127, 0.315),
        (Problem("mesa 30 steps", MAIN), 1.39, 1.63),
        (Problem("scan real", CHANNELS), 0.125, 0.218),
    ],
    ids=str,
)
def test_rooflines(rows: ModuleType, problem: Problem, forward: float, backward: float) -> None:
    """Milliseconds on an H200, by hand: streams of 134 MB at 4.3 TB/s, 790 TFLOP/s. A decay in
    float32 counts as two of a scan's streams.
    """
    from static.gpus import GPUS

    found = [1e3 * rows.roofline(problem, phase, GPUS["H200"]) for phase in ("forward", "backward")]
    assert found == pytest.approx([forward, backward], rel=0.06)


def test_problems_are_cases_at_several_sizes() -> None:
    assert len(set(map(str, PROBLEMS))) == len(PROBLEMS)
    assert {problem.sizes for problem in PROBLEMS} >= {MAIN, SMALL}
    for problem in PROBLEMS:
        assert problem.case.name == problem.name
    shapes = Problem("decay tied", MAIN, torch.float32).shapes()
    assert all(x.is_meta for x in shapes.values())
    assert shapes["q"].shape == (8, 4096, 16, 128)
