"""The compiler without a GPU says of small kernels what is known of them."""

from __future__ import annotations

import inspect

import pytest
import torch

pytest.importorskip("triton")

from fastweights.kernels.triton.chips import CHIPS, chip_of
from fastweights.kernels.triton.chunks import Chunks, ChunkStreams, chunk_states
from fastweights.kernels.triton.device import decay
from fastweights.kernels.triton.launch import launch
from fastweights.kernels.triton.streams import Strided
from fastweights.lab.bench.offline import Compiled, Log, offline
from small_kernels import exact, fill, square


def multiply(length: int, dtype: torch.dtype = torch.bfloat16, **options: object) -> None:
    x = torch.empty(1, length, 1, 64, dtype=dtype, device="meta")
    options = {"num_warps": 4, **options}
    streams = Strided.of(x), Strided.of(torch.empty_like(x))
    launch(square, (-(-length // 64),), *streams, length, width=64, C=64, **options)


def compiled(capability: int, **options: object) -> Compiled:
    with offline(CHIPS[capability]) as log:
        multiply(100, **options)
    (kernel,) = log.kernels
    return kernel


@pytest.mark.sampled
@pytest.mark.parametrize("capability", CHIPS)
def test_products_are_made_by_the_chips_tensor_cores(capability: int) -> None:
    kernel = compiled(capability)
    unit = {90: "HGMMA", 100: "UTCHMMA"}.get(capability, "HMMA")
    assert kernel.mix[unit] > 0
    assert kernel.name == "square"
    assert kernel.capability == capability
    assert (kernel.products, kernel.scalar_products) == (2, 0)
    assert (kernel.spill_stores, kernel.spill_loads, kernel.mix.get("STL", 0)) == (0, 0, 0)
    assert kernel.mix["MUFU"] >= 64 * 64 // 128
    assert 16 < kernel.registers <= 255
    assert 8192 <= kernel.shared_memory <= CHIPS[capability].shared_memory
    assert kernel.blocks >= 2
    assert kernel.instructions > sum(kernel.mix.values())


def test_the_log_has_every_launch_and_each_kernel_once() -> None:
    with offline(CHIPS[90]) as log:
        assert chip_of(torch.device("meta")) is CHIPS[90]
        for length in (100, 4096, 1):
            multiply(length)
        multiply(100, torch.float32)
    assert [launch.grid for launch in log.launches] == [(2,), (64,), (1,), (2,)]
    assert [k.mix["HGMMA"] for k in log.kernels] == [8, 48], "float32 takes three products"
    assert all(kernel.seconds > 0.05 for kernel in log.kernels)


def test_a_length_that_specialises_shows() -> None:
    def launched(log: Log, *widths: int) -> int:
        for width in widths:
            x = torch.empty(width, device="meta")
            launch(fill, (1,), x, width)
        return len(log.kernels)

    with offline(CHIPS[80]) as log:
        assert launched(log, 1, 5, 32) == 3
        assert launched(log, 7, 64) == 3


@pytest.mark.slow
def test_spills_are_seen() -> None:
    kernel = compiled(90, num_warps=1, dtype=torch.float32)
    assert kernel.spill_stores > 0
    assert kernel.spill_loads > 0
    assert kernel.mix["STL"] > 0


def test_a_transposed_product_is_seen() -> None:
    assert compiled(90).transposed_products == 0
    assert compiled(90, transposes=True).transposed_products == 1


def test_a_product_without_tensor_cores_is_seen() -> None:
    x = torch.empty(64, 64, device="meta")
    with offline(CHIPS[90]) as log:
        launch(exact, (1,), x, x, x)
    (kernel,) = log.kernels
    assert (kernel.products, kernel.scalar_products, kernel.matrix_instructions) == (1, 1, 0)


def test_the_loop_of_a_kernel_is_that_of_its_source() -> None:
    """One pass for each chunk: the walk over states has no other loop."""
    k, v, log_decay = (torch.empty(1, 640, 2, n, device="meta") for n in (64, 64, 1))
    with offline(CHIPS[90]) as log:
        chunks = Chunks.of(k, v, torch.bfloat16)
        streams = ChunkStreams(None, None, k.bfloat16(), log_decay, None, None)
        chunk_states(k.new_empty(1, 2, 64, 64), v.bfloat16(), streams, chunks)
    (code,) = (kernel.code for kernel in log.kernels)
    lines, first = inspect.getsourcelines(decay.states.fn)
    place = first + [line.strip().startswith("for i in range(") for line in lines].index(True)
    assert [loop.line for loop in code.loops] == [f"decay.py:{place}"]
    within, outside = (sum(names.values()) for names in code.per_pass)
    assert code.per_pass[0]["HGMMA"] == log.kernels[0].mix["HGMMA"] > 0
    assert code.issued(2, {f"decay.py:{place}": 20}) == 2 * outside + 20 * within


def test_each_context_compiles_anew() -> None:
    assert compiled(90) is not compiled(90)


def test_nothing_is_left_behind() -> None:
    from triton import knobs
    from triton.runtime import driver

    before = knobs.cache.dir, knobs.nvidia.dump_ptxas_log, driver._active
    compiled(90)
    assert (knobs.cache.dir, knobs.nvidia.dump_ptxas_log, driver._active) == before
