"""Every kernel for GPUs, compiled for chips that need not be there.

Each time it is some families at their main sizes for Hopper; ``make test-offline`` adds the others,
and all chips, dtypes and widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from fastweights.kernels.triton import TRITON
from fastweights.kernels.triton.chips import CHIPS
from fastweights.lab.bench.contenders import Sizes
from fastweights.lab.bench.offline import MOST_REGISTERS, Compiled, offline
from fastweights.lab.bench.problems import (
    LONG,
    MAIN,
    MATRICES,
    SCANS,
    Problem,
    Program,
    launch_all,
)
from hazards import divergent_instructions, stray_addresses, writes_after_waits
from timed import main_problem, short_sizes


class Spills(NamedTuple):
    """Bytes per thread that a kernel may spill on some chips, and why it does."""

    most: int
    capabilities: tuple[int, ...]
    reason: str


SPILLS: dict[str, Spills] = {
    "attend": Spills(8, (80,), "scores on a scale, whose tile lives beside that of the outputs"),
    "reader_gradients": Spills(24, (90,), "half the registers, for two programs at once"),
    "state_gradients": Spills(64, (90,), "4 warps, for two programs at once"),
    "conjugate_gradients": Spills(64, (90, 100), "4 warps, for two programs at once"),
    "scan_backward": Spills(36, (90,), "complex states, whose tiles are pairs of numbers"),
}
"""By kernel. A kernel that is not here spills nothing."""

NARROW_PRODUCTS = {
    "solve": "one warp inverts blocks of 16 rows",
    "gram_states": "a warp holds fewer rows of H than a wide product has",
}
"""Kernels whose bfloat16 products are not Hopper's wide ones (64 rows and 4 warps), and why."""

WRITES_AFTER_WAITS = {
    "state_gradients": {"LDGSTS"},  # of the delta rule: into the buffer that no product reads
}
"""Kernels that write shared memory behind a wait for products without a barrier, and by what."""

LENGTHS = (64, 100, 4096, 4097)
"""All are computed by the same binaries; one token has kernels of its own."""

GPU = torch.device("cuda")
"""Where the tests of `test_gpu.py` run."""

QUICK = ("decay tied",)
"""What is compiled for Hopper each time."""
ON_HOPPER = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.offline)
    for name in MATRICES + SCANS
]

IN_SEGMENTS = [
    pytest.param(name, marks=() if name == "decay scalar" else pytest.mark.offline)
    for name in MATRICES + SCANS
]
CHAINS = {"segment_starts", "advance", "summarize"}
"""Kernels that find the states between segments of time."""

WITHOUT_STATES = ("short convolution", "RMSNorm")
"""Cases without a state that tokens hand on."""

ELSEWHERE = ((80, "decay scalar"), (86, "scan real"), (89, "delta scalar"), (100, "decay tied"))
"""A family for each of the other chips, at its main size."""

WIDTHS = ((32, 32), (64, 64), (64, 128), (128, 128), (256, 256))
FORMATS = (
    *((torch.bfloat16, widths) for widths in WIDTHS),
    *((torch.float32, widths) for widths in ((64, 64), (128, 128))),
    (torch.float16, (128, 128)),
)
"""Dtypes and the widths of keys and values."""


