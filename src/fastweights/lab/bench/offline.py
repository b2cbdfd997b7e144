"""Triton kernels compiled for a GPU that need not be there, and what they take of it.

Inside `offline` every launch compiles its kernel for the chip and runs nothing. Tensors need no
numbers, so a problem of any size is compiled from tensors of the meta device:

    with offline(CHIPS[90]) as log:
        evaluate(record)
    assert all(kernel.spill_stores == 0 for kernel in log.kernels)

Registers, spills and shared memory are those that NVIDIA's assembler reports while it makes the
binary, instructions are read from the binary. Nothing is taken from a cache, so that `seconds` are
those of a user's first call.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from itertools import count
from typing import Any, NamedTuple

import torch

from fastweights.kernels.triton.chips import Chip, pretend
from fastweights.kernels.triton.launch import INTERPRETED, launch_with
from fastweights.lab.bench.disassembly import Code

MATRIX_UNITS = ("UTCHMMA", "UTCQMMA", "HGMMA", "QGMMA", "HMMA", "IMMA")
"""Instructions of tensor cores."""

INSTRUCTIONS = (
    *(*MATRIX_UNITS, "FFMA", "MUFU", "SHFL", "BAR"),
    *("LDG", "STG", "LDGSTS", "UTMALDG", "LDS", "STS", "LDSM", "STSM", "LDL", "STL"),
)
"""Those that are counted by name: products, special functions, memory, spills, waiting."""

REGISTERS = 65_536
"""Of 32 bits, in every multiprocessor; a thread may have 255."""

MOST_REGISTERS = 255

_devices = count(1)


class Multiprocessor(NamedTuple):
    """What the blocks of threads on one multiprocessor share.

    Attributes:
        shared_memory: bytes
        threads: at most
        blocks: at most
    """

    shared_memory: int
    threads: int
    blocks: int


MULTIPROCESSORS = {
    80: Multiprocessor(164 << 10, 2048, 32),
    86: Multiprocessor(100 << 10, 1536, 16),
    89: Multiprocessor(100 << 10, 1536, 24),
    90: Multiprocessor(228 << 10, 2048, 32),
    100: Multiprocessor(228 << 10, 2048, 32),
}
"""By capability (CUDA C++ Programming Guide, technical specifications)."""


@dataclass(frozen=True)
class Compiled:
    """One kernel in one specialisation, compiled for one chip.

    Attributes:
        name: of the kernel's function
        capability: of the chip
        registers: per thread
        spill_stores, spill_loads: bytes per thread that the registers do not hold
        shared_memory: bytes per block
        products: matrix products in the kernel's text
        scalar_products: those of them that are made without tensor cores
        transposed_products: products that are transposed in registers and multiplied again, which
            Triton before 3.7.1 compiles wrongly for Hopper
        code: the instructions of the binary
        seconds: of compilation, by the clock of one processor that does nothing else
    """

    name: str
    capability: int
    warps: int
    stages: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    products: int
    scalar_products: int
    transposed_products: int
    code: Code
    seconds: float

    @property
    def instructions(self) -> int:
        """In the binary, once each."""
        return len(self.code.instructions)

    @cached_property
    def mix(self) -> dict[str, int]:
        """How many of them are of the kinds in `INSTRUCTIONS`."""
        names = (one.name for one in self.code.instructions)
        return dict(Counter(name for name in names if name in INSTRUCTIONS))

    @property
    def blocks(self) -> int:
        """How many blocks of threads are on a multiprocessor at once."""
        shared, threads, most = MULTIPROCESSORS[self.capability]
        by_register = REGISTERS // (-(-self.registers // 8) * 8 * 32 * self.warps)
        by_memory = shared // (self.shared_memory + 1024)
        return min(by_register, by_memory, threads // (32 * self.warps), most)

    @property
    def matrix_instructions(self) -> int:
        """Instructions of tensor cores in the binary."""
        return sum(self.mix.get(name, 0) for name in MATRIX_UNITS)


class Launch(NamedTuple):
    """A kernel, and how many programs of it start."""

    kernel: Compiled
    grid: tuple[int, ...]


@dataclass
class Log:
    """What was launched, in order."""

    launches: list[Launch] = field(default_factory=list)

    @property
    def kernels(self) -> list[Compiled]:
        """Every kernel that was compiled, once."""
        return list({id(launch.kernel): launch.kernel for launch in self.launches}.values())


@contextmanager
def offline(chip: Chip) -> Iterator[Log]:
    """Inside the block, launches compile for `chip`, as which the kernels are configured too.

    Raises:
        RuntimeError: where Triton interprets, and hence compiles nothing
    """
    if INTERPRETED:
        raise RuntimeError("with TRITON_INTERPRET=1 nothing is compiled")
    from triton import knobs, runtime

    log, known = Log(), {}
    drivers: Any = runtime.driver
    before = drivers._active

    def compile_only(
        kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        printed, start = StringIO(), _processor_time()
        with redirect_stdout(printed):
            found = kernel.run(*arguments, grid=grid, warmup=True, **options)
        seconds = _processor_time() - start
        if id(found) not in known:
            known[id(found)] = found, _describe(found, printed.getvalue(), seconds)
        log.launches.append(Launch(known[id(found)][1], grid))

    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="triton-"))
        for settings in (knobs.cache, knobs.nvidia):
            stack.enter_context(settings.scope())
        knobs.cache.dir = cache
        knobs.nvidia.dump_ptxas_log = True
        drivers.set_active(_NoGPU(chip))
        stack.callback(drivers.set_active, before)
        stack.enter_context(pretend(chip))
        stack.enter_context(launch_with(compile_only))
        yield log


class _NoGPU:
    """As much of Triton's driver as compilation asks: which GPU it is.

    Triton keeps what it compiled by device, hence each has a number of its own.
    """

    def __init__(self, chip: Chip) -> None:
        from triton.backends.compiler import GPUTarget

        self.device = next(_devices)
        self.target = GPUTarget("cuda", chip.capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _describe(kernel: Any, assembler: str, seconds: float) -> Compiled:
    """The record of Triton's compiled kernel, given what the assembler printed."""
    return Compiled(
        name=kernel.metadata.name,
        capability=kernel.metadata.target.arch,
        warps=kernel.metadata.num_warps,
        stages=kernel.metadata.num_stages,
        registers=_number(r"Used (\d+) registers", assembler),
        spill_stores=_number(r"(\d+) bytes spill stores", assembler),
        spill_loads=_number(r"(\d+) bytes spill loads", assembler),
        shared_memory=kernel.metadata.shared,
        products=len(re.findall(r"\btt\.dot\b", kernel.asm["ttir"])),
        scalar_products=len(re.findall(r"\btt\.dot\b.*-> tensor<[^>]*#blocked", _layouts(kernel))),
        transposed_products=len(
            re.findall(r"\btt\.trans\b.*#mma\d*> -> .*#linear", _layouts(kernel))
        ),
        code=Code.of(kernel.asm["cubin"]),
        seconds=seconds,
    )


def _layouts(kernel: Any) -> str:
    """The kernel's text with the layout of every tile in registers."""
    return kernel.asm["ttgir"]


def _processor_time() -> float:
    """Seconds of this process and of the assemblers that it has waited for."""
    return sum(os.times()[:4])


def _number(pattern: str, text: str) -> int:
    """Raises ValueError if the assembler has not said it."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the assembler has not printed {pattern!r}:\n{text}")
    return int(found[1])
