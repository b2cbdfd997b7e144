r"""The compiled kernels as ARM64 code (NEON), on any Linux machine: a pytest plugin that compiles
them with Clang and runs them in an emulator, which sees this process's memory at its own addresses.

    pip install ziglang unicorn
    PYTHONPATH=tests/support python -m pytest -p arm64 \
        tests/kernels/test_native.py tests/recurrence/test_mesa.py -k "not avx2 and not forked"
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unicorn import UC_ARCH_ARM64, UC_MODE_ARM, UC_PROT_ALL, Uc
from unicorn import arm64_const as arm

from fastweights.kernels.native import build, library
from fastweights.kernels.native.abi import pack

COMPILER = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
IMAGE, IMAGE_SIZE = 0x1000_0000, 0x1100_0000
STACK, STACK_SIZE = 0x6000_0000, 1 << 24
LOCALS, RETURNED = 0x6800_0000, 0x7000_0000
PAGE = 1 << 12
FLOATING_POINT = 3 << 20
"""Of the register CPACR_EL1."""


def compiled() -> bytes:
    """All sources and arm64.c as one program."""
    with tempfile.TemporaryDirectory() as folder:
        objects = [
            build.compile_object(COMPILER, source, ["-DSOURCES=0"], folder)
            for source in build.COMMON
        ]
        objects += [
            build.compile_object(COMPILER, source, ["-DISA=portable"], folder)
            for source in build.KERNELS
        ]
        system = str(Path(__file__).with_suffix(".c"))
        objects += [build.compile_object(COMPILER, system, ["-fno-builtin", "-w"], folder)]
        program = Path(folder) / "program"
        linked = ["-static", f"-Wl,--image-base={IMAGE:#x}", *objects, "-lm", "-o", str(program)]
        subprocess.run([*COMPILER, *linked], check=True)
        return program.read_bytes()


def segments(program: bytes) -> Iterator[tuple[int, bytes]]:
    """(address, contents) of what an ELF file wants to have loaded."""
    (table,), (count,) = (
        struct.unpack_from("<Q", program, 32),
        struct.unpack_from("<H", program, 56),
    )
    for i in range(count):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", program, table + 56 * i)
        if kind == 1:
            yield address, program[offset : offset + size]


def symbols(program: bytes) -> dict[str, int]:
    """The addresses of an ELF file's names."""
    (table,), (count,) = (
        struct.unpack_from("<Q", program, 40),
        struct.unpack_from("<H", program, 60),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", program, table + 64 * i) for i in range(count)]
    _, _, _, _, offset, size, link, *_ = next(section for section in sections if section[1] == 2)
    names, found = sections[link][4], {}
    for entry in range(offset, offset + size, 24):
        name, _, _, address = struct.unpack_from("<IBxHQ", program, entry)
        found[program[names + name : program.index(b"\0", names + name)].decode()] = address
    return found


class Processor:
    """Calls a function of the program as `library.call` calls one of the extension."""

    def __init__(self, program: bytes) -> None:
        self.symbols, self.calls = symbols(program), Counter[str]()
        self.shared: set[tuple[int, int]] = set()
        self.emulator = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self.emulator.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
        for start, size in (
            (IMAGE, IMAGE_SIZE),
            (STACK, STACK_SIZE),
            (LOCALS, PAGE),
            (RETURNED, PAGE),
        ):
            self.emulator.mem_map(start, size)
        for address, contents in segments(program):
            self.emulator.mem_write(address, contents)
        self.emulator.reg_write(arm.UC_ARM64_REG_CPACR_EL1, FLOATING_POINT)

    def call(self, name: str, structure: Any) -> int:
        packed = ctypes.create_string_buffer(pack(structure))
        self._share()
        self.calls[name] += 1
        registers = {
            arm.UC_ARM64_REG_X0: ctypes.addressof(packed),
            arm.UC_ARM64_REG_SP: STACK + STACK_SIZE - PAGE,
            arm.UC_ARM64_REG_LR: RETURNED,
            arm.UC_ARM64_REG_TPIDR_EL0: LOCALS,
        }
        for register, value in registers.items():
            self.emulator.reg_write(register, value)
        self.emulator.emu_start(self.symbols[name], RETURNED)
        return self.emulator.reg_read(arm.UC_ARM64_REG_X0) & 0xFFFF_FFFF

    def _share(self) -> None:
        """The memory that this process may write now."""
        lines = re.findall(r"^(\w+)-(\w+) rw-", Path("/proc/self/maps").read_text(), re.MULTILINE)
        now = {(int(start, 16), int(end, 16)) for start, end in lines}
        for start, end in self.shared - now:
            self.emulator.mem_unmap(start, end - start)
        for start, end in now - self.shared:
            self.emulator.mem_map_ptr(start, end - start, UC_PROT_ALL, start)
        self.shared = now


PROCESSOR = Processor(compiled())
library.call = PROCESSOR.call


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(
        f"{PROCESSOR.calls.total()} calls of {len(PROCESSOR.calls)} functions as ARM64 code"
    )