def faults(kernel: Compiled, dtype: torch.dtype) -> Iterator[str]:
    """What is wrong with a kernel for streams of this dtype."""
    allowed, chip = SPILLS.get(kernel.name), CHIPS[kernel.capability]
    most = allowed.most if allowed and kernel.capability in allowed.capabilities else 0
    if kernel.spill_stores > most:
        yield f"spills {kernel.spill_stores} bytes per thread, {most} are allowed"
    if kernel.registers > MOST_REGISTERS or kernel.blocks < 1:
        yield f"needs {kernel.registers} registers in {kernel.warps} warps"
    if kernel.shared_memory > chip.shared_memory:
        yield f"needs {kernel.shared_memory} bytes of shared memory"
    if kernel.transposed_products:
        yield f"multiplies {kernel.transposed_products} transposed products"
    if kernel.scalar_products or bool(kernel.matrix_instructions) != bool(kernel.products):
        yield f"makes some of {kernel.products} products without tensor cores"
    wide = kernel.capability == 90 and dtype == torch.bfloat16 and kernel.products
    if wide and not kernel.mix.get("HGMMA") and kernel.name not in NARROW_PRODUCTS:
        yield "makes no wide products"
    if late := writes_after_waits(kernel.code, kernel.warps) - WRITES_AFTER_WAITS.get(
        kernel.name, set()
    ):
        yield f"writes what products may still read, by {sorted(late)}"
    if apart := divergent_instructions(kernel.code):
        yield f"has {sorted(apart)} where lanes of a warp have parted"
    if strays := stray_addresses(kernel.code):
        yield f"reads at addresses made of the stack pointer: {strays[0]}"


def compile_and_check(problem: Problem, capability: int, others: Iterable[Sizes] = ()) -> Program:
    """All phases of a problem; at its `others` sizes it is computed by the same binaries."""
    with offline(CHIPS[capability]) as log:
        program = launch_all(problem, log)
        kernels = len(log.kernels)
        for sizes in others:
            launch_all(problem._replace(sizes=sizes), log)
    assert len(log.kernels) == kernels, "some sizes have kernels of their own"
    found = [f"{k.name} {fault}" for k in log.kernels for fault in faults(k, problem.dtype)]
    assert not found, f"sm_{capability}, {problem}: {found}"
    return program


def test_every_kernel_is_taken_for_some_case() -> None:
    """Of many tokens and of one; `Bonus` and `DPLR` are in models alone. The tests on a GPU go by
    the same cases.
    """
    whole = [main_problem(name) for name in MATRICES + SCANS]
    tokens = [problem._replace(sizes=problem.sizes._replace(t=1)) for problem in whole]
    taken = {p.case.implementations(p.shapes())[0].name for p in [*whole, *tokens]}
    models = {"bonus, one token (Triton)", "DPLR (Triton)"}
    assert {entry.name for entry in TRITON} - taken == models


@pytest.mark.sampled
@pytest.mark.parametrize("name", ON_HOPPER)
def test_kernels_at_their_main_size_on_hopper(name: str) -> None:
    """The tests on a GPU test them, at sizes of their own."""
    problem = main_problem(name)
    others = [problem.sizes._replace(t=length) for length in LENGTHS]
    program = compile_and_check(problem, 90, [*others, short_sizes(problem.case, "whole", GPU)])
    assert program.inference, f"{program.kernel} takes it"
    assert program.forward
    assert program.backward


@pytest.mark.offline
@pytest.mark.parametrize("name", IN_SEGMENTS)
def test_kernels_that_walk_segments_of_time(name: str) -> None:
    """Of one long sequence, and at the sizes at which the tests on a GPU test them."""
    problem = main_problem(name)
    long = problem._replace(sizes=problem.sizes._replace(b=LONG.b, t=LONG.t))
    tested = short_sizes(problem.case, "in segments", GPU)
    program = compile_and_check(long, 90, [tested])
    launched = {launch.kernel.name for launch in (*program.forward, *program.backward)}
    assert bool(launched & CHAINS) == (name not in WITHOUT_STATES), launched


@pytest.mark.offline
@pytest.mark.parametrize(("capability", "name"), ELSEWHERE)
def test_kernels_at_their_main_size_elsewhere(capability: int, name: str) -> None:
    assert compile_and_check(main_problem(name), capability).backward


@pytest.mark.offline
@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize(("dtype", "widths"), FORMATS, ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_kernels_of_heads(
    name: str, dtype: torch.dtype, widths: tuple[int, int], capability: int
) -> None:
    key, value = widths
    problem = Problem(name, MAIN._replace(k=key, v=value), dtype)
    compile_and_check(problem, capability)


@pytest.mark.offline
@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_kernels_of_channels(name: str, dtype: torch.dtype, capability: int) -> None:
    compile_and_check(main_problem(name)._replace(dtype=dtype), capability)
